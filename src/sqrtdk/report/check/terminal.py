"""Draws the report as text for a terminal, a pipe or a log: headline, one line a site, findings worst first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.text import Text

from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME, fold_sites
from sqrtdk.audit.records import OK, UNMEASURED, CheckReport
from sqrtdk.messages import Message, id_of, named
from sqrtdk.report.check.consequences import consequences
from sqrtdk.report.check.fold import (
    Fold,
    FoldedFinding,
    expected_text,
    fold_calls,
    severity_counts,
    values,
    verdict_counts,
    verdict_text,
)
from sqrtdk.report.check.headline import OUTCOME_TONES, headline
from sqrtdk.report.check.laws import draw_laws
from sqrtdk.report.check.places import at_text, in_files, places_text
from sqrtdk.report.console import FINDING_STYLES, TONE_STYLES, TableColumn
from sqrtdk.report.environment import premises, print_premises
from sqrtdk.report.figures import format_number, format_percent, format_ratio, worst_head
from sqrtdk.report.kv.forecast import draw_cache, draw_formats
from sqrtdk.report.plain import plain
from sqrtdk.report.printer import Printer, printed
from sqrtdk.report.speaker import Speaker

_VERDICT_STYLE = {"exact": "green", "declared": "cyan", "unexplained": "bold red", "unmeasured": "yellow"}
_HEALTH_STYLE = FINDING_STYLES | {OK: "green"}
_CALL_COLUMNS = (  # key of words.column, and whether the column is aligned to the right
    ("site", False), ("formula", False), ("ratio", True), ("verdict", False), ("health", False),
    ("max_logit", True), ("entropy_nats", True), ("peak", True), ("saturated", True),
)  # fmt: skip
_JOINS = ("joined", "combined")  # stages at which weights meet other weights after the softmax
_MOST_FINDINGS = 40
_LONGEST_HEADLINE = 400  # characters; its site names are untrusted and may be long


def to_text(
    report: CheckReport, *, width: int = 80, color: bool = False, language: Language = "en", reasons: bool = False
) -> str:
    """Draw the report as text of at most `width` columns.

    Equal layers are folded. If a site, its formula and its figures do not fit on one line, site and formula get a line
    of their own. The four health figures are those of the fold's worst head.

    Args:
        report: what `sqrtdk.check` returned.
        width: in columns, at least 40.
        color: whether to write ANSI colours.
        language: "en" or "zh"; names, formulas and sources stay English.
        reasons: whether it says why each law that was not asked was not.

    Returns:
        The text, ending with a newline.

    Example:
        >>> from sqrtdk.audit.records import ModelInfo
        >>> print(to_text(CheckReport(ModelInfo("demo", "Decoder", 1000), "static", (), (), (), ())))
        demo  Decoder, 1,000 parameters, formulas alone, seed 0
        <BLANKLINE>
        No attention was seen.
        <BLANKLINE>
        0 attention calls. No findings, on scales and formulas alone. Exit code 0
          (fail-on: fail).
        <BLANKLINE>
    """

    def draw(printer: Printer) -> None:
        _head(printer, report)
        _calls(printer, report)
        draw_laws(printer, report.laws, reasons)
        draw_cache(printer, report.kv_cache)
        draw_formats(printer, report.kv_formats)
        _findings(printer, report)
        _asides(printer, report)
        printer.paragraph(_summary(printer, report), most=printer.console.width)

    return printed(draw, width, color, language)


def summary_line(report: CheckReport, language: Language = "en") -> str:
    """Return the headline and the last line of the report as one line: calls, verdicts, findings, exit code.

    Args:
        report: What `sqrtdk.check` returned.
        language: "en" or "zh".
    """
    speaker = Speaker(language)
    wrong = plain(speaker.said(headline(report)))
    wrong = wrong if len(wrong) <= _LONGEST_HEADLINE else f"{wrong[: _LONGEST_HEADLINE - 3]}.."
    return f"{wrong}{speaker.mark('stop')}{_summary(speaker, report).plain}"


def _head(printer: Printer, report: CheckReport) -> None:
    """Print the head of the report: the model, notes on what was decided for the user, and the headline."""
    model = report.model
    facts = [
        plain(model.cls),
        *([Message("terminal.parameters", count=f"{model.parameters:,}")] if model.parameters else []),
        *([Message("terminal.kv_bytes", count=f"{report.kv_bytes_per_token:,}")] if report.kv_bytes_per_token else []),
        named("terminal.mode", report.mode),
        Message("words.seed", seed=report.seed),
    ]
    line = printer.line(model.id, "bold").append(f"  {printer.join(facts)}", style="not bold dim")
    printer.paragraph(line, most=printer.console.width)
    # what was ignored is last: an untrusted config may cause many of these notes
    notes = sorted(premises(report.environment), key=lambda note: id_of(note) == "premises.config.ignored")
    print_premises(printer, notes)
    printer.blank()
    sentence = printer.said(headline(report)) + printer.mark("stop").rstrip()
    printer.paragraph(sentence, style=TONE_STYLES[OUTCOME_TONES[report.outcome]])
    printer.blank()


def _calls(printer: Printer, report: CheckReport) -> None:
    """Print the table of attentions, folded over equal layers."""
    if not report.calls:
        return
    folds = fold_calls(report.calls)
    several_kinds = len({judged.call.kind for judged in report.calls}) > 1
    # site and formula lead the row: if the table is too wide, they get a line of their own
    rows = []
    for fold in folds:
        kind = f" ({fold.first.call.kind})" if several_kinds else ""
        site, formula = printer.line(f"{fold.site}{kind}", "bold"), printer.line(fold.first.call.formula, "cyan")
        rows.append((site, formula, *_figures(printer, fold)))
    printer.table(
        [TableColumn(Message(f"words.column.{name}"), right=right) for name, right in _CALL_COLUMNS], rows, lead=2
    )
    _notes(printer, folds)
    printer.blank()


def _figures(printer: Printer, fold: Fold) -> tuple[Text, ...]:
    """Return the cells of a line after its site and formula: ratio, verdict, health, figures of the worst head."""
    judged, worst = fold.first, worst_head(fold.calls)
    health = "-" if judged.health == UNMEASURED else Message(f"words.severity.{judged.health}")
    entropy = (
        "-" if worst.entropy_nats is None else f"{worst.entropy_nats:.3f} {format_percent(worst.entropy_fraction):>5}"
    )
    style = "" if judged.sound_but_failing else _VERDICT_STYLE.get(judged.verdict, "")
    return (
        Text(format_ratio(judged.call.scale.ratio), style),
        printer.line(verdict_text(judged.verdict, judged.mistake), style),
        printer.line(health, _HEALTH_STYLE.get(judged.health, "")),
        Text(format_number(math.nan if _has_nan_rows(fold) else worst.max_logit)),
        Text(entropy),
        Text("-" if worst.peak is None else f"{worst.peak:.3f}"),
        Text(format_percent(worst.saturated)),
    )


def _has_nan_rows(fold: Fold) -> bool:
    """Return whether a head has rows with a NaN logit; another head's finite maximum must not hide them."""
    return any(judged.call.stats is not None and any(judged.call.stats.nan_rows) for judged in fold.calls)


