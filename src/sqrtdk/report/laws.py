"""Draws the answers of the laws (kept, broken, not asked), and which positions a broken law let move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from rich.console import Console
from rich.text import Text as Line

from sqrtdk._language import Language
from sqrtdk._sites import ROOT, ranges
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from sqrtdk.messages import Text, say
from sqrtdk.report.console import Column, paragraph, print_table
from sqrtdk.report.page import both
from sqrtdk.report.plain import plain
from sqrtdk.report.said import said
from sqrtdk.report.terminal_words import SEVERITIES, word

WIDEST = 64  # squares of a picture; with more positions, several share a square
NAMES = {
    "finite": Text("finite", "有限"),
    "samples": Text("samples", "样本"),
    "causal": Text("causal", "因果"),
    "padding": Text("padding", "填充"),
    "documents": Text("documents", "文档"),
    "left_padding": Text("left_padding", "左填充"),
    "cache": Text("cache", "缓存"),
    "shift": Text("shift", "平移"),
    "place": Text("place", "位置对应"),
    "configured": Text("configured", "配置"),
    "parameters": Text("parameters", "参数"),
    "modes": Text("modes", "运行方式"),
}
STATES = {KEPT: Text(KEPT, "成立"), BROKEN: Text(BROKEN, "不成立"), NOT_ASKED: Text(NOT_ASKED, "未检验")}
WORDS = {
    "laws": Text("Laws", "定律"),
    "counts": Text(
        "{kept} kept, {broken} broken, {not_asked} not asked", "{kept} 条成立，{broken} 条不成立，{not_asked} 条未检验"
    ),
    "law": Text("law", "定律"),
    "answer": Text("answer", "结果"),
    "what": Text("what was changed, where it shows, or why it was not asked", "改变了什么、出现在何处，或为何未检验"),
    "at": Text("{about}, first in {site}", "{about}，最先出现在 {site}"),
    "of": Text("{about}: {why}", "{about}：{why}"),
    "moved": Text("{law}: positions {which} of 0-{last} moved", "{law}：位置 0-{last} 中，{which} 发生了变化"),
    "several": Text("{text}, {count} in one mark", "{text}，每个标记代表 {count} 个"),
    "mean": Text(
        "A law changes one thing and looks at what moves: a later token must not move an earlier output.",
        "每条定律只改变一处，看什么随之变化：后面的词元不应改变前面的输出。",
    ),
}
_STYLES = {
    KEPT: "green", NOT_ASKED: "dim",
    "note": "cyan", "warn": "yellow", "fail": "red", "critical": "bold white on red",
}  # fmt: skip
_MARKS = {True: "#", False: "."}


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: a broken law, or all laws that were kept, or all that were not asked for one reason."""

    laws: tuple[str, ...]
    answer: LawAnswer

    @property
    def severity(self) -> str | None:
        """The severity of a broken law's finding, else None."""
        return self.answer.finding.severity if self.answer.finding is not None else None


def rows_of(answers: Sequence[LawAnswer]) -> tuple[Row, ...]:
    """Fold the answers into rows: broken laws first, laws that were not asked last.

    A law that answered for several inputs keeps a row for each input.

    Example:
        >>> kept = [LawAnswer("finite", "", KEPT), LawAnswer("causal", "input_ids", KEPT)]
        >>> rows_of([*kept, LawAnswer("padding", "", NOT_ASKED, "no input is a mask")])[0].laws
        ('finite', 'causal')
    """
    times = Counter(answer.law for answer in answers)
    groups: dict[tuple[str, ...], list[LawAnswer]] = {}  # keys hold all that the members of a row share
    for place, answer in enumerate(answers):
        about = answer.about if times[answer.law] > 1 else ""  # of a single input the name says nothing
        alone = str(place) if answer.state == BROKEN else ""  # a key of its own: broken laws are never folded
        groups.setdefault((answer.state, answer.reason, about, alone), []).append(answer)
    rows = []
    for (state, reason, about, _), members in groups.items():
        first = members[0] if state == BROKEN else LawAnswer("", about, state, reason)
        rows.append(Row(tuple(dict.fromkeys(answer.law for answer in members)), first))
    order = (BROKEN, KEPT, NOT_ASKED)
    return tuple(sorted(rows, key=lambda row: order.index(row.answer.state)))


def picture(moved: Sequence[bool], most: int = WIDEST) -> tuple[bool, ...]:
    """Return which positions moved, in at most `most` marks. A mark is True if any of its positions moved.

    Example:
        >>> picture((False, False, True)), picture((False, False, False, True, True, True), 3)
        ((False, False, True), (False, True, True))
    """
    each = each_of(moved, most)
    return tuple(any(moved[place : place + each]) for place in range(0, len(moved), each))


