"""`sqrtdk check MODEL`: audit every attention of a model, also against a baseline file that is kept for review."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from sqrtdk._language import Choice
from sqrtdk.cli import options
from sqrtdk.cli.audit_reports import NO_REPORTS, AuditReports, Reports, show
from sqrtdk.cli.errors import fail, reported
from sqrtdk.cli.output import announce, tell_reader, working, write_stderr
from sqrtdk.cli.process import EXIT_FAILED
from sqrtdk.errors import InvalidValueError, SqrtdkError
from sqrtdk.messages import Message, word
from sqrtdk.models.options import LoadOptions

if TYPE_CHECKING:
    from sqrtdk.audit.records import CheckReport

Attn = Annotated[
    Literal["eager", "sdpa", "both"] | None,
    typer.Option("--attn", help="cli.options.attn_or_both", show_default="cli.defaults.own"),
]

Input = Annotated[
    Path | None, typer.Option("--input", metavar="FILE", help="cli.check.input", show_default="cli.defaults.input")
]
_HELP = "sqrtdk check --help"


class _Laws(NamedTuple):
    """What --laws and --laws-seconds say."""

    names: str | None
    seconds: float | None


def check_verb(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="cli.check.model")],
    loading: Annotated[
        LoadOptions, options.LoadingFields(instead={"attn": Attn, "input_file": Input})
    ] = options.DEFAULT_LOADING,
    laws: options.Laws = None,
    laws_seconds: options.LawsSeconds = None,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="cli.check.baseline", show_default="cli.defaults.no_baseline"),
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="cli.check.update")] = False,
    wanted: Reports = NO_REPORTS,
    fail_on: options.FailOn = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Audit every attention of a model, print or write the report, and end with its exit code.

    Args:
        models: Name or path of the model, or of several, each of which is audited on its own.
        loading: How to load it, and the inputs that it runs on.
        laws: Which laws to check; None for the default.
        laws_seconds: Time limit of the laws; None for the default.
        baseline: File to compare with, so that only what changed counts; None for no comparison.
        update: Whether to write the baseline anew, in which case nothing fails.
        wanted: Which reports to write, and their files.
        fail_on: Least severity of a finding that gives the exit code 1.
        lang: Language of the report.
        show_traceback: Whether an error shows its traceback.

    Raises:
        typer.Exit: Always at the end, with the exit code.
    """
    model, *others = models
    asked = _Laws(laws, laws_seconds)
    with reported(show_traceback):
        _refuse_unfit(wanted, others, loading.static, baseline, update, fail_on)
        wanted.refuse_unwritable()  # before torch is imported
        if others or (loading.static and baseline is None and not wanted and model.lower().endswith(".json")):
            code = _check_each([model, *others], loading, laws, fail_on, lang, show_traceback)
        elif baseline is None:
            code = show(_audited(model, loading, asked, fail_on), wanted, lang)
        elif update:
            code = _renew(model, loading, asked, baseline, wanted, lang)
        else:
            from sqrtdk.audit.baseline import compare_with_baseline, read_baseline

            before = read_baseline(baseline, model)
            report = _audited(model, loading, asked, fail_on)
            code = show(report, wanted, lang, compare_with_baseline(before, report, str(baseline)))
    raise typer.Exit(code)


def _refuse_unfit(
    wanted: AuditReports, others: Sequence[str], static: bool, baseline: Path | None, update: bool, fail_on: str
) -> None:
    """Check that the options fit each other.

    Raises:
        InvalidValueError: They do not.
    """
    if update and baseline is None:
        raise InvalidValueError(Message("errors.options.update_alone"), hint=Message("errors.hint.update_alone"))
    if others:
        if not static:
            options.refuse_file_of_json(sys.argv, others)
            raise InvalidValueError(
                Message("errors.options.several_models", count=len(others) + 1),
                hint=Message("errors.hint.several_models"),
            )
        where = Message("errors.options.with_several_models")
        options.refuse_ignored({"--baseline": baseline, **wanted.by_option}, where, _HELP)
    if baseline is not None:
        options.refuse_ignored(
            {"--html": wanted.html, "--junit": wanted.junit},
            Message("errors.options.with_option", option="--baseline"),
            _HELP,
        )
    if update:
        never = {f"--fail-on {fail_on}": fail_on != "fail"}
        options.refuse_ignored(never, Message("errors.options.with_option", option="--update"), _HELP)


def _audited(model: str, loading: LoadOptions, asked: _Laws, fail_on: str) -> CheckReport:

    with working(Message("progress.checking", model=model)):
        from sqrtdk.models.names import check_name

        check_name(model, loading.revision, announce)
        from sqrtdk._check import check_with

        command = shlex.join(["sqrtdk", *sys.argv[1:]])
        return check_with(
            model, None, loading, laws=asked.names, laws_seconds=asked.seconds, fail_on=fail_on, command=command
        )


def _renew(model: str, loading: LoadOptions, asked: _Laws, file: Path, wanted: AuditReports, lang: Choice) -> int:
    """Write the baseline file, and show what changed since it was written before."""
    from sqrtdk import _files
    from sqrtdk.audit.baseline import Ledger, compare_with_baseline, ledger_of, read_for_update
    from sqrtdk.report.check.baseline import ledger_line, to_file
    from sqrtdk.report.plain import plain

    _files.check_writable(file, force=True)  # before the model runs
    before = read_for_update(file, wanted.force)
    report = _audited(model, loading, asked, "never")
    if before is not None and before.mode != report.mode and wanted.force:
        before = None
    now = ledger_of(report)
    if before is not None or wanted:
        comparison = compare_with_baseline(before or Ledger(now.model, now.mode, ()), report, str(file))
        show(report, wanted, lang, comparison)
    _files.write_text(file, to_file(now), force=True)
    tell_reader(Message("progress.baseline", path=plain(str(file))))
    write_stderr(ledger_line(now, options.language_of_choice(lang)))
    return 0


def _check_each(
    models: Sequence[str], loading: LoadOptions, laws: str | None, fail_on: str, lang: Choice, show_traceback: bool
) -> int:
    """Judge configs one by one, without weights; return the worst exit code.

    What is found is printed for each, and an error of one does not stop the others.

    A JSON file without a `model_type` is not a config of a model. It is left out with a message, as a pre-commit hook
    passes every file that fits its pattern.
    """
    from sqrtdk._check import check_with
    from sqrtdk.cli.output import PIPE_WIDTH, colors, print_text, width
    from sqrtdk.models.config import read_config_dict
    from sqrtdk.models.names import check_name
    from sqrtdk.report.check.terminal import summary_line, to_text
    from sqrtdk.report.console import line
    from sqrtdk.report.plain import plain

    language, codes = options.language_of_choice(lang), {0}
    for model in models:
        try:
            if model.lower().endswith(".json") and "model_type" not in read_config_dict(Path(model)):
                tell_reader(Message("progress.no_model_type", file=plain(model)))
                continue
            check_name(model, loading.revision, announce)
            report = check_with(model, None, loading, laws=laws, fail_on=fail_on)
        except SqrtdkError as error:
            tell_reader(Message("progress.not_checked", file=plain(model)))
            fail(error, show_traceback)
            codes.add(EXIT_FAILED)
            continue
        quiet = len(models) > 1 and not report.exit_code and not report.unjudged
        sentence = plain(model) + word("words.mark.colon", language) + summary_line(report, language)
        wide = len(sentence.encode()) if width() == PIPE_WIDTH else width()  # unwrapped in a log
        print_text(line(sentence, wide) if quiet else to_text(report, width=width(), color=colors(), language=language))
        codes.add(report.exit_code)
    return max(codes)
