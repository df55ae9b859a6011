"""Draws the report as text for a terminal, a pipe or a log: headline, one line a site, findings worst first."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.text import Text

from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME, fold_sites
from sqrtdk.audit.records import OK, SEVERITIES, UNMEASURED, VERDICTS, CheckReport
from sqrtdk.messages import Message, id_of, named, said, text_of_value, word
from sqrtdk.report.check.fold import Fold, FoldedFinding, expected_text, fold_calls, values, verdict_text
from sqrtdk.report.check.headline import consequences, headline
from sqrtdk.report.check.laws import draw_laws
from sqrtdk.report.check.places import at_text, in_files, places_text
from sqrtdk.report.console import TableColumn, bracketed, console_text, list_sites, paragraph, print_table
from sqrtdk.report.figures import format_number, format_percent, format_ratio, worst_head
from sqrtdk.report.kv.forecast import draw_cache, draw_formats
from sqrtdk.report.plain import plain

_SEVERITY_STYLE = {"note": "cyan", "warn": "yellow", "fail": "red", "critical": "bold white on red"}
_VERDICT_STYLE = {"exact": "green", "declared": "cyan", "unexplained": "bold red", "unmeasured": "yellow"}
_HEALTH_STYLE = _SEVERITY_STYLE | {OK: "green"}
_OUTCOME_STYLE = {
    "failed": "bold red",
    "findings": "bold red",
    "incomplete": "bold yellow",
    "warnings": "bold yellow",
    "scales": "bold",
    "passed": "bold green",
}
_CALL_COLUMNS = (
    TableColumn("words.column.site"),
    TableColumn("words.column.formula"),
    TableColumn("words.column.ratio", right=True),
    TableColumn("words.column.verdict"),
    TableColumn("words.column.health"),
    TableColumn("words.column.max_logit", right=True),
    TableColumn("words.column.entropy_nats", right=True),
    TableColumn("words.column.peak", right=True),
    TableColumn("words.column.saturated", right=True),
)
_MOST_FINDINGS = 40
_MOST_PREMISES = 8
_LONGEST_SAID = 400  # characters of a headline, whose site names are untrusted and may be long


def to_text(report: CheckReport, *, width: int = 80, color: bool = False, language: Language = "en") -> str:
    """Draw the report as text of at most `width` columns.

    Equal layers are folded. If a site, its formula and its figures do not fit on one line, site and formula get a line
    of their own. The four health figures are those of the fold's worst head.

    Args:
        report: what `sqrtdk.check` returned.
        width: in columns, at least 40.
        color: whether to write ANSI colours.
        language: "en" or "zh"; names, formulas and sources stay English.

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

    def draw(console: Console) -> None:
        _head(console, report, language)
        _calls(console, report, language)
        draw_laws(console, report.laws, language)
        draw_cache(console, report.kv_cache, language)
        draw_formats(console, report.kv_formats, language)
        _findings(console, report, language)
        _asides(console, report, language)
        paragraph(console, _summary(report, language), most=console.width)

    return console_text(draw, width, color)


def summary_line(report: CheckReport, language: Language = "en") -> str:
    """Return the headline and the last line of the report: calls, verdicts, findings, exit code."""
    wrong = plain(text_of_value(headline(report)).of(language))
    wrong = wrong if len(wrong) <= _LONGEST_SAID else f"{wrong[: _LONGEST_SAID - 3]}.."
    return f"{wrong}{word('words.mark.stop', language)}{_summary(report, language).plain}"


_JOINS = ("joined", "combined")  # stages at which weights meet other weights after the softmax


def _head(console: Console, report: CheckReport, language: Language) -> None:
    model = report.model
    line = Text(plain(model.id), style="bold")
    told = [
        plain(model.cls),
        *([word("terminal.parameters", language, count=f"{model.parameters:,}")] if model.parameters else []),
        said(named("terminal.mode", report.mode), language),
        word("words.seed", language, seed=report.seed),
    ]
    line.append(f"  {word('words.mark.comma', language).join(told)}", style="not bold dim")
    paragraph(console, line, most=console.width)
    _premises(console, report, language)
    console.print()
    paragraph(
        console,
        Text(
            plain(text_of_value(headline(report)).of(language)) + word("words.mark.stop", language).rstrip(),
            style=_OUTCOME_STYLE[report.outcome],
        ),
    )
    console.print()


def premises(report: CheckReport) -> list[str]:
    """Return the notes on what was decided for the user, each once."""
    notes = report.environment.get("notes") or ()
    return list(dict.fromkeys(note if isinstance(note, str) else str(note) for note in notes))