def each_of(moved: Sequence[bool], most: int = WIDEST) -> int:
    """Return the number of positions that share a mark of the picture."""
    return max(-(-len(moved) // most), 1)  # rounded up


def named_law(law: str) -> Text:
    """Return a law's name in both languages; the Chinese is followed by the identifier."""
    name = NAMES.get(law)
    return Text(law, law) if name is None else Text(law, f"{name.zh}（{law}）")


def answer_of(row: Row) -> Text:
    """Return the answer as a text; a broken law has its severity behind it."""
    state = STATES[row.answer.state]
    if row.severity is None:
        return state
    return Text(f"{state.en}: {SEVERITIES[row.severity].en}", f"{state.zh}：{SEVERITIES[row.severity].zh}")


def what_of(row: Row, *, message: bool = False) -> Text:
    """Return what was changed and where it first shows, the reason for not asking, or a broken law's message."""
    answer = row.answer
    reason, about = (Text(text, said(text, "zh")) for text in (answer.reason, answer.about))
    if answer.state != BROKEN or answer.finding is None:
        if not (about.en and reason.en):
            return reason if reason.en else about
        return WORDS["of"].filled(about=about, why=reason)
    if message:
        return reason
    return WORDS["at"].filled(about=about, site=answer.site) if answer.site else about


def draw_laws(console: Console, answers: Sequence[LawAnswer], language: Language = "en") -> None:
    """Print the table and the pictures of broken laws, or nothing if there are no answers."""
    if not answers:
        return
    title = Line(say(WORDS["laws"], language), style="bold")
    title.append(f"  {say(counts(answers), language)}", style="not bold dim")
    paragraph(console, title, 0)
    rows = rows_of(answers)
    columns = [Column("", prose=True), Column(""), Column("", prose=True)]
    cells = [
        (
            Line(word("list comma", language).join(plain(say(named_law(law), language)) for law in row.laws)),
            Line(say(answer_of(row), language), style=_STYLES.get(row.severity or row.answer.state, "red")),
            Line(plain(say(what_of(row), language))),
        )
        for row in rows
    ]
    print_table(console, columns, cells, indent=2, language=language)
    for row in rows:
        for line in _pictured(row, min(WIDEST, console.width - 6), language):
            paragraph(console, line, 2)
    console.print()


def _pictured(row: Row, most: int, language: Language) -> Iterator[Line]:
    moved = row.answer.moved
    if row.answer.state != BROKEN or not moved:
        return
    yield Line(plain(say(caption(row, most), language)))
    marks = "".join(_MARKS[mark] for mark in picture(moved, most))
    yield Line(f"  {marks}", style=_STYLES.get(row.severity or "", ""))


def caption(row: Row, most: int = WIDEST) -> Text:
    """Return the caption of a picture."""
    moved = row.answer.moved
    which = ranges([position for position, mark in enumerate(moved) if mark])
    text = WORDS["moved"].filled(law=named_law(row.answer.law), last=len(moved) - 1, which=which)
    each = each_of(moved, most)
    return WORDS["several"].filled(text=text, count=each) if each > 1 else text


def counts(answers: Sequence[LawAnswer]) -> Text:
    """Return the number of laws kept, broken and not asked. A law with several answers counts once, by the worst."""
    states: dict[str, str] = {}
    order = (BROKEN, KEPT, NOT_ASKED)
    for answer in answers:
        states[answer.law] = min(states.get(answer.law, NOT_ASKED), answer.state, key=order.index)
    tally = Counter(states.values())
    return WORDS["counts"].filled(kept=tally[KEPT], broken=tally[BROKEN], not_asked=tally[NOT_ASKED])


def section(answers: Sequence[LawAnswer]) -> dict[str, Any] | None:
    """Return the page's section on laws, or None if there are no answers."""
    if not answers:
        return None
    return {
        "title": both(WORDS["laws"]),
        "counts": both(counts(answers)),
        "mean": both(WORDS["mean"]),
        "titles": [both(WORDS[key]) for key in ("law", "answer", "what")],
        "rows": [
            {
                "laws": [both(named_law(law)) for law in row.laws],
                "tone": _tone(row),
                "answer": both(answer_of(row)),
                "what": both(what_of(row, message=True)),
                "about": _told(row.answer.about) if row.answer.finding is not None else "",
                "site": (row.answer.site or ROOT) if row.answer.finding is not None else "",
                "squares": picture(row.answer.moved),
                "caption": both(caption(row)) if row.answer.moved else "",
            }
            for row in rows_of(answers)
        ],
    }


def _told(text: str) -> Markup:
    """Return a sentence or the name of an input in both languages."""
    return both(Text(text, said(text, "zh")))


def _tone(row: Row) -> str:
    """Return the CSS class of a row's badge."""
    if row.answer.state == BROKEN:
        return f"s-{row.severity or 'critical'}"
    return "v-exact" if row.answer.state == KEPT else "v-plain"
