"""A baseline as its file, and a run held against one: for the terminal, as JSON, and as a comment."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections import Counter
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from sqrtdk import _json
from sqrtdk._sites import ROOT, fold
from sqrtdk.audit.baseline import SCHEMA_VERSION, Change, Comparison, Ledger
from sqrtdk.audit.records import VERDICTS
from sqrtdk.report.console import drawn, paragraph
from sqrtdk.report.figures import count
from sqrtdk.report.markdown import code, details, fitted, table, text
from sqrtdk.report.plain import plain
from sqrtdk.report.terminal_words import WORDS, named

_MOST = 40  # folded changes that are shown


def to_file(ledger: Ledger) -> str:
    """The content of a baseline: JSON, sorted by site, one line for each attention.

    Example:
        >>> from sqrtdk.audit.baseline import Line
        >>> line = Line("h.0", 0, "softmax(q.k)", 8.0, "unexplained", "missing", ("fail scale_ledger",))
        >>> print(to_file(Ledger("m", "static", (line,))).split("\\n")[5][:60])
            {"site": "h.0", "index": 0, "formula": "softmax(q.k)", "
    """
    lines = [
        {field.name: getattr(line, field.name) for field in dataclasses.fields(line)}
        | {"findings": ", ".join(line.findings)}
        for line in ledger.lines
    ]
    return _json.document(
        {"schema_version": SCHEMA_VERSION, "model": ledger.model, "mode": ledger.mode, "attentions": lines}
    )


def ledger_line(ledger: Ledger) -> str:
    """What a ledger holds, in a line."""
    attentions = [line for line in ledger.lines if line.verdict is not None]
    verdicts = Counter(line.verdict for line in attentions)
    told = ", ".join(f"{verdicts[name]} {name}" for name in VERDICTS if verdicts[name])
    kinds = sum(len(line.findings) for line in ledger.lines)
    return f"{count(len(attentions), 'attention')}: {told}. {count(kinds, 'finding')} that will not fail later."


def to_json(comparison: Comparison) -> str:
    """The comparison as one JSON document that ends with a newline."""
    fields: dict[str, Any] = {field.name: getattr(comparison, field.name) for field in dataclasses.fields(comparison)}
    tool = {"name": "sqrtdk", "version": importlib.metadata.version("sqrtdk")}
    return _json.document({"schema_version": SCHEMA_VERSION, "tool": tool, **fields, "exit_code": comparison.exit_code})


def summary_line(comparison: Comparison) -> str:
    """How much changed, what was not judged, and the exit code."""
    failing = sum(change.fails for change in comparison.changes)
    others = len(comparison.changes) - failing
    parts = [count(failing, "change") if failing else "Nothing changed that counts"]
    parts += [f"{others} more that do not count"] if others else []
    parts += [f"{count(comparison.unchanged, 'attention')} as in the baseline"]
    parts += [f"{count(comparison.unjudged, 'attention')} not judged"] if comparison.unjudged else []
    return f"{', '.join(parts)}. Exit code {comparison.exit_code} (fail-on: {comparison.fail_on})."


def to_text(comparison: Comparison, *, width: int = 80, color: bool = False) -> str:
    """The comparison as text of at most `width` columns."""

    def draw(console: Console) -> None:
        mode = named(WORDS, comparison.mode, "en")
        paragraph(console, f"{plain(comparison.model)} against {plain(comparison.file)}, {mode}", most=console.width)
        console.print()
        folds = list(_folded(comparison))
        for site, change, sites in folds[:_MOST]:
            many = f" ({count(sites, 'site')})" if sites > 1 else ""
            told = Text("fails", style="red") if change.fails else Text("told ", style="dim")
            paragraph(console, told + Text(f"  {change.kind}: {plain(site) or ROOT}{many}", style="default"))
            for sign, said in _sides(change):
                paragraph(console, f"{sign} {_said(change, said)}", 7)
        if len(folds) > _MOST:
            console.print(f"... and {len(folds) - _MOST} more: see --json")
        if folds:
            console.print()
        if any(change.fails for change in comparison.changes):
            paragraph(console, "If the change is meant: sqrtdk baseline write --force, and review the file.")
            console.print()
        paragraph(console, summary_line(comparison), most=console.width)

    return drawn(draw, width, color)


def to_markdown(comparison: Comparison) -> str:
    """The comparison as a comment on a pull request, see `sqrtdk.report.markdown`."""
    return fitted(_parts(comparison))


def _parts(comparison: Comparison) -> Iterator[str]:
    title = "changed" if comparison.exit_code else "as in the baseline"
    yield f"### Attention of {code(comparison.model)}: {title}\n"
    yield text(f"{summary_line(comparison)} Baseline: {comparison.file}.", 1000) + "\n"
    folds = list(_folded(comparison))
    loud, quiet = ([fold for fold in folds if fold[1].fails is fails] for fails in (True, False))
    titles = ("site", "change", "before", "now")
    if loud:
        yield table(titles, map(_row, loud[:_MOST]))
        yield "If it is meant, write the baseline anew and review it.\n" + (
            f"\n{len(loud) - _MOST} more changes are not shown.\n" if len(loud) > _MOST else ""
        )
    if quiet:
        yield details(f"{count(len(quiet), 'more change')}, not counted", [table(titles, map(_row, quiet[:_MOST]))])


def _row(fold: tuple[str, Change, int]) -> list[str]:
    site, change, sites = fold
    what = change.kind if change.what in ("attention", "finding") else f"{change.what} {change.kind}"
    many = f" ({sites})" if sites > 1 else ""
    return [
        f"{code(site or ROOT)}{many}",
        f"**{what}**" if change.fails else what,
        *("" if said is None else code(said, 240) for said in (change.before, change.after)),
    ]


def _folded(comparison: Comparison) -> Iterator[tuple[str, Change, int]]:
    """Equal changes of layers as one, with how many they are."""

    def said(change: Change) -> tuple[Any, ...]:
        return change.fails, change.kind, change.what, change.before, change.after, change.index

    for site, group in fold(comparison.changes, lambda change: change.site, said):
        index = group[0].index
        yield f"{site} #{index}" if index else site, group[0], len(group)


def _sides(change: Change) -> Iterator[tuple[str, str]]:
    for sign, said in (("-", change.before), ("+", change.after)):
        if said is not None:
            yield sign, said


def _said(change: Change, said: str) -> str:
    return plain(said) if change.what in ("attention", "finding") else f"{change.what} {plain(said)}"
