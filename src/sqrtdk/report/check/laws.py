"""Draws the answers of the laws (kept, broken, not asked), and which positions a broken law let move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqrtdk._sites import fold_sites, range_list
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from sqrtdk.messages import Message, id_of, joined, named
from sqrtdk.report.console import FINDING_STYLES, TableColumn
from sqrtdk.report.printer import Printer

MOST_SQUARES = 64  # squares of a picture; with more positions, several share a square
LAW_STATES = {KEPT: "laws.states.kept", BROKEN: "laws.states.broken", NOT_ASKED: "laws.states.not_asked"}
_LAW_STYLES = {KEPT: "green", NOT_ASKED: "dim"} | FINDING_STYLES
_PLAIN_WORDS = {"laws.place.about.split": "laws.page.heads_split", "laws.place.about.merge": "laws.page.heads_merged"}
_SQUARE_MARKS = {True: "#", False: "."}


@dataclass(frozen=True, slots=True)
class ShownLaw:
    """One line of the table of laws: a broken law, all laws that hold, or all that were not asked for one reason.

    Attributes:
        laws: Identifiers of the laws, each once.
        answer: The answer that the line shows, which is true of all of them.
        abouts: For each law, what it was asked about, if it has several answers: ("dynamic", "static").
        sites: Where a broken law is broken alike, if at several modules: ("layers.0-3.attn",).
    """

    laws: tuple[str, ...]
    answer: LawAnswer
    abouts: tuple[tuple[str, ...], ...] = ()
    sites: tuple[str, ...] = ()

    @property
    def severity(self) -> str | None:
        """The severity of the finding of a broken law; None if the law is not broken."""
        return self.answer.finding.severity if self.answer.finding is not None else None


def _alone(place: int, answer: LawAnswer) -> tuple[str, ...]:
    """Return what keeps an answer in a row of its own: its place if it is broken, unless layers are broken alike."""
    if answer.state != BROKEN:
        return ("",)
    alike = not answer.about and answer.site and not answer.moved and answer.finding is not None
    return (answer.law, answer.finding.severity) if alike and answer.finding is not None else (str(place),)


def law_rows(answers: Sequence[LawAnswer]) -> tuple[ShownLaw, ...]:
    """Fold the answers into rows: broken laws first, then one row of those that hold, then a row for each reason.

    A law stands once in a row, with what it was asked about behind it if it has several answers.

    Example:
        >>> kept = [LawAnswer("finite", "", KEPT), *(LawAnswer("cache", kind, KEPT) for kind in ("dynamic", "static"))]
        >>> row, _ = law_rows([*kept, LawAnswer("padding", "", NOT_ASKED, "no input is a mask")])
        >>> row.laws, row.abouts
        (('finite', 'cache'), ((), ('dynamic', 'static')))
    """
    times = Counter(answer.law for answer in answers)
    groups: dict[tuple[str, ...], list[LawAnswer]] = {}  # keys hold all that the members of a row share
    for place, answer in enumerate(answers):
        groups.setdefault((answer.state, answer.reason, *_alone(place, answer)), []).append(answer)
    rows = []
    for (state, reason, *_), members in groups.items():
        abouts: dict[str, list[str]] = {}
        for answer in members:  # of a single input the name says nothing
            abouts.setdefault(answer.law, []).extend([answer.about] if answer.about and times[answer.law] > 1 else [])
        if state == BROKEN:
            sites = fold_sites(answer.site for answer in members) if len(members) > 1 else ()
            rows.append(ShownLaw(tuple(abouts), members[0], sites=sites))
        else:
            rows.append(ShownLaw(tuple(abouts), LawAnswer("", "", state, reason), tuple(map(tuple, abouts.values()))))
    order = (BROKEN, KEPT, NOT_ASKED)
    return tuple(sorted(rows, key=lambda row: order.index(row.answer.state)))


def not_asked(rows: Sequence[ShownLaw]) -> Message | None:
    """Return one line that counts and names the laws that were not asked; None if all were.

    Example:
        >>> str(not_asked(law_rows([LawAnswer("padding", "", NOT_ASKED, "no input is a mask")])))
        '1 not asked: padding'
    """
    asked = {law for row in rows if row.answer.state != NOT_ASKED for law in row.laws}
    left = [row for row in rows if row.answer.state == NOT_ASKED]
    whole = list(dict.fromkeys(named_law(law) for row in left for law in row.laws if law not in asked))
    part = [name for row in left for law, name in zip(row.laws, law_names(row), strict=True) if law in asked]
    text = Message("laws.page.folded", count=len(whole), laws=joined(whole, "comma")) if whole else None
    if not part:
        return text
    names = joined(part, "comma")
    return (
        Message("laws.page.in_part", laws=names) if text is None else Message("laws.page.also", text=text, laws=names)
    )


def picture(moved: Sequence[bool], most: int = MOST_SQUARES) -> tuple[bool, ...]:
    """Return which positions moved, in at most `most` marks. A mark is True if any of its positions moved.

    Example:
        >>> picture((False, False, True)), picture((False, False, False, True, True, True), 3)
        ((False, False, True), (False, True, True))
    """
    each = each_of(moved, most)
    return tuple(any(moved[place : place + each]) for place in range(0, len(moved), each))


def each_of(moved: Sequence[bool], most: int = MOST_SQUARES) -> int:
    """Return how many positions share one mark of the picture: the least number so that at most `most` marks are drawn.

    Example:
        >>> each_of([False] * 30, most=32), each_of([False] * 65, most=32)
        (1, 3)
    """
    return max(-(-len(moved) // most), 1)  # rounded up


def named_law(law: str) -> str:
    """Return the name of a law as a reader sees it; in Chinese, the identifier follows the name.

    Example:
        >>> named_law("causal"), named_law("causal").said("zh")
        ('causal', '因果（causal）')
    """
    return named("laws.names", law)


def law_names(row: ShownLaw) -> list[str]:
    """Return the names of the laws of a row, each with what it was asked about: "cache (dynamic, static)"."""
    abouts = row.abouts or ((),) * len(row.laws)
    return [
        Message("joins.brackets", first=named_law(law), second=joined([in_plain_words(one) for one in about], "comma"))
        if about
        else named_law(law)
        for law, about in zip(row.laws, abouts, strict=True)
    ]


def in_plain_words(about: str) -> str:
    """Return what a law was asked about in plain words, as "heads split" for the half "split" of `place`."""
    id = id_of(about)
    return Message(_PLAIN_WORDS[id]) if id in _PLAIN_WORDS else about


def listed_laws(row: ShownLaw) -> str:
    """Return the names of the laws of a row as one sentence, as "causal, padding"."""
    return joined(law_names(row), "comma")


def answer_in_words(row: ShownLaw) -> str:
    """Return the state of a row's laws in words; for a broken law its severity follows, as "broken: fail"."""
    state = Message(LAW_STATES[row.answer.state])
    return state if row.severity is None else joined([state, Message(f"words.severity.{row.severity}")], "colon")


