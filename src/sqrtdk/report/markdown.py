"""The report as a comment on a pull request: the verdict, a small table, what to mend, and the rest folded away.

Names and messages come from strangers. Where they stand, every character that Markdown or GitHub would obey is written
as an entity: no link, image, mention, reference or tag comes out of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from sqrtdk.audit.records import OK, UNMEASURED, CheckReport
from sqrtdk.report.console import listed
from sqrtdk.report.figures import count, ratio
from sqrtdk.report.fold import Fold, FoldedFinding, fold_calls, fold_findings
from sqrtdk.report.places import places_text
from sqrtdk.report.plain import plain
from sqrtdk.report.terminal import summary_line

MOST_CHARACTERS = 60_000  # GitHub takes comments of 65536
_MOST_ROWS = 12
_MOST_OPEN = 8  # findings that are not folded away
_LONGEST = 400  # characters of one text
_TITLES = {
    "failed": "failed",
    "findings": "findings, none at the bar",
    "incomplete": "not all of it could be judged",
    "warnings": "passed, with warnings",
    "scales": "scales passed, nothing else was looked at",
    "passed": "passed",
}
_OBEYED = re.compile(
    r"[\\`*\[\]<>&~|$]|(?<!\w)_|_(?!\w)|:(?=//|[\w+-]+:)|(?<=www)\."
    r"|@|#(?=\w)|(?<=\bGH)-(?=\d)",  # people, and other threads, which GitHub looks for after entities are read
    re.IGNORECASE,
)
_CUT = "\n... the rest is cut: see the JSON or HTML report\n"


def to_markdown(report: CheckReport) -> str:
    """Draw the report as GitHub's Markdown, at most `MOST_CHARACTERS` long.

    Args:
        report: what `sqrtdk.check` returned.

    Returns:
        The text, ending with a newline.

    Example:
        >>> from sqrtdk.audit.records import ModelInfo
        >>> print(to_markdown(CheckReport(ModelInfo("a|b", "Decoder", 1), "static", (), (), (), ())))
        ### Attention of <code>a&#124;b</code>: passed
        <BLANKLINE>
        0 attention calls. No findings, on scales and formulas alone. Exit code 0 (fail-on: fail).
        <BLANKLINE>
    """
    return fitted(_parts(report))


def fitted(parts: Iterable[str]) -> str:
    """Join whole parts while they fit; what stands between `<details>` is one part."""
    chosen: list[str] = []
    room = MOST_CHARACTERS - len(_CUT)
    for part in parts:
        room -= len(part) + 1
        if room < 0:
            return "\n".join(chosen) + _CUT
        chosen.append(part)
    return "\n".join(chosen).rstrip("\n") + "\n"


def text(words: str, longest: int = _LONGEST) -> str:
    r"""A stranger's text, on one line, with nothing in it that Markdown obeys.

    Example:
        >>> text("[x](http://a.b) *bold* @someone #1")
        '&#91;x&#93;(http&#58;//a.b) &#42;bold&#42; &#64;&#8203;someone &#35;&#8203;1'
    """
    words = plain(words)
    words = words if len(words) <= longest else words[: longest - 3] + "..."
    return _OBEYED.sub(lambda found: f"&#{ord(found[0])};" + ("&#8203;" if found[0] in "@#-" else ""), words)


def code(words: str, longest: int = 160) -> str:
    """The same in the type of code, which GitHub does not search for people and threads."""
    return f"<code>{text(words, longest)}</code>"


def table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that are Markdown already."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def details(title: str, lines: Iterable[str]) -> str:
    """Lines that are folded away under a title."""
    return "\n".join((f"<details><summary>{title}</summary>\n", *lines, "\n</details>\n"))


def _parts(report: CheckReport) -> Iterator[str]:
    yield f"### Attention of {code(report.model.id)}: {_TITLES[report.outcome]}\n"
    yield text(summary_line(report), 1000) + "\n"
    notes = [str(note) for note in report.environment.get("notes") or ()]
    if report.calls:
        yield _ledger(report)
    folded = fold_findings(report.findings)
    failing = [entry for entry in folded if any(map(report.fails, entry.findings))]
    for entry in failing[:_MOST_OPEN]:
        yield _finding(entry)
    rest = [*failing[_MOST_OPEN:], *(entry for entry in folded if entry not in failing)]
    if rest:
        yield ""
        yield details(f"{count(len(rest), 'more finding' if failing else 'finding')}", map(_finding, rest[:40]))
    yield from _asides(report, notes)


def _ledger(report: CheckReport) -> str:
    """The lines of the table, those that are not as they should be first."""
    order = ("critical", "fail", UNMEASURED, "warn", "note", OK)
    folds = sorted(fold_calls(report.calls), key=lambda fold: order.index(fold.first.health))
    rows = [_row(fold) for fold in folds[:_MOST_ROWS]]
    if len(folds) > _MOST_ROWS:
        left = sum(len(fold.calls) for fold in folds[_MOST_ROWS:])
        rows.append([f"and {count(left, 'more call')}", "", "", "", ""])
    return table(("site", "formula", "ratio", "verdict", "health"), rows)


def _row(fold: Fold) -> list[str]:
    judged = fold.first
    verdict = f"{judged.verdict}: {judged.mistake}" if judged.mistake else judged.verdict
    verdict = verdict if judged.verdict in ("exact", "declared") else f"**{text(verdict)}**"
    health = "not measured" if judged.health == UNMEASURED else judged.health
    sites = code(fold.site) + (f" ({len(fold.calls)})" if len(fold.calls) > 1 else "")
    return [sites, code(judged.call.formula, 240), ratio(judged.call.scale.ratio), verdict, health]


def _finding(entry: FoldedFinding) -> str:
    first = entry.first
    sites = code(entry.site or "whole model")
    many = f" ({count(len(entry.findings), 'site')})" if len(entry.findings) > 1 else ""
    at = f", {code(first.at)}" if first.at else ""
    return f"- **{first.severity}** {sites}{many}{at}: {text(first.message)}. **Fix:** {text(first.fix)}"


def _asides(report: CheckReport, notes: Sequence[str]) -> Iterator[str]:
    written: dict[str, list[str]] = {}
    for fold in fold_calls(report.calls):
        if declared := fold.first.declared_by:
            at = f" at {fold.first.declared_at}" if fold.first.declared_at else ""
            written.setdefault(f"declared by {declared}{at}", []).append(fold.site)
        if places := places_text(fold.first.call):
            written.setdefault(f"written: {places}", []).append(fold.site)
    missed: dict[str, list[str]] = {}
    for entry in report.not_measured:
        if not report.repeated(entry):
            missed.setdefault(f"not measured: {entry.reason}", []).append(entry.site or "whole model")
    lines = [f"- {text(what)} ({text(listed(sites))})" for what, sites in list((written | missed).items())[:40]]
    lines += [f"- {text(note)}" for note in notes[:8]]
    versions = ("sqrtdk", "python", "torch", "transformers", "device", "dtype", "attn")
    told = [f"{name} {report.environment[name]}" for name in versions if report.environment.get(name)]
    if told:
        lines.append(f"- {text(', '.join(told))}, {report.mode}, seed {report.seed}")
    if lines:
        yield ""
        yield details("How it was read", lines)
