"""Writes a baseline file, and a comparison with a baseline as terminal text, JSON or a pull request comment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from sqrtdk import _json
from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME, fold
from sqrtdk.audit.baseline import BASELINE_VERSION, BaselineComparison, Ledger, LedgerChange
from sqrtdk.messages import Message, named
from sqrtdk.report.check.fold import verdict_counts, verdict_text
from sqrtdk.report.check.markdown import details, fitted, markdown_code, markdown_table, markdown_text
from sqrtdk.report.json_values import record_fields, tool
from sqrtdk.report.plain import plain
from sqrtdk.report.printer import Printer, printed
from sqrtdk.report.speaker import Speaker

_MOST_CHANGE_ROWS = 40  # rows of folded changes; the rest is counted


def to_file(ledger: Ledger) -> str:
    """Return the content of a baseline file: JSON, sorted by site, with one line for each attention.

    Example:
        >>> from sqrtdk.audit.baseline import LedgerLine
        >>> line = LedgerLine("h.0", 0, "softmax(q.k)", 8.0, "unexplained", "missing", ("fail scale_ledger",))
        >>> print(to_file(Ledger("m", "static", (line,))).split("\\n")[5][:60])
            {"site": "h.0", "index": 0, "formula": "softmax(q.k)", "
    """
    lines = [record_fields(line) | {"findings": ", ".join(line.findings)} for line in ledger.lines]
    return _json.json_document(
        {"schema_version": BASELINE_VERSION, "model": ledger.model, "mode": ledger.mode, "attentions": lines}
    )


def ledger_line(ledger: Ledger, language: Language = "en") -> str:
    """Return one line for the terminal that counts a ledger's attentions by verdict, and its findings.

    Args:
        ledger: The baseline that was just written.
        language: "en" or "zh".
    """
    speaker = Speaker(language)
    attentions = [line for line in ledger.lines if line.verdict is not None]
    each = verdict_counts("words.attentions_with", (line.verdict for line in attentions))
    counts = speaker.said(_attentions(len(attentions))) + speaker.mark("colon") + speaker.join(each)
    findings = Message("terminal.findings", count=f"{sum(len(line.findings) for line in ledger.lines):,}")
    return counts + speaker.mark("stop") + speaker.word("baseline.kept", findings=findings)


def to_json(comparison: BaselineComparison) -> str:
    """Return the comparison as one JSON document that ends with a newline.

    It has `schema_version`, `tool`, the fields of `BaselineComparison` and `exit_code`.
    """
    head = {"schema_version": BASELINE_VERSION, "tool": tool()}
    return _json.json_document(head | record_fields(comparison) | {"exit_code": comparison.exit_code})


def baseline_summary_line(comparison: BaselineComparison, language: Language = "en") -> str:
    """Return one line that says how much changed since the baseline, what was not judged, and the exit code.

    Args:
        comparison: What changed since the baseline was written.
        language: "en" or "zh".
    """
    speaker = Speaker(language)
    failing = sum(change.fails for change in comparison.changes)
    others = len(comparison.changes) - failing
    changed = Message("baseline.changes", count=f"{failing:,}")
    parts = [changed if failing else Message("baseline.nothing_changed")]
    if others and comparison.fail_on == "never":
        parts = [Message("baseline.changes", count=f"{others:,}")]
    elif others:
        parts.append(Message("baseline.more_not_counted", count=others))
    parts.append(Message("baseline.as_before", attentions=_attentions(comparison.unchanged)))
    if comparison.unjudged:
        parts.append(Message("baseline.not_judged", attentions=_attentions(comparison.unjudged)))
    exit = speaker.word("terminal.exit", code=comparison.exit_code, fail_on=comparison.fail_on)
    return speaker.join(parts) + exit


def to_text(comparison: BaselineComparison, *, width: int = 80, color: bool = False, language: Language = "en") -> str:
    """Return a comparison with a baseline as text for the terminal.

    Args:
        comparison: What changed since the baseline was written.
        width: Columns at which lines wrap.
        color: Whether to add ANSI colours.
        language: "en" or "zh".
    """

    def draw(printer: Printer) -> None:
        whole = printer.console.width
        names = {"model": comparison.model, "file": comparison.file}
        printer.paragraph(
            Message("baseline.against", **names, mode=named("terminal.mode", comparison.mode)), most=whole
        )
        printer.blank()
        folds = list(_folded(comparison))
        for site, change, sites in folds[:_MOST_CHANGE_ROWS]:
            _print_change(printer, site, change, sites)
        printer.more(len(folds) - _MOST_CHANGE_ROWS, "terminal.more_json", 0)
        if folds:
            printer.blank()
        # a change may be meant: the report says how to accept it
        if any(change.fails for change in comparison.changes):
            printer.paragraph(Message("baseline.if_meant"))
            printer.blank()
        printer.paragraph(baseline_summary_line(comparison, language), most=whole)

    return printed(draw, width, color, language)


def _print_change(printer: Printer, site: str, change: LedgerChange, sites: int) -> None:
    counts, style = ("fails", "red") if change.fails else ("not_counted", "dim")
    where = plain(site) or ROOT_NAME
    if sites > 1:
        where += printer.bracketed(Message("words.sites", count=f"{sites:,}"))
    line = Text(printer.word(f"baseline.{counts}"), style)
    printer.paragraph(line + Text(f"  {printer.join([_kind(change), where], 'colon')}", style="default"))
    for sign, side in (("-", change.before), ("+", change.after)):
        if side is not None:
            printer.paragraph(f"{sign} {printer.said(_side(change, side))}", 7)


def baseline_markdown(comparison: BaselineComparison, language: Language = "en") -> str:
    """Return the comparison as a comment for a pull request, in GitHub's Markdown.

    Names from the model are escaped, and what exceeds GitHub's limit is cut; `sqrtdk.report.check.markdown` says how.
    """
    speaker = Speaker(language)
    return fitted(_parts(comparison, speaker), speaker)


def _parts(comparison: BaselineComparison, speaker: Speaker) -> Iterator[str]:
    """Yield the parts of the comment, the most important first; `fitted` drops those that exceed GitHub's limit."""
    outcome = Message("baseline.outcome.changed" if comparison.exit_code else "baseline.outcome.same")
    yield f"### {speaker.word('terminal.comment.title', model=markdown_code(comparison.model), outcome=outcome)}\n"
    file = speaker.word("baseline.file", file=comparison.file)
    yield markdown_text(f"{baseline_summary_line(comparison, speaker.language)} {file}", 1000) + "\n"
    folds = list(_folded(comparison))
    # changes that fail the run are shown; the others are folded away
    loud, quiet = ([fold for fold in folds if fold[1].fails is fails] for fails in (True, False))
    titles = [speaker.word("words.column.site")]
    titles += [speaker.word(f"baseline.{key}") for key in ("change", "before", "now")]
    if loud:
        yield markdown_table(titles, (_row(fold, speaker) for fold in loud[:_MOST_CHANGE_ROWS]))
        more = speaker.word("baseline.changes_not_shown", count=len(loud) - _MOST_CHANGE_ROWS)
        yield f"{speaker.word('baseline.write_anew')}\n" + (f"\n{more}\n" if len(loud) > _MOST_CHANGE_ROWS else "")
    if quiet:
        more = speaker.word("baseline.more_changes", count=f"{sum(sites for _, _, sites in quiet):,}")
        yield details(more, [markdown_table(titles, (_row(fold, speaker) for fold in quiet[:_MOST_CHANGE_ROWS]))])


def _row(fold: tuple[str, LedgerChange, int], speaker: Speaker) -> list[str]:
    site, change, sites = fold
    whole = change.what in ("attention", "finding")
    what = speaker.said(_kind(change) if whole else Message(f"baseline.changed.{change.what}"))
    many = speaker.bracketed(str(sites)) if sites > 1 else ""
    return [
        f"{markdown_code(site or ROOT_NAME)}{many}",
        f"**{what}**" if change.fails else what,
        *(
            "" if side is None else markdown_code(speaker.said(_value(change, side)), 240)
            for side in (change.before, change.after)
        ),
    ]


def _folded(comparison: BaselineComparison) -> Iterator[tuple[str, LedgerChange, int]]:
    """Yield site, change and count. Equal changes of several layers are yielded once: "h.0-31.attn", change, 32."""

    def shown(change: LedgerChange) -> tuple[Any, ...]:
        return change.fails, change.kind, change.what, change.before, change.after, change.index

    for site, group in fold(comparison.changes, lambda change: change.site, shown):
        # calls of one module differ in their index alone, and a change names one of them
        index = group[0].index
        yield f"{site} #{index}" if index else site, group[0], len(group)


def _kind(change: LedgerChange) -> Message:
    return Message(f"baseline.kind.{change.kind.replace(' ', '_')}")


def _side(change: LedgerChange, side: str) -> str:
    if change.what in ("attention", "finding"):
        return side
    return Message("baseline.value", what=Message(f"baseline.side.{change.what}"), value=_value(change, side))


def _value(change: LedgerChange, side: str) -> str:
    """Return the value of one side; a verdict, such as "unexplained: missing", in words."""
    if change.what != "verdict":
        return side
    verdict, _, mistake = side.partition(": ")  # other verdicts than "unexplained: missing" have no mistake
    return verdict_text(verdict, mistake)


def _attentions(number: int) -> Message:
    return Message("words.attentions", count=f"{number:,}")