def _premises(console: Console, report: CheckReport, language: Language) -> None:
    """Print what was decided for the user (random weights, random ids, a cut length), as it affects all figures."""
    # what was ignored is last: an untrusted config may cause many of these
    notes = sorted(premises(report), key=lambda note: id_of(note) == "premises.config.ignored")
    for note in notes[:_MOST_PREMISES]:
        paragraph(console, Text(f"! {plain(said(note, language))}", style="yellow"), 0)
    if len(notes) > _MOST_PREMISES:
        paragraph(console, word("terminal.more", language, count=len(notes) - _MOST_PREMISES), 2)


def _calls(console: Console, report: CheckReport, language: Language) -> None:
    if not report.calls:
        return
    folds = fold_calls(report.calls)
    several_kinds = len({judged.call.kind for judged in report.calls}) > 1
    rows = [
        (
            Text(_name(fold, several_kinds), style="bold"),
            Text(plain(fold.first.call.formula), style="cyan"),
            *_figures(fold, language),
        )
        for fold in folds
    ]
    columns = [replace(column, title=word(column.title, language)) for column in _CALL_COLUMNS]
    print_table(console, columns, rows, lead=2, language=language)
    _notes(console, folds, language)
    console.print()


def _name(fold: Fold, several_kinds: bool) -> str:
    kind = f" ({fold.first.call.kind})" if several_kinds else ""
    return f"{plain(fold.site)}{kind}"


def _figures(fold: Fold, language: Language) -> tuple[Text, ...]:
    judged, worst = fold.first, worst_head(fold.calls)
    verdict = verdict_text(judged.verdict, judged.mistake, language)
    health = "-" if judged.health == UNMEASURED else word(f"words.severity.{judged.health}", language)
    entropy = (
        "-" if worst.entropy_nats is None else f"{worst.entropy_nats:.3f} {format_percent(worst.entropy_fraction):>5}"
    )
    style = "" if judged.sound_but_failing else _VERDICT_STYLE.get(judged.verdict, "")
    peak = "-" if worst.peak is None else f"{worst.peak:.3f}"
    return (
        Text(format_ratio(judged.call.scale.ratio), style=style),
        Text(plain(verdict), style=style),
        Text(health, style=_HEALTH_STYLE.get(judged.health, "")),
        Text(format_number(math.nan if _has_nan_rows(fold) else worst.max_logit)),
        Text(entropy),
        Text(peak),
        Text(format_percent(worst.saturated)),
    )


def _has_nan_rows(fold: Fold) -> bool:
    """Return whether a head has rows with a NaN logit; another head's finite maximum must not hide them."""
    return any(judged.call.stats is not None and any(judged.call.stats.nan_rows) for judged in fold.calls)


def _notes(console: Console, folds: Sequence[Fold], language: Language) -> None:
    """Print notes that do not fit in the table: who declared a scale, why a site is unmeasured, where it is written."""
    if any(fold.first.call.stats for fold in folds):
        paragraph(console, Text(word("terminal.legend", language), style="dim"), 0)
    sites: dict[str, list[str]] = {}
    for fold in folds:
        judged = fold.first
        if judged.declared_by:
            declared = word("terminal.declared_by", language, by=said(judged.declared_by, language))
            sites.setdefault(declared, []).append(fold.site)
        joined = [said(stage.detail, language) for stage in judged.call.stages if stage.name in _JOINS]
        if joined:
            steps = word("words.mark.comma", language).join(joined)
            sites.setdefault(word("terminal.after_softmax", language, steps=steps), []).append(fold.site)
        if judged.verdict == UNMEASURED:
            why = said(judged.reason or judged.call.scale.reason or Message("words.no_reason"), language)
            sites.setdefault(word("terminal.unmeasured_why", language, why=why), []).append(fold.site)
        if judged.call.stats is None:
            why = said(judged.call.stats_reason or Message("words.no_reason"), language)
            sites.setdefault(word("terminal.no_statistics", language, why=why), []).append(fold.site)
    for fold in folds:
        # layers of a module share the lines of its class; layers of a graph have a node each
        one_place = len(fold.calls) == 1 or in_files(fold.first.call)
        if one_place and (written := places_text(fold.first.call, language)):
            sites.setdefault(word("terminal.written", language, places=written), []).append(fold.site)
    for note, where in sites.items():
        places = word("terminal.all_sites", language) if len(where) == len(folds) > 1 else list_sites(where, language)
        paragraph(console, Text(f"* {plain(note)}{bracketed(places, language)}", style="dim"), 0)