def what_of(row: ShownLaw, *, message: bool = False) -> str:
    """Return the third column of the table of laws.

    Args:
        row: A row of the table.
        message: Whether a broken law is described by its message, rather than by what was changed and where that shows.

    Returns:
        For a broken law, the input that was changed and the first module whose output moved, or the message. For other
        laws, the input and the reason for not asking. It is "" if there is nothing to say.
    """
    answer = row.answer
    if answer.state != BROKEN or answer.finding is None:
        parts = [part for part in (answer.about, answer.reason) if part]
        return joined(parts, "colon") if parts else ""
    if message:
        return answer.reason
    if answer.site and answer.about:
        return Message("laws.page.first_in", about=in_plain_words(answer.about), site=answer.site)
    if row.sites:
        return joined(row.sites, "comma")
    return answer.site or in_plain_words(answer.about)  # a law that changes no input has a place alone


def draw_laws(printer: Printer, answers: Sequence[LawAnswer], reasons: bool = False) -> None:
    """Print the table of laws, and a picture of the moved positions for each broken law.

    Args:
        printer: Where to print, and in which language.
        answers: Answers of the laws; if there are none, nothing is printed.
        reasons: Whether each reason for not asking has a line; else one line names the laws that were not asked.
    """
    if not answers:
        return
    title = printer.line(Message("laws.page.title"), "bold")
    printer.paragraph(title.append(f"  {printer.said(counts(answers))}", style="not bold dim"))
    rows = law_rows(answers)
    columns = [TableColumn("", prose=True), TableColumn(""), TableColumn("", prose=True)]
    cells = [
        (
            listed_laws(row),
            printer.line(answer_in_words(row), _LAW_STYLES.get(row.severity or row.answer.state, "red")),
            what_of(row),
        )
        for row in rows
        if reasons or row.answer.state != NOT_ASKED
    ]
    if cells:
        printer.table(columns, cells, indent=2)
    if not reasons and (folded := not_asked(rows)):
        printer.paragraph(joined([folded, Message("laws.page.why")]), 2, "dim")
    for row in rows:
        if row.answer.state == BROKEN and row.answer.moved:
            most = min(MOST_SQUARES, printer.console.width - 6)
            printer.paragraph(caption(row, most), 2)
            marks = "".join(_SQUARE_MARKS[mark] for mark in picture(row.answer.moved, most))
            printer.paragraph(f"  {marks}", 2, _LAW_STYLES.get(row.severity or "", ""))
    printer.blank()


def caption(row: ShownLaw, most: int = MOST_SQUARES) -> Message:
    """Return the caption of the picture of a broken law: which positions moved.

    Args:
        row: A row of a broken law, whose answer has `moved`.
        most: Largest number of marks in the picture; with more positions, a mark stands for several.
    """
    moved = row.answer.moved
    which = range_list([position for position, mark in enumerate(moved) if mark])
    positions = Message("laws.page.moved", law=named_law(row.answer.law), last=len(moved) - 1, which=which)
    each = each_of(moved, most)
    return Message("laws.page.several_in_mark", text=positions, count=each) if each > 1 else positions


def counts(answers: Sequence[LawAnswer]) -> Message:
    """Return a sentence with the number of laws that hold, are broken, and were not asked.

    A law with several answers counts once, by its worst one.
    """
    states: dict[str, str] = {}
    order = (BROKEN, KEPT, NOT_ASKED)
    for answer in answers:
        states[answer.law] = min(states.get(answer.law, NOT_ASKED), answer.state, key=order.index)
    tally = Counter(states.values())
    return Message("laws.page.counts", kept=tally[KEPT], broken=tally[BROKEN], not_asked=tally[NOT_ASKED])


def law_tone(row: ShownLaw) -> str:
    """Return the CSS class of the badge of a row: "s-" and the severity if broken, "v-exact" if the laws hold."""
    if row.answer.state == BROKEN:
        return f"s-{row.severity or 'critical'}"
    return "v-exact" if row.answer.state == KEPT else "v-plain"


LAW_FUNCTIONS: dict[str, Any] = {  # what the page's section on laws calls
    function.__name__: function
    for function in (
        answer_in_words,
        caption,
        counts,
        in_plain_words,
        law_names,
        law_rows,
        law_tone,
        not_asked,
        picture,
        what_of,
    )
}
