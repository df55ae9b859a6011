"""The report as text for a terminal, a pipe, or a log: one line a site, then the findings, worst first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from sqrtdk._sites import fold_sites
from sqrtdk.audit.records import OK, SEVERITIES, UNMEASURED, VERDICTS, CheckReport
from sqrtdk.report.console import drawn, listed, paragraph
from sqrtdk.report.figures import count, number, percent, ratio, worst_head
from sqrtdk.report.fold import Fold, FoldedFinding, fold_calls, fold_findings, values
from sqrtdk.report.kv_cache import draw_cache
from sqrtdk.report.places import places_text
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
_COLUMNS = ("ratio", "verdict", "health", "max logit", "entropy nats", "peak", "saturated")
_WORDS = ("verdict", "health")  # the columns that hold no numbers
_MOST_FINDINGS = 40
_MOST_PREMISES = 8


def to_text(report: CheckReport, *, width: int = 80, color: bool = False) -> str:
    """Draw the report as text of at most `width` columns.

    Equal layers are folded. Where a site, its formula and its figures fit on one line they stand there, else the
    formula has a line of its own. The four health figures are those of the worst head of the fold.

    Args:
        report: what `sqrtdk.check` returned.
        width: columns, 40 at least.
        color: whether to write ANSI colours.

    Returns:
        The text, ending with a newline.

    Example:
        >>> from sqrtdk.audit.records import ModelInfo
        >>> print(to_text(CheckReport(ModelInfo("demo", "Decoder", 1000), "static", (), (), (), ())))
        demo  Decoder, 1,000 parameters, static, seed 0
        <BLANKLINE>
        No attention call was seen.
        <BLANKLINE>
        0 attention calls. No findings, on scales and formulas alone. Exit code 0
        (fail-on: fail).
        <BLANKLINE>
    """

    def draw(console: Console) -> None:
        _head(console, report)
        _calls(console, report)
        draw_cache(console, report.kv_cache)
        _findings(console, report)
        _asides(console, report)
        console.print(_summary(report))

    return drawn(draw, width, color)


def summary_line(report: CheckReport) -> str:
    """Return the last line of the report: how many calls, their verdicts, what was not judged, findings, exit code."""
    return _summary(report).plain


def _head(console: Console, report: CheckReport) -> None:
    model = report.model
    line = Text(plain(model.id), style="bold")
    parameters = count(model.parameters, "parameter")
    line.append(f"  {plain(model.cls)}, {parameters}, {report.mode}, seed {report.seed}", style="not bold dim")
    console.print(line, overflow="fold")
    _premises(console, report)
    console.print()


def _premises(console: Console, report: CheckReport) -> None:
    """What was decided on the user's behalf, as it changes what the figures mean: random weights, ids, a cut length."""
    notes = sorted(
        dict.fromkeys(str(note) for note in report.environment.get("notes") or ()),
        key=lambda note: note.endswith(" was ignored"),  # a stranger's config may bring many of these
    )
    for note in notes[:_MOST_PREMISES]:
        paragraph(console, Text(f"! {plain(note)}", style="yellow"), 0)
    if len(notes) > _MOST_PREMISES:
        paragraph(console, Text(f"... and {len(notes) - _MOST_PREMISES} more: see --json or --html"), 2)


def _calls(console: Console, report: CheckReport) -> None:
    if not report.calls:
        console.print("No attention call was seen.")
        console.print()
        return
    folds = fold_calls(report.calls)
    several_kinds = len({judged.call.kind for judged in report.calls}) > 1
    names = [Text(_name(fold, several_kinds), style="bold") for fold in folds]
    formulas = [Text(plain(fold.first.call.formula), style="cyan") for fold in folds]
    figures = [_figures(fold) for fold in folds]
    titles = tuple(Text(title) for title in _COLUMNS)
    widths = [max(cell.cell_len for cell in column) for column in zip(titles, *figures, strict=True)]
    site = max(4, *(name.cell_len for name in names))
    formula = max(7, *(text.cell_len for text in formulas))
    if site + formula + sum(widths) + 2 * (len(widths) + 1) <= console.width:
        console.print(_row((Text("site"), Text("formula"), *titles), [site, formula, *widths], lead=2), style="dim")
        for cells in zip(names, formulas, figures, strict=True):
            console.print(_row((*cells[:2], *cells[2]), [site, formula, *widths], lead=2))
    else:
        gap = 2 if 2 + sum(widths) + 2 * (len(widths) - 1) <= console.width else 1
        indent = Text(" " * gap if sum(widths) + gap * len(widths) <= console.width else "")
        console.print(indent + _row(titles, widths, gap=gap), style="dim")
        for name, text, row in zip(names, formulas, figures, strict=True):
            if name.cell_len + text.cell_len + 3 <= console.width:
                console.print(name + Text("   ") + text)
            else:
                paragraph(console, name, 0)
                paragraph(console, text, 2)
            console.print(indent + _row(row, widths, gap=gap))
    _notes(console, folds)
    console.print()


def _row(cells: Sequence[Text], widths: Sequence[int], lead: int = 0, gap: int = 2) -> Text:
    """Set cells in columns, `gap` blanks apart; the first `lead` and words to the left, numbers to the right."""
    line = Text()
    for position, (cell, width) in enumerate(zip(cells, widths, strict=True)):
        pad = Text(" " * (width - cell.cell_len))
        left = position < lead or _COLUMNS[position - lead] in _WORDS
        line = line + Text(" " * (gap if position else 0)) + (cell + pad if left else pad + cell)
    return line


