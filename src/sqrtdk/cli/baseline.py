"""`sqrtdk baseline` keeps what a model's attentions do in a file for review; a later run fails on changes."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sqrtdk.cli import options
from sqrtdk.cli.errors import reported
from sqrtdk.cli.verbs import group_of, register
from sqrtdk.messages import Message
from sqrtdk.models.options import LoadOptions

if TYPE_CHECKING:
    from sqrtdk.audit.records import CheckReport

baseline = group_of("baseline")
FILE = "sqrtdk-baseline.json"

Model = Annotated[str, typer.Argument(metavar="MODEL", help="cli.baseline.model")]
BaselineFile = Annotated[Path, typer.Argument(metavar="FILE", help="cli.baseline.file")]


def write_baseline(
    model: Model,
    file: BaselineFile = Path(FILE),
    loading: options.Loading = options.DEFAULT_LOADING,
    laws: options.Laws = None,
    force: options.Force = False,
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run a model, and write what its attentions do to a baseline file."""
    with reported(show_traceback):
        from sqrtdk import _files

        _files.check_writable(file, force)  # before torch is imported and the model runs
        from sqrtdk.audit.baseline import ledger_of
        from sqrtdk.cli.output import tell_reader, write_stderr
        from sqrtdk.report.baseline import ledger_line, to_file
        from sqrtdk.report.plain import plain

        kept = ledger_of(_checked(model, loading, laws, "never"))
        _files.write_text(file, to_file(kept), force)
        tell_reader(Message("progress.baseline", path=plain(str(file))))
        write_stderr(ledger_line(kept, options.language_of_choice(lang)))


def check_against_baseline(
    model: Model,
    file: BaselineFile = Path(FILE),
    loading: options.Loading = options.DEFAULT_LOADING,
    laws: options.Laws = None,
    json_: options.Json = False,
    output: options.Output = None,
    sarif: options.Sarif = None,
    markdown: options.Markdown = None,
    force: options.Force = False,
    fail_on: Annotated[options.Severity, typer.Option(help="cli.baseline.fail_on")] = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Run a model, and say what its attentions do otherwise than a baseline file says."""
    with reported(show_traceback):
        from sqrtdk import _files

        comment = options.file_or_stdout(markdown, json_ and output is None)
        _files.check_outputs((output, sarif, comment), force)  # before torch is imported and the model runs
        from sqrtdk.audit.baseline import compare_with_baseline, read_baseline
        from sqrtdk.cli.output import colors, print_text, say_written, width, write_stderr
        from sqrtdk.report.baseline import baseline_summary_line, to_json, to_markdown, to_text
        from sqrtdk.report.sarif import to_sarif

        before = read_baseline(file)
        report = _checked(model, loading, laws, fail_on)
        comparison = compare_with_baseline(before, report, str(file))
        language = options.language_of_choice(lang)
        wanted = [(output, to_json(comparison), "JSON")] if output is not None else []
        wanted += [(comment, to_markdown(comparison, language), "Markdown")] if comment is not None else []
        wanted += [(sarif, to_sarif(report), "SARIF")] if sarif is not None else []
        for path, document, kind in wanted:
            _files.write_text(path, document, force)
            say_written(kind, path)
        if (json_ and output is None) or markdown == options.STDOUT:
            print_text(to_markdown(comparison, language) if markdown == options.STDOUT else to_json(comparison))
            write_stderr(baseline_summary_line(comparison, language))
        else:
            print_text(to_text(comparison, width=width(), color=colors(), language=language))
        code = comparison.exit_code
    raise typer.Exit(code)


register(baseline, write_baseline, "write")
register(baseline, check_against_baseline, "check")


def _checked(model: str, loading: LoadOptions, laws: str | None, fail_on: str) -> CheckReport:
    from sqrtdk.cli.output import announce, working

    with working(Message("progress.checking", model=model)):
        from sqrtdk.models.names import check_name

        check_name(model, loading.revision, announce)
        from sqrtdk._check import check_with

        command = shlex.join(["sqrtdk", *sys.argv[1:]])
        return check_with(model, None, loading, laws=laws, fail_on=fail_on, command=command)