def _notes(printer: Printer, folds: Sequence[Fold]) -> None:
    """Print notes that do not fit in the table: who declared a scale, why a site is unmeasured, where it is written."""
    if any(fold.first.call.stats for fold in folds):
        printer.paragraph(Message("terminal.legend"), style="dim")
    sites: dict[str, list[str]] = {}
    for fold in folds:
        for note in _notes_of_call(printer, fold):
            sites.setdefault(printer.said(note), []).append(fold.site)
    for fold in folds:
        # layers of a module share the lines of its class; layers of a graph have a node each
        one_place = len(fold.calls) == 1 or in_files(fold.first.call)
        if one_place and (places := places_text(fold.first.call)):
            sites.setdefault(printer.word("terminal.written", places=places), []).append(fold.site)
    for note, where in sites.items():
        everywhere = len(where) == len(folds) > 1
        places = printer.word("terminal.all_sites") if everywhere else printer.sites(where)
        printer.paragraph(f"* {note}{printer.bracketed(places)}", style="dim")


def _notes_of_call(printer: Printer, fold: Fold) -> Iterator[str]:
    judged = fold.first
    if judged.declared_by:
        yield Message("terminal.declared_by", by=judged.declared_by)
    if joins := [stage.detail for stage in judged.call.stages if stage.name in _JOINS]:
        yield Message("terminal.after_softmax", steps=printer.join(joins))
    if judged.verdict == UNMEASURED:
        why = judged.reason or judged.call.scale.reason or Message("words.no_reason")
        yield Message("terminal.unmeasured_why", why=why)
    if judged.call.stats is None:
        yield Message("terminal.no_statistics", why=judged.call.stats_reason or Message("words.no_reason"))


