"""`sqrtdk check [MODEL]`: audit every attention of a model."""

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

Attn = Annotated[
    Literal["eager", "sdpa", "both"] | None,
    typer.Option("--attn", help="cli.options.attn_or_both", show_default="cli.defaults.own"),
]
KvDtype = Literal["fp8_e4m3", "fp8_e5m2", "int8", "q8_0", "int4"]
_LOADING_OF_A_DIFF = ("input_file", "seed", "trust_remote_code")
_OF_A_DIFF: dict[str, Literal["different", "unmeasured", "never"]] = {  # --fail-on of check -> of diff
    "fail": "different",
    "unmeasured": "unmeasured",
    "never": "never",
}


def check(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="cli.check.model")] = "demo",
    loading: Annotated[LoadOptions, options.LoadingFields(instead={"attn": Attn})] = options.DEFAULT_LOADING,
    laws: options.Laws = None,
    like: Annotated[
        str | None, typer.Option(metavar="MODEL", help="cli.check.like", show_default="cli.defaults.no_model")
    ] = None,
    run_graph: Annotated[bool, typer.Option("--run", help="cli.check.run")] = False,
    kv_dtype: Annotated[
        KvDtype | None,
        typer.Option("--kv-dtype", help="cli.check.kv_dtype", show_default="cli.defaults.no_forecast"),
    ] = None,
    kv_scale: Annotated[
        str | None,
        typer.Option("--kv-scale", metavar="GRAIN", help="cli.check.kv_scale", show_default="cli.defaults.kv_scale"),
    ] = None,
    kv_rows: Annotated[
        int | None, typer.Option("--kv-rows", min=1, metavar="N", help="cli.check.kv_rows", show_default="256")
    ] = None,
    json_: options.Json = False,
    output: options.Output = None,
    html: options.Html = None,
    sarif: options.Sarif = None,
    junit: options.Junit = None,
    markdown: options.Markdown = None,
    force: options.Force = False,
    fail_on: options.FailOn = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Audit every attention of a model, print or write the report, and end with its exit code."""
    if like is not None and run_graph:
        from sqrtdk.cli.diff import diff

        with reported(show_traceback):
            unused = {
                f"--{name.replace('_', '-')}": getattr(loading, name)
                for name in options.LOADING
                if name not in _LOADING_OF_A_DIFF
            }
            unused |= {
                "--laws": laws, "--kv-dtype": kv_dtype, "--kv-scale": kv_scale, "--kv-rows": kv_rows, "--sarif": sarif,
                "--junit": junit, "--markdown": markdown, f"--fail-on {fail_on}": fail_on not in _OF_A_DIFF,
            }  # fmt: skip
            where, instead = Message("errors.options.as_diff"), f"sqrtdk diff {like} {model} --help"
            options.refuse_ignored(unused, where, instead)
        diff(  # ends with typer.Exit, so the audit below does not run
            like,
            model,
            LoadOptions(**{name: getattr(loading, name) for name in _LOADING_OF_A_DIFF}),
            json_=json_,
            output=output,
            html=html,
            force=force,
            lang=lang,
            show_traceback=show_traceback,
            fail_on=_OF_A_DIFF[fail_on],
        )
    with reported(show_traceback):
        from sqrtdk import _files

        comment = options.file_or_stdout(markdown, json_ and output is None)
        _files.check_outputs((output, html, sarif, junit, comment), force)  # before torch is imported
        from sqrtdk.cli.output import announce, colors, print_text, say_written, width, working, write_stderr

        with working(Message("progress.checking", model=model)):
            from sqrtdk.models.names import check_name

            check_name(model, loading.revision, announce)
            from sqrtdk.kv.request import check_and_forecast, request_of
            from sqrtdk.report.html import to_html
            from sqrtdk.report.json import to_json
            from sqrtdk.report.junit import to_junit
            from sqrtdk.report.markdown import to_markdown
            from sqrtdk.report.sarif import to_sarif
            from sqrtdk.report.terminal import summary_line, to_text

            cache = request_of(model, kv_dtype, kv_scale, kv_rows, loading.static)
            command = shlex.join(["sqrtdk", *sys.argv[1:]])
            report = check_and_forecast(
                model, loading, cache, laws=laws, fail_on=fail_on, command=command, like=like, run_graph=run_graph
            )
            language = options.language_of_choice(lang)
            documents: tuple[tuple[Path | None, Callable[[], str], str], ...] = (
                (output, lambda: to_json(report), "JSON"),
                (html, lambda: to_html(report, lang), "HTML"),
                (sarif, lambda: to_sarif(report), "SARIF"),
                (junit, lambda: to_junit(report), "JUnit XML"),
                (comment, lambda: to_markdown(report, language), "Markdown"),
            )
            wanted = [(path, draw(), kind) for path, draw, kind in documents if path is not None]
        for path, document, kind in wanted:
            _files.write_text(path, document, force)
            say_written(kind, path)
        if (json_ and output is None) or markdown == options.STDOUT:
            print_text(to_markdown(report, language) if markdown == options.STDOUT else to_json(report))
            write_stderr(summary_line(report, language))
        else:
            print_text(to_text(report, width=width(), color=colors(), language=language))
        code = report.exit_code
    raise typer.Exit(code)
