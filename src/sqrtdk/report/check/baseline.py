"""Writes a baseline file, and a comparison with a baseline as terminal text, JSON or a pull request comment."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from sqrtdk import _json
from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME, fold
from sqrtdk.audit.baseline import BASELINE_VERSION, BaselineComparison, Ledger, LedgerChange
from sqrtdk.audit.records import VERDICTS
from sqrtdk.messages import Message, named, said, word
from sqrtdk.report.check.fold import verdict_text
from sqrtdk.report.check.markdown import details, fitted, markdown_code, markdown_table, markdown_text
from sqrtdk.report.console import bracketed, console_text, paragraph
from sqrtdk.report.plain import plain

_MOST_CHANGE_ROWS = 40  # rows of folded changes; the rest is counted


def to_file(ledger: Ledger) -> str:
    """Return the content of a baseline file: JSON, sorted by site, with one line for each attention.

    Example:
        >>> from sqrtdk.audit.baseline import LedgerLine
        >>> line = LedgerLine("h.0", 0, "softmax(q.k)", 8.0, "unexplained", "missing", ("fail scale_ledger",))
        >>> print(to_file(Ledger("m", "static", (line,))).split("\\n")[5][:60])
            {"site": "h.0", "index": 0, "formula": "softmax(q.k)", "
    """
    lines = [
        {field.name: getattr(line, field.name) for field in dataclasses.fields(line)}
        | {"findings": ", ".join(line.findings)}
        for line in ledger.lines
    ]
    return _json.json_document(
        {"schema_version": BASELINE_VERSION, "model": ledger.model, "mode": ledger.mode, "attentions": lines}
    )


def ledger_line(ledger: Ledger, language: Language = "en") -> str:
    """Return one line that counts a ledger's attentions by verdict, and its findings."""
    attentions = [line for line in ledger.lines if line.verdict is not None]
    verdicts = Counter(line.verdict for line in attentions)
    each = [
        word("words.attentions_with", language, count=verdicts[name], what=Message(f"words.verdict.{name}"))
        for name in VERDICTS
        if verdicts[name]
    ]
    colon, comma, stop = (word(f"words.mark.{mark}", language) for mark in ("colon", "comma", "stop"))
    told = said(_attentions(len(attentions)), language) + colon + comma.join(each) + stop
    findings = Message("terminal.findings", count=f"{sum(len(line.findings) for line in ledger.lines):,}")
    return told + word("baseline.kept", language, findings=findings)


def to_json(comparison: BaselineComparison) -> str:
    """Return the comparison as one JSON document that ends with a newline."""
    fields: dict[str, Any] = {field.name: getattr(comparison, field.name) for field in dataclasses.fields(comparison)}
    tool = {"name": "sqrtdk", "version": importlib.metadata.version("sqrtdk")}
    return _json.json_document(
        {"schema_version": BASELINE_VERSION, "tool": tool, **fields, "exit_code": comparison.exit_code}
    )


def baseline_summary_line(comparison: BaselineComparison, language: Language = "en") -> str:
    """Return one line: how much changed, how much was not judged, and the exit code."""
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
    end = word("terminal.exit", language, code=comparison.exit_code, fail_on=comparison.fail_on)
    return word("words.mark.comma", language).join(part.said(language) for part in parts) + end


def to_text(comparison: BaselineComparison, *, width: int = 80, color: bool = False, language: Language = "en") -> str:
    """Return the comparison as text of at most `width` columns."""

    def draw(console: Console) -> None:
        names = {"model": plain(comparison.model), "file": plain(comparison.file)}
        mode = named("terminal.mode", comparison.mode)
        paragraph(console, word("baseline.against", language, **names, mode=mode), most=console.width)
        console.print()
        folds = list(_folded(comparison))
        for site, change, sites in folds[:_MOST_CHANGE_ROWS]:
            counts, style = ("fails", "red") if change.fails else ("not_counted", "dim")
            told = Text(word(f"baseline.{counts}", language), style)
            where = plain(site) or ROOT_NAME
            if sites > 1:
                where += bracketed(word("words.sites", language, count=f"{sites:,}"), language)
            what = _kind(change).said(language) + word("words.mark.colon", language)
            paragraph(console, told + Text(f"  {what}{where}", style="default"))
            for sign, side in _sides(change):
                paragraph(console, f"{sign} {_side(change, side, language)}", 7)
        if len(folds) > _MOST_CHANGE_ROWS:
            console.print(word("terminal.more_json", language, count=len(folds) - _MOST_CHANGE_ROWS))
        if folds:
            console.print()
        if any(change.fails for change in comparison.changes):
            paragraph(console, word("baseline.if_meant", language))
            console.print()
        paragraph(console, baseline_summary_line(comparison, language), most=console.width)

    return console_text(draw, width, color)


def to_markdown(comparison: BaselineComparison, language: Language = "en") -> str:
    """Return the comparison as a pull request comment; see `sqrtdk.report.check.markdown`."""
    return fitted(_parts(comparison, language), language)


def _parts(comparison: BaselineComparison, language: Language) -> Iterator[str]:
    outcome = Message("baseline.outcome.changed" if comparison.exit_code else "baseline.outcome.same")
    yield f"### {word('terminal.comment.title', language, model=markdown_code(comparison.model), outcome=outcome)}\n"
    file = word("baseline.file", language, file=comparison.file)
    yield markdown_text(f"{baseline_summary_line(comparison, language)} {file}", 1000) + "\n"
    folds = list(_folded(comparison))
    # changes that fail the run are shown; the others are folded away
    loud, quiet = ([fold for fold in folds if fold[1].fails is fails] for fails in (True, False))
    titles = [word("words.column.site", language)]
    titles += [word(f"baseline.{key}", language) for key in ("change", "before", "now")]
    if loud:
        yield markdown_table(titles, (_row(fold, language) for fold in loud[:_MOST_CHANGE_ROWS]))
        more = word("baseline.changes_not_shown", language, count=len(loud) - _MOST_CHANGE_ROWS)
        yield f"{word('baseline.write_anew', language)}\n" + (f"\n{more}\n" if len(loud) > _MOST_CHANGE_ROWS else "")
    if quiet:
        more = word("baseline.more_changes", language, count=f"{sum(sites for _, _, sites in quiet):,}")
        yield details(more, [markdown_table(titles, (_row(fold, language) for fold in quiet[:_MOST_CHANGE_ROWS]))])


def _row(fold: tuple[str, LedgerChange, int], language: Language) -> list[str]:
    site, change, sites = fold
    whole = change.what in ("attention", "finding")
    what = (_kind(change) if whole else Message(f"baseline.changed.{change.what}")).said(language)
    many = bracketed(str(sites), language) if sites > 1 else ""
    return [
        f"{markdown_code(site or ROOT_NAME)}{many}",
        f"**{what}**" if change.fails else what,
        *(
            "" if side is None else markdown_code(_value(change, side, language), 240)
            for side in (change.before, change.after)
        ),
    ]


def _folded(comparison: BaselineComparison) -> Iterator[tuple[str, LedgerChange, int]]:
    """Yield site, change and count. Equal changes of several layers are yielded once: "h.0-31.attn", change, 32."""

    def shown(change: LedgerChange) -> tuple[Any, ...]:
        return change.fails, change.kind, change.what, change.before, change.after, change.index

    for site, group in fold(comparison.changes, lambda change: change.site, shown):
        index = group[0].index
        yield f"{site} #{index}" if index else site, group[0], len(group)


def _kind(change: LedgerChange) -> Message:
    return Message(f"baseline.kind.{change.kind.replace(' ', '_')}")


def _sides(change: LedgerChange) -> Iterator[tuple[str, str]]:
    for sign, side in (("-", change.before), ("+", change.after)):
        if side is not None:
            yield sign, side


def _side(change: LedgerChange, side: str, language: Language) -> str:
    if change.what in ("attention", "finding"):
        return plain(side)
    value = _value(change, side, language)
    return word("baseline.value", language, what=Message(f"baseline.side.{change.what}"), value=plain(value))


def _value(change: LedgerChange, side: str, language: Language) -> str:
    """Return the value of one side; a verdict, such as "unexplained: missing", in words."""
    if change.what != "verdict":
        return side
    verdict, _, mistake = side.partition(": ")  # other verdicts than "unexplained: missing" have no mistake
    return verdict_text(verdict, mistake, language)


def _attentions(number: int) -> Message:
    return Message("words.attentions", count=f"{number:,}")
