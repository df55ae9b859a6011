"""`sqrtdk kv MODEL` forecasts what a cache of k and v in fewer bits does to every attention."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.audit_reports import NO_REPORTS, Reports, show
from sqrtdk.cli.errors import reported
from sqrtdk.messages import Message
from sqrtdk.models.options import LoadOptions

CacheDtype = Literal["fp8_e4m3", "fp8_e5m2", "int8", "q8_0", "int4"]


def kv(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="cli.kv.model")],
    loading: Annotated[LoadOptions, options.LoadingFields(without=("static",))] = options.DEFAULT_LOADING,
    cache_dtype: Annotated[
        CacheDtype | None,
        typer.Option("--cache-dtype", help="cli.kv.cache_dtype", show_default="cli.defaults.all_formats"),
    ] = None,
    cache_scale: Annotated[
        str | None,
        typer.Option("--cache-scale", metavar="GRAIN", help="cli.kv.cache_scale", show_default="cli.defaults.kv_scale"),
    ] = None,
    rows: Annotated[
        int | None, typer.Option("--rows", min=1, metavar="N", help="cli.kv.rows", show_default="256")
    ] = None,
    wanted: Reports = NO_REPORTS,
    fail_on: options.FailOn = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Audit a model without its laws, forecast its cache, print or write the report, and end with its exit code.

    Args:
        model: Name or path of the model.
        loading: How to load it, and the inputs that it runs on.
        cache_dtype: Format of the quantised cache; None for all formats.
        cache_scale: Which values share a scale ("tensor", "head", "token", "channel"), or one number as the scale of
            all; None for the default of the format.
        rows: Largest number of rows of a call that are computed; None for 256.
        wanted: Which reports to write, and their files.
        fail_on: Least severity of a finding that gives the exit code 1.
        lang: Language of the report.
        show_traceback: Whether an error shows its traceback.

    Raises:
        typer.Exit: Always at the end, with the exit code.
    """
    with reported(show_traceback):
        wanted.refuse_unwritable()  # before torch is imported
        from sqrtdk.cli.output import announce, working

        with working(Message("progress.checking", model=model)):
            from sqrtdk.models.names import check_name

            check_name(model, loading.revision, announce)
            from sqrtdk.kv.request import audit_and_forecast, requests_of

            report = audit_and_forecast(
                model,
                loading,
                requests_of(model, cache_dtype, cache_scale, rows),
                laws="none",
                fail_on=fail_on,
                command=shlex.join(["sqrtdk", *sys.argv[1:]]),
            )
        code = show(report, wanted, lang)
    raise typer.Exit(code)