def _name(fold: Fold, several_kinds: bool) -> str:
    kind = f" ({fold.first.call.kind})" if several_kinds else ""
    return f"{plain(fold.site)}{kind}"


def _figures(fold: Fold) -> tuple[Text, ...]:
    judged, worst = fold.first, worst_head(fold.calls)
    verdict = f"{judged.verdict}: {judged.mistake}" if judged.mistake else judged.verdict
    entropy = "-" if worst.entropy_nats is None else f"{worst.entropy_nats:.3f} {percent(worst.entropy_fraction):>5}"
    style = "" if judged.sound_but_failing else _VERDICT_STYLE.get(judged.verdict, "")
    peak = "-" if worst.peak is None else f"{worst.peak:.3f}"
    return (
        Text(ratio(judged.call.scale.ratio), style=style),
        Text(plain(verdict), style=style),
        Text("-" if judged.health == UNMEASURED else judged.health, style=_HEALTH_STYLE.get(judged.health, "")),
        Text(number(worst.max_logit)),
        Text(entropy),
        Text(peak),
        Text(percent(worst.saturated)),
    )


def _notes(console: Console, folds: Sequence[Fold]) -> None:
    """What the table has no room for: who declared a scale, why something was not measured, where it is written."""
    if any(fold.first.call.stats for fold in folds):
        legend = "Figures of the worst head: largest max logit, lowest entropy (and share of log n), largest peak, "
        paragraph(console, Text(f"{legend}share of rows with a peak over .99.", style="dim"), 0)
    sites: dict[str, list[str]] = {}
    for fold in folds:
        judged = fold.first
        if judged.declared_by:
            sites.setdefault(f"declared by {judged.declared_by}", []).append(fold.site)
        if judged.verdict == UNMEASURED:
            why = judged.reason or judged.call.scale.reason or "no reason given"
            sites.setdefault(f"unmeasured: {why}", []).append(fold.site)
        if judged.call.stats is None:
            sites.setdefault(f"no statistics: {judged.call.stats_reason or 'no reason given'}", []).append(fold.site)
    for fold in folds:
        if written := places_text(fold.first.call):
            sites.setdefault(f"written: {written}", []).append(fold.site)
    for text, where in sites.items():
        places = "all sites" if len(where) == len(folds) > 1 else listed(where)
        paragraph(console, Text(f"* {plain(text)} ({places})", style="dim"), 0)


def _findings(console: Console, report: CheckReport) -> None:
    if not report.findings:
        return
    console.print(Text("Findings", style="bold"))
    folded = fold_findings(report.findings)
    for finding in folded[:_MOST_FINDINGS]:
        _finding(console, finding)
    if len(folded) > _MOST_FINDINGS:
        paragraph(console, Text(f"... and {len(folded) - _MOST_FINDINGS} more: see --json or --html"), 2)
    console.print()


def _finding(console: Console, folded: FoldedFinding) -> None:
    first = folded.first
    line = Text(f" {first.severity} ", style=_SEVERITY_STYLE.get(first.severity, ""))
    line.append(f" {plain(first.message)}", style="not bold default on default")
    paragraph(console, line, 0)
    site = plain(folded.site) or "whole model"
    where = Text(site, style="bold")
    if len(folded.findings) > 1:
        where.append(f" ({count(len(folded.findings), 'site')})", style="not bold")
    if first.at is not None:
        where.append(f"  {plain(first.at)}")
    where.append(f"  {plain(first.rule)}", style="not bold dim")
    if first.value is not None:
        where.append(f"  value {plain(values(folded))}", style="not bold dim")
    if first.threshold is not None:
        threshold = first.threshold if isinstance(first.threshold, str) else number(first.threshold)
        where.append(f"  threshold {plain(threshold)}", style="not bold dim")
    paragraph(console, where, 4)
    paragraph(console, Text(f"fix: {plain(first.fix)}"), 4)
    paragraph(console, Text(f"source: {plain(first.source)}", style="dim"), 4)


def _asides(console: Console, report: CheckReport) -> None:
    groups = (
        ("Not attention", report.not_attention),
        ("Not measured", report.not_measured),
    )
    shown = False
    for title, items in groups:
        by_text: dict[str, list[str]] = {}
        for item in items:
            if report.repeated(item):
                continue
            told = filter(None, (item.reason, item.formula, item.at and f"at {item.at}"))
            by_text.setdefault(", ".join(told), []).append(item.site)
        for text, sites in by_text.items():
            where = listed(fold_sites(sites))
            paragraph(console, Text.assemble((f"{title}: ", "bold"), f"{plain(text)} ({where})"), 0)
            shown = True
    if shown:
        console.print()


def _summary(report: CheckReport) -> Text:
    verdicts = Counter(judged.verdict for judged in report.calls)
    severities = Counter(finding.severity for finding in report.findings)
    parts = ", ".join(f"{verdicts[name]} {name}" for name in VERDICTS if verdicts[name])
    kinds = ", ".join(f"{severities[name]} {name}" for name in reversed(SEVERITIES) if severities[name])
    text = Text(count(len(report.calls), "attention call") + (f": {parts}" if parts else "") + ". ")
    if report.unjudged:
        text.append(f"{count(len(report.unjudged), 'attention')} not judged", style="bold yellow").append(". ")
    findings = f"{count(len(report.findings), 'finding')}: {kinds}" if kinds else "No findings"
    findings += ", on scales and formulas alone" if report.mode == "static" else ""
    text.append(findings, style=_OUTCOME_STYLE[report.outcome])
    return text.append(f". Exit code {report.exit_code} (fail-on: {report.fail_on}).")
