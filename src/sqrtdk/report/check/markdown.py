"""Writes the report as a pull request comment: verdict, a small table, what to fix, and the rest folded away.

Names and messages are untrusted. Every character in them that Markdown or GitHub interprets is written as an entity, so
that they can't become a link, image, mention, reference or tag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from sqrtdk._language import Language
from sqrtdk._sites import ROOT_NAME
from sqrtdk.audit.records import OK, UNMEASURED, CheckReport
from sqrtdk.messages import Message, named
from sqrtdk.report.check import laws
from sqrtdk.report.check.fold import Fold, FoldedFinding, fold_calls, fold_findings, verdict_text
from sqrtdk.report.check.places import at_text, places_text
from sqrtdk.report.check.terminal import summary_line
from sqrtdk.report.environment import premises
from sqrtdk.report.figures import format_ratio
from sqrtdk.report.plain import plain
from sqrtdk.report.speaker import Speaker

MOST_CHARACTERS = 60_000  # GitHub rejects comments beyond 65536
_MOST_CALL_ROWS = 12
_MOST_OPEN = 8  # failing findings that are shown unfolded
_MOST_TEXT_CHARACTERS = 400  # characters of one text
# Markup characters, "_" at the edge of a word, the colon of "http://" and ":emoji:", and the dot of "www.": GitHub
# turns each of these into formatting, an emoji or a link.
_OBEYED = re.compile(
    r"[\\`*\[\]<>&~|$]|(?<![^\W_])_|_(?![^\W_])|:(?=//|[\w+-]+:)|(?<=www)\."
    r"|@|#(?=\w)|(?<=\bGH)-(?=\d)",  # @someone, #12, GH-12: GitHub looks for these after it has decoded entities
    re.IGNORECASE,
)


def to_markdown(report: CheckReport, language: Language = "en") -> str:
    """Draw the report as GitHub's Markdown, at most `MOST_CHARACTERS` long.

    Args:
        report: what `sqrtdk.check` returned.
        language: "en" or "zh"; names and formulas stay English.

    Returns:
        The text, ending with a newline.

    Example:
        >>> from sqrtdk.audit.records import ModelInfo
        >>> report = CheckReport(ModelInfo("a|b", "Decoder", 1), "static", (), (), (), ())
        >>> print(to_markdown(report).splitlines()[0])
        ### Attention of <code>a&#124;b</code>: passed
    """
    speaker = Speaker(language)
    return fitted(parts_of_report(report, speaker), speaker)


def fitted(parts: Iterable[str], speaker: Speaker) -> str:
    """Join parts of a comment, and leave out those at the end that exceed GitHub's limit of characters.

    A part is never cut, so that a `<details>` block is always closed.

    Args:
        parts: Markdown texts, the most important first.
        speaker: Speaks the sentence that says that parts were left out.
    """
    chosen: list[str] = []
    cut = f"\n{speaker.word('terminal.comment.cut')}\n"
    room = MOST_CHARACTERS - len(cut)
    for part in parts:
        room -= len(part) + 1
        if room < 0:
            return "\n".join(chosen) + cut
        chosen.append(part)
    return "\n".join(chosen).rstrip("\n") + "\n"


def markdown_text(words: str, longest: int = _MOST_TEXT_CHARACTERS) -> str:
    r"""Return an untrusted text on one line, with everything escaped that Markdown interprets.

    Example:
        >>> markdown_text("[x](http://a.b) *bold* @someone #1")
        '&#91;x&#93;(http&#58;//a.b) &#42;bold&#42; &#64;&#8203;someone &#35;&#8203;1'
    """
    words = plain(words)
    words = words if len(words) <= longest else words[: longest - 3] + "..."
    # the zero-width space (8203) keeps "@" from its name: GitHub decodes the entity before it looks for mentions
    return _OBEYED.sub(lambda found: f"&#{ord(found[0])};" + ("&#8203;" if found[0] in "@#-" else ""), words)


def markdown_code(words: str, longest: int = 160) -> str:
    """Return an untrusted text as inline code, in which GitHub looks for no mentions and references.

    Args:
        words: A text, for example the name of a module.
        longest: Number of characters after which the text is cut.

    Example:
        >>> markdown_code("model.layers.0")
        '<code>model.layers.0</code>'
    """
    return f"<code>{markdown_text(words, longest)}</code>"


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in GitHub's Markdown.

    Args:
        titles: Titles of the columns.
        rows: Cells, as many a row as there are titles; escape them before (`markdown_text`, `markdown_code`).

    Example:
        >>> print(markdown_table(["site", "scale"], [["h.0", "1/8"]]), end="")
        | site | scale |
        | --- | --- |
        | h.0 | 1/8 |
    """
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def details(title: str, lines: Iterable[str]) -> str:
    """Return Markdown that GitHub shows folded away under a title (`<details>`).

    Args:
        title: The title, already escaped.
        lines: Lines of Markdown.
    """
    return "\n".join((f"<details><summary>{title}</summary>\n", *lines, "\n</details>\n"))


