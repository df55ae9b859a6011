"""`sqrtdk diff A B` says where two implementations of one model differ, and why."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.messages import Message
from sqrtdk.models.options import LoadOptions

FailOn = Literal["different", "unmeasured", "never"]

_NOT_OF_TWO = ("static", "device_map", "offload_folder")  # loading options that a comparison does not have
_FILES = (".safetensors", ".onnx", ".pt2")  # endings of sides that are files, not model names


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="cli.diff.a")],
    b: Annotated[str, typer.Argument(metavar="B", help="cli.diff.b")],
    loading: Annotated[LoadOptions, options.LoadingFields(without=_NOT_OF_TWO)] = options.DEFAULT_LOADING,
    attn_a: Annotated[
        Literal["eager", "sdpa"] | None,
        typer.Option("--attn-a", help="cli.diff.of_a", show_default="cli.defaults.as_attn"),
    ] = None,
    attn_b: Annotated[
        Literal["eager", "sdpa"] | None,
        typer.Option("--attn-b", help="cli.diff.of_b", show_default="cli.defaults.as_attn"),
    ] = None,
    dtype_a: Annotated[
        str | None,
        typer.Option("--dtype-a", metavar="DTYPE", help="cli.diff.of_a", show_default="cli.defaults.as_dtype"),
    ] = None,
    dtype_b: Annotated[
        str | None,
        typer.Option("--dtype-b", metavar="DTYPE", help="cli.diff.of_b", show_default="cli.defaults.as_dtype"),
    ] = None,
    device_a: Annotated[
        str | None,
        typer.Option("--device-a", metavar="DEVICE", help="cli.diff.of_a", show_default="cli.defaults.as_device"),
    ] = None,
    device_b: Annotated[
        str | None,
        typer.Option("--device-b", metavar="DEVICE", help="cli.diff.of_b", show_default="cli.defaults.as_device"),
    ] = None,
    revision_a: Annotated[
        str | None,
        typer.Option("--revision-a", metavar="NAME", help="cli.diff.of_a", show_default="cli.defaults.as_revision"),
    ] = None,
    revision_b: Annotated[
        str | None,
        typer.Option("--revision-b", metavar="NAME", help="cli.diff.of_b", show_default="cli.defaults.as_revision"),
    ] = None,
    kv_scale: Annotated[
        float | None,
        typer.Option("--kv-scale", metavar="NUMBER", help="cli.diff.kv_scale", show_default="cli.defaults.found"),
    ] = None,
    mapping: Annotated[
        Path | None,
        typer.Option("--map", metavar="FILE", help="cli.diff.map", show_default="cli.defaults.guessed"),
    ] = None,
    json_: options.Json = False,
    output: options.Output = None,
    html: options.Html = None,
    force: options.Force = False,
    fail_on: Annotated[FailOn, typer.Option(help="cli.diff.fail_on")] = "different",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run two models on the same inputs, print or write where they differ, and end with the exit code."""
    with reported(show_traceback):
        from sqrtdk import _files

        _files.check_outputs((output, html), force)  # before torch is imported and the models run
        from sqrtdk.cli.output import announce, colors, print_text, say_written, width, working, write_stderr

        with working(Message("progress.comparing", a=a, b=b)):
            from sqrtdk.models.names import check_name

            for model, own in ((a, revision_a), (b, revision_b)):
                if not model.lower().endswith(_FILES):
                    check_name(model, own or loading.revision, announce)
            from sqrtdk.compare.diff import diff_with
            from sqrtdk.compare.sides import options_of_sides
            from sqrtdk.report.diff import diff_summary_line, to_text
            from sqrtdk.report.diff_html import to_html
            from sqrtdk.report.diff_json import to_json

            of_a, of_b = options_of_sides(
                loading,
                attn=(attn_a, attn_b),
                dtype=(dtype_a, dtype_b),
                device=(device_a, device_b),
                revision=(revision_a, revision_b),
            )
            command = shlex.join(["sqrtdk", *sys.argv[1:]])
            report = diff_with(
                a, b, None, of_a, of_b, mapping=mapping, kv_scale=kv_scale, fail_on=fail_on, command=command
            )
            documents: tuple[tuple[Path | None, Callable[[], str], str], ...]
            documents = ((output, lambda: to_json(report), "JSON"), (html, lambda: to_html(report, lang), "HTML"))
            wanted = [(path, draw(), kind) for path, draw, kind in documents if path is not None]
        for path, document, kind in wanted:
            _files.write_text(path, document, force)
            say_written(kind, path)
        if json_ and output is None:
            print_text(to_json(report))
            write_stderr(diff_summary_line(report, options.language_of_choice(lang)))
        else:
            print_text(to_text(report, width=width(), color=colors(), language=options.language_of_choice(lang)))
        code = report.exit_code
    raise typer.Exit(code)
