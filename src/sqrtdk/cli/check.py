"""`sqrtdk check MODEL`: audit every attention of a model, also against a baseline file that is kept for review."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import typer

from sqrtdk._language import Choice
from sqrtdk.cli import options
from sqrtdk.cli.audit_reports import NO_REPORTS, AuditReports, Reports, show
from sqrtdk.cli.check_several import Several, audit_static
from sqrtdk.cli.errors import reported
from sqrtdk.cli.kept_apart import kept_apart
from sqrtdk.cli.output import announce, tell_reader, working, write_stderr
from sqrtdk.cli.process import ranks_started, said_once
from sqrtdk.cli.server import NO_SERVER, Servers, check_address
from sqrtdk.errors import InvalidValueError
from sqrtdk.messages import Message
from sqrtdk.models.names import is_address
from sqrtdk.models.options import LoadOptions

if TYPE_CHECKING:
    from sqrtdk.audit.records import CheckReport
    from sqrtdk.ranks.group import RankGroup

Attn = Annotated[
    Literal["eager", "sdpa", "both"] | None,
    typer.Option("--attn", help="cli.options.attn_or_both", show_default="cli.defaults.own"),
]

Input = Annotated[
    Path | None, typer.Option("--input", metavar="FILE", help="cli.check.input", show_default="cli.defaults.input")
]
_HELP = "sqrtdk check --help"


class _Laws(NamedTuple):
    """What --laws, --laws-seconds and --run say."""

    names: str | None
    seconds: float | None
    run: bool


def check_verb(
    models: Annotated[list[str], typer.Argument(metavar="MODEL", help="cli.check.model")],
    loading: Annotated[
        LoadOptions, options.LoadingFields(instead={"attn": Attn, "input_file": Input})
    ] = options.DEFAULT_LOADING,
    run: Annotated[bool, typer.Option("--run", help="cli.check.run")] = False,
    laws: options.Laws = None,
    laws_seconds: options.LawsSeconds = None,
    laws_reasons: Annotated[bool, typer.Option("--laws-reasons", help="cli.check.laws_reasons")] = False,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="FILE", help="cli.check.baseline", show_default="cli.defaults.no_baseline"),
    ] = None,
    update: Annotated[bool, typer.Option("--update", help="cli.check.update")] = False,
    server: Servers = NO_SERVER,
    wanted: Reports = NO_REPORTS,
    fail_on: options.FailOn = "fail",
    lang: options.Lang = "auto",
    show_traceback: options.ShowTraceback = False,
) -> None:
    """Audit every attention of a model, print or write the report, and end with its exit code.

    Args:
        models: Name or path of the model, or of several, each of which is audited on its own.
        loading: How to load it, and the inputs that it runs on.
        run: Whether a GGUF file runs in llama.cpp, and is not only read.
        laws: Which laws to check; None for the default.
        laws_seconds: Time limit of the laws; None for the default.
        laws_reasons: Whether the report says why each law that was not asked was not.
        baseline: File to compare with, so that only what changed counts; None for no comparison.
        update: Whether to write the baseline anew, in which case nothing fails.
        server: How a server is asked, where the model is an address.
        wanted: Which reports to write, and their files.
        fail_on: Least severity of a finding that gives the exit code 1.
        lang: Language of the report.
        show_traceback: Whether an error shows its traceback.

    Raises:
        typer.Exit: Always at the end, with the exit code.
    """
    model, *others = models
    asked = _Laws(laws, laws_seconds, run)
    with reported(show_traceback), ranks_started() as ranks:
        if not is_address(model):
            options.refuse_ignored(server.by_option, Message("errors.options.without_server"), _HELP)
        _refuse_unfit(wanted, others, baseline, update, fail_on, laws_reasons)
        wanted.refuse_unwritable()  # before torch is imported
        if is_address(model):
            _refuse_ranks(ranks, Message("errors.ranks.server"))
            _refuse_without_model(others, loading, baseline, laws_seconds, laws_reasons)
            code = check_address(model, server, laws, wanted, fail_on, lang)
        elif others or (loading.static and baseline is None and not wanted and model.lower().endswith(".json")):
            _refuse_ranks(ranks, Message("errors.ranks.without_run"))
            several = Several(
                tuple(models), lambda name, bar: _audit(name, loading, asked, bar), loading, wanted, fail_on, lang,
                show_traceback, laws_reasons,
            )  # fmt: skip
            code = kept_apart(several.names, lambda kept: _several(replace(several, kept=kept), baseline, update))
        elif baseline is None:
            report = _audited(model, loading, asked, fail_on, ranks)
            code = said_once(ranks, lambda: show(report, wanted, lang, reasons=laws_reasons))
        elif update:
            _refuse_ranks(ranks, "--update")
            code = _renew(model, loading, asked, baseline, wanted, lang)
        else:
            from sqrtdk.audit.baseline_file import read_baseline
            from sqrtdk.audit.config_changes import compare_model

            before = read_baseline(baseline, model)
            report = _audited(model, loading, asked, fail_on, ranks)
            comparison = compare_model(before, report, str(baseline), model, loading, audit_static)
            code = said_once(ranks, lambda: show(report, wanted, lang, comparison))
    raise typer.Exit(code)


def _several(several: Several, baseline: Path | None, update: bool) -> int:
    if baseline is None:
        return several.check()
    return several.renew(baseline) if update else several.check_against(baseline)


def _refuse_ranks(ranks: RankGroup | None, what: str) -> None:
    """Check that no other ranks were started.

    Raises:
        InvalidValueError: There are others.
    """
    if ranks is not None:
        raise InvalidValueError(
            Message("errors.ranks.alone", what=what, size=ranks.size), hint=Message("errors.hint.ranks_alone")
        )


def _refuse_unfit(
    wanted: AuditReports, others: Sequence[str], baseline: Path | None, update: bool, fail_on: str, reasons: bool
) -> None:
    """Check that the options fit each other.

    Raises:
        InvalidValueError: They do not.
    """
    if update and baseline is None:
        raise InvalidValueError(Message("errors.options.update_alone"), hint=Message("errors.hint.update_alone"))
    if others:
        options.refuse_file_of_json(sys.argv, others)
        if any(map(is_address, others)):
            raise InvalidValueError(
                Message("errors.options.several_servers", count=len(others) + 1),
                hint=Message("errors.hint.several_servers"),
            )
    if baseline is not None:
        options.refuse_ignored(
            {"--html": None if others else wanted.html, "--junit": wanted.junit, "--laws-reasons": reasons},
            Message("errors.options.with_option", option="--baseline"),
            _HELP,
        )
    if update:
        never = {f"--fail-on {fail_on}": fail_on != "fail"}
        options.refuse_ignored(never, Message("errors.options.with_option", option="--update"), _HELP)


def _refuse_without_model(
    others: Sequence[str], loading: LoadOptions, baseline: Path | None, seconds: float | None, reasons: bool
) -> None:
    """Check that no option is given that needs a model which can be opened.

    Raises:
        InvalidValueError: One is.
    """
    if others:
        raise InvalidValueError(
            Message("errors.options.several_servers", count=len(others) + 1),
            hint=Message("errors.hint.several_servers"),
        )
    given = [
        field.name for field in fields(loading) if getattr(loading, field.name) != getattr(LoadOptions(), field.name)
    ]
    named = {f"--{name.removesuffix('_file').replace('_', '-')}": True for name in given}
    ignored = named | {"--baseline": baseline, "--laws-seconds": seconds, "--laws-reasons": reasons}
    options.refuse_ignored(ignored, Message("errors.options.with_server"), _HELP)


def _audited(
    model: str, loading: LoadOptions, asked: _Laws, fail_on: str, ranks: RankGroup | None = None
) -> CheckReport:
    with working(Message("progress.checking", model=model)):
        return _audit(model, loading, asked, fail_on, ranks)


def _audit(model: str, loading: LoadOptions, asked: _Laws, fail_on: str, ranks: RankGroup | None = None) -> CheckReport:
    from sqrtdk.models.names import check_name

    check_name(model, loading.revision, announce)
    from sqrtdk._check import check_with

    return check_with(
        model,
        None,
        loading,
        laws=asked.names,
        laws_seconds=asked.seconds,
        fail_on=fail_on,
        command=shlex.join(["sqrtdk", *sys.argv[1:]]),
        run=asked.run,
        ranks=ranks,
    )


def _renew(model: str, loading: LoadOptions, asked: _Laws, file: Path, wanted: AuditReports, lang: Choice) -> int:
    """Write the baseline file, and show what changed since it was written before."""
    from sqrtdk import _files
    from sqrtdk.audit.baseline import Ledger
    from sqrtdk.audit.baseline_file import ledger_with_config, of_model, read_for_update
    from sqrtdk.audit.config_changes import compare_model
    from sqrtdk.report.check.baseline import ledger_line, to_file
    from sqrtdk.report.plain import plain

    _files.check_writable(file, force=True)  # before the model runs
    kept = read_for_update(file, wanted.force)
    before = of_model(kept, model)
    report = _audited(model, loading, asked, "never")
    if before is not None and before.mode != report.mode and wanted.force:
        before = None
    now = ledger_with_config(report, model)
    if before is not None or wanted:
        held = before or Ledger(now.model, now.mode, ())
        show(report, wanted, lang, compare_model(held, report, str(file), model, loading, audit_static))
    others = kept if len(kept) > 1 else {}
    _files.write_text(file, to_file(*(others | {model: now}).values()), force=True)
    tell_reader(Message("progress.baseline", path=plain(str(file))))
    write_stderr(ledger_line(now, options.language_of_choice(lang)))
    return 0