def _findings(console: Console, report: CheckReport, language: Language) -> None:
    if not report.findings:
        return
    console.print(Text(word("words.findings", language), style="bold"))
    caused = consequences(report.findings)
    for one in caused[:_MOST_FINDINGS]:
        _finding(console, one.cause, 0, language)
        if one.consequences:
            paragraph(console, word("terminal.leads_to", language), 4)
        for consequence in one.consequences:
            _finding(console, consequence, 6, language)
    if len(caused) > _MOST_FINDINGS:
        paragraph(console, word("terminal.more", language, count=len(caused) - _MOST_FINDINGS), 2)
    console.print()


def _finding(console: Console, folded: FoldedFinding, indent: int, language: Language) -> None:
    """Print a finding. A consequence is printed without its fix, because its cause is what to fix."""
    first = folded.first
    severity = word(f"words.severity.{first.severity}", language)
    line = Text(f" {severity} ", style=_SEVERITY_STYLE.get(first.severity, ""))
    line.append(f" {plain(said(folded.message, language))}", style="not bold default on default")
    paragraph(console, line, indent)
    where = Text(plain(folded.site) or ROOT_NAME, style="bold")
    if folded.several is not None:
        where.append(bracketed(said(folded.several, language), language), style="not bold")
    if first.at is not None:
        where.append(f"  {plain(at_text(first.at, language))}")
    where.append(f"  {plain(first.rule)}", style="not bold dim")
    found = (
        [word("terminal.found", language, value=text_of_value(values(folded)).of(language))]
        if first.value is not None
        else []
    )
    found += [_expected(folded, language)] if first.threshold is not None else []
    if found:
        where.append(f"  {plain(word('words.mark.comma', language).join(found))}", style="not bold dim")
    paragraph(console, where, indent + 4)
    if not indent:
        paragraph(console, word("terminal.fix", language, fix=plain(said(first.fix, language))), 4)
        paragraph(
            console, Text(word("terminal.source", language, source=plain(said(first.source, language))), style="dim"), 4
        )


def _expected(folded: FoldedFinding, language: Language) -> str:
    bar = text_of_value(expected_text(folded)).of(language)
    return word("terminal.expected" if bar.isascii() else "terminal.expected_bound", language, value=bar)


def _asides(console: Console, report: CheckReport, language: Language) -> None:
    groups = (
        (word("terminal.not_attention", language), report.not_attention),
        (word("words.not_measured", language), report.not_measured),
    )
    shown = False
    for title, items in groups:
        by_text: dict[str, list[str]] = {}
        for item in items:
            if report.repeated(item):
                continue
            at = word("terminal.at", language, at=at_text(item.at, language)) if item.at else None
            parts = filter(None, (said(item.reason, language), item.formula, at))
            by_text.setdefault(word("words.mark.comma", language).join(parts), []).append(item.site)
        for reason, sites in by_text.items():
            told = f"{plain(reason)}{bracketed(list_sites(fold_sites(sites), language), language)}"
            paragraph(console, Text.assemble((title + word("words.mark.colon", language), "bold"), told), 0)
            shown = True
    if shown:
        console.print()


def _summary(report: CheckReport, language: Language) -> Text:
    verdicts = Counter(judged.verdict for judged in report.calls)
    severities = Counter(finding.severity for finding in report.findings)
    parts = [
        word("words.calls_with", language, count=verdicts[name], what=Message(f"words.verdict.{name}"))
        for name in VERDICTS
        if verdicts[name]
    ]
    kinds = [
        word("words.findings_with", language, count=severities[name], what=Message(f"words.severity.{name}"))
        for name in reversed(SEVERITIES)
        if severities[name]
    ]
    colon, comma, stop = (word(f"words.mark.{key}", language) for key in ("colon", "comma", "stop"))
    text = Text(word("terminal.calls", language, count=f"{len(report.calls):,}"))
    text.append((colon + comma.join(parts) if parts else "") + stop)
    if report.unjudged:
        unjudged = word("terminal.unjudged", language, count=f"{len(report.unjudged):,}")
        text.append(unjudged, style="bold yellow").append(stop)
    findings = word("terminal.no_findings", language)
    if kinds:
        findings = word("terminal.findings", language, count=f"{len(report.findings):,}") + colon + comma.join(kinds)
    findings += word("terminal.formulas", language) if report.mode == "static" else ""
    text.append(findings, style=_OUTCOME_STYLE[report.outcome])
    return text.append(word("terminal.exit", language, code=report.exit_code, fail_on=report.fail_on))