def parts_of_report(report: CheckReport, speaker: Speaker, heading: str = "###") -> Iterator[str]:
    """Yield the parts of the comment, the most important first; `fitted` drops those that exceed GitHub's limit.

    Args:
        report: What `sqrtdk.check` returned.
        speaker: Speaks the sentences.
        heading: Mark of the heading's level.
    """
    # the first line is all that a mail or a phone shows of the comment
    outcome = Message(f"terminal.outcome.{report.outcome}")
    yield f"{heading} {speaker.word('terminal.comment.title', model=markdown_code(report.model.id), outcome=outcome)}\n"
    yield markdown_text(summary_line(report, speaker.language), 1000) + "\n"
    if report.calls:
        yield _ledger(report, speaker)
    folded = fold_findings(report.findings)
    failing = [entry for entry in folded if any(map(report.fails, entry.findings))]
    for entry in failing[:_MOST_OPEN]:
        yield finding_line(entry, speaker)
    rest = [*failing[_MOST_OPEN:], *(entry for entry in folded if entry not in failing)]
    if rest:
        yield ""
        id = "terminal.comment.more_findings" if failing else "terminal.findings"
        # folded away: a comment that is too long is not read at all
        yield details(speaker.word(id, count=f"{len(rest):,}"), (finding_line(entry, speaker) for entry in rest[:40]))
    if report.laws:
        yield ""
        counts = speaker.bracketed(laws.counts(report.laws))
        yield details(speaker.word("laws.page.title") + counts, _laws(report, speaker))
    yield from _asides(report, speaker)


def _ledger(report: CheckReport, speaker: Speaker) -> str:
    """Return the table of sites, worst health first."""
    order = ("critical", "fail", UNMEASURED, "warn", "note", OK)
    # worst first: what is cut off below must be the harmless part
    folds = sorted(fold_calls(report.calls), key=lambda fold: order.index(fold.first.health))
    rows = [_row(fold, speaker) for fold in folds[:_MOST_CALL_ROWS]]
    if len(folds) > _MOST_CALL_ROWS:
        left = sum(len(fold.calls) for fold in folds[_MOST_CALL_ROWS:])
        rows.append([speaker.word("terminal.comment.more_calls", count=f"{left:,}"), "", "", "", ""])
    titles = [speaker.word(f"words.column.{key}") for key in ("site", "formula", "ratio", "verdict", "health")]
    return markdown_table(titles, rows)


def _row(fold: Fold, speaker: Speaker) -> list[str]:
    judged = fold.first
    verdict = speaker.said(verdict_text(judged.verdict, judged.mistake))
    verdict = verdict if judged.verdict in ("exact", "declared") else f"**{markdown_text(verdict)}**"
    health = speaker.word(f"words.severity.{judged.health}")
    sites = markdown_code(fold.site) + (speaker.bracketed(str(len(fold.calls))) if len(fold.calls) > 1 else "")
    return [sites, markdown_code(judged.call.formula, 240), format_ratio(judged.call.scale.ratio), verdict, health]


def finding_line(entry: FoldedFinding, speaker: Speaker) -> str:
    """Return a folded finding as an item of a list: severity, sites, message and fix."""
    first = entry.first
    sites = markdown_code(entry.site or ROOT_NAME)
    if entry.several is not None:
        sites += speaker.bracketed(entry.several)
    at = f"{speaker.mark('comma')}{markdown_code(speaker.said(at_text(first.at)))}" if first.at else ""
    severity = speaker.word(f"words.severity.{first.severity}")
    message, fix = (markdown_text(speaker.said(sentence)) for sentence in (entry.message, first.fix))
    fix = speaker.word("terminal.comment.fix", fix=fix)
    return f"- **{severity}** {sites}{at}{speaker.mark('colon')}{message}{fix}"


def _laws(report: CheckReport, speaker: Speaker) -> Iterator[str]:
    """Yield one line for each row of `laws.law_rows`."""
    for row in laws.law_rows(report.laws):
        names = markdown_text(speaker.said(laws.listed_laws(row)))
        answer = speaker.join(filter(None, (laws.answer_in_words(row), laws.what_of(row))))
        yield f"- **{names}**{speaker.mark('colon')}{markdown_text(answer)}"


def _asides(report: CheckReport, speaker: Speaker) -> Iterator[str]:
    """Yield the folded part of the comment with what was not measured, and the environment."""
    lines = [
        f"- {markdown_text(what + speaker.bracketed(speaker.sites(sites)))}"
        for what, sites in list((_written(report, speaker) | _unmeasured(report, speaker)).items())[:40]
    ]
    lines += [f"- {markdown_text(speaker.said(note))}" for note in premises(report.environment)[:8]]
    names = ("sqrtdk", "python", "torch", "transformers", "device", "dtype", "attn")
    environment = [
        f"{speaker.said(named('terminal.environment', name))} {report.environment[name]}"
        for name in names
        if report.environment.get(name)
    ]
    if environment:
        environment += [named("terminal.mode", report.mode), Message("words.seed", seed=report.seed)]
        lines.append(f"- {markdown_text(speaker.join(environment))}")
    if lines:
        yield ""
        yield details(speaker.word("terminal.comment.how"), lines)


def _written(report: CheckReport, speaker: Speaker) -> dict[str, list[str]]:
    """Return who declared a scale and where an attention is written -> the sites for which that holds."""
    written: dict[str, list[str]] = {}
    for fold in fold_calls(report.calls):
        if by := fold.first.declared_by:
            at = fold.first.declared_at
            declared = Message("terminal.declared_at", by=by, at=at) if at else Message("terminal.declared_by", by=by)
            written.setdefault(speaker.said(declared), []).append(fold.site)
        if places := places_text(fold.first.call):
            written.setdefault(speaker.word("terminal.written", places=places), []).append(fold.site)
    return written


def _unmeasured(report: CheckReport, speaker: Speaker) -> dict[str, list[str]]:
    """Return why something was not measured -> the sites for which that holds."""
    missed: dict[str, list[str]] = {}
    for entry in report.not_measured:
        if not report.repeated(entry):
            what = speaker.join([Message(f"words.severity.{UNMEASURED}"), entry.reason], "colon")
            missed.setdefault(what, []).append(entry.site or ROOT_NAME)
    return missed