def _findings(printer: Printer, report: CheckReport) -> None:
    if not report.findings:
        return
    printer.paragraph(Message("words.findings"), style="bold")
    caused = consequences(report.findings)
    for one in caused[:_MOST_FINDINGS]:
        _finding(printer, one.cause, 0)
        if one.consequences:
            printer.paragraph(Message("terminal.leads_to"), 4)
        for consequence in one.consequences:
            _finding(printer, consequence, 6)
    printer.more(len(caused) - _MOST_FINDINGS)
    printer.blank()


def _finding(printer: Printer, folded: FoldedFinding, indent: int) -> None:
    """Print a finding. A consequence is printed without its fix, because its cause is what to fix."""
    first = folded.first
    line = Text(f" {printer.word(f'words.severity.{first.severity}')} ", FINDING_STYLES.get(first.severity, ""))
    line.append(f" {plain(printer.said(folded.message))}", style="not bold default on default")
    printer.paragraph(line, indent)
    where = printer.line(folded.site or ROOT_NAME, "bold")
    if folded.several is not None:
        where.append(printer.bracketed(folded.several), style="not bold")
    if first.at is not None:
        where.append(f"  {plain(printer.said(at_text(first.at)))}")
    where.append(f"  {plain(first.rule)}", style="not bold dim")
    figures = []
    if first.value is not None:
        figures.append(printer.word("terminal.found", value=printer.said(values(folded))))
    if first.threshold is not None:
        bound = printer.said(expected_text(folded))
        figures.append(printer.word("terminal.expected" if bound.isascii() else "terminal.expected_bound", value=bound))
    if figures:
        where.append(f"  {plain(printer.join(figures))}", style="not bold dim")
    printer.paragraph(where, indent + 4)
    # only a cause is to be fixed: what it led to goes away with it
    if not indent:
        printer.paragraph(Message("terminal.fix", fix=first.fix), 4)
        printer.paragraph(Message("terminal.source", source=first.source), 4, "dim")


def _asides(printer: Printer, report: CheckReport) -> None:
    """Print what is not an attention and what was not measured, each reason once with its sites."""
    groups = (("terminal.not_attention", report.not_attention), ("words.not_measured", report.not_measured))
    printed_any = False
    for title, entries in groups:
        by_text: dict[str, list[str]] = {}
        for entry in entries:
            if report.repeated(entry):
                continue
            at = Message("terminal.at", at=at_text(entry.at)) if entry.at else None
            by_text.setdefault(printer.join(filter(None, (entry.reason, entry.formula, at))), []).append(entry.site)
        for reason, sites in by_text.items():
            what = plain(f"{reason}{printer.bracketed(printer.sites(fold_sites(sites)))}")
            printer.paragraph(Text.assemble((printer.word(title) + printer.mark("colon"), "bold"), what))
            printed_any = True
    if printed_any:
        printer.blank()


def _summary(speaker: Speaker, report: CheckReport) -> Text:
    calls = verdict_counts("words.calls_with", (judged.verdict for judged in report.calls))
    kinds = severity_counts(report.findings).values()
    colon, stop = speaker.mark("colon"), speaker.mark("stop")
    text = Text(speaker.word("terminal.calls", count=f"{len(report.calls):,}"))
    text.append((colon + speaker.join(calls) if calls else "") + stop)
    if report.unjudged:
        unjudged = speaker.word("terminal.unjudged", count=f"{len(report.unjudged):,}")
        text.append(unjudged, style="bold yellow").append(stop)
    findings = speaker.word("terminal.no_findings")
    if kinds:
        findings = speaker.word("terminal.findings", count=f"{len(report.findings):,}") + colon + speaker.join(kinds)
    findings += speaker.word("terminal.formulas") if report.mode == "static" else ""
    text.append(findings, style=TONE_STYLES[OUTCOME_TONES[report.outcome]])
    return text.append(speaker.word("terminal.exit", code=report.exit_code, fail_on=report.fail_on))
