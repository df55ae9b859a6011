"""Draws the answers of the laws (kept, broken, not asked), and which positions a broken law let move."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqrtdk._sites import range_list
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from sqrtdk.messages import Message, joined, named
from sqrtdk.report.console import FINDING_STYLES, TableColumn
from sqrtdk.report.printer import Printer

MOST_SQUARES = 64  # squares of a picture; with more positions, several share a square
LAW_STATES = {KEPT: "laws.states.kept", BROKEN: "laws.states.broken", NOT_ASKED: "laws.states.not_asked"}
_LAW_STYLES = {KEPT: "green", NOT_ASKED: "dim"} | FINDING_STYLES
_SQUARE_MARKS = {True: "#", False: "."}


@dataclass(frozen=True, slots=True)
class ShownLaw:
    """One line of the table of laws: a broken law, all laws that hold, or all that were not asked for one reason.

    Attributes:
        laws: Identifiers of the laws.
        answer: The answer that the line shows, which is true of all of them.
    """

    laws: tuple[str, ...]
    answer: LawAnswer

    @property
    def severity(self) -> str | None:
        """The severity of the finding of a broken law; None if the law is not broken."""
        return self.answer.finding.severity if self.answer.finding is not None else None


def law_rows(answers: Sequence[LawAnswer]) -> tuple[ShownLaw, ...]:
    """Fold the answers into rows: broken laws first, laws that were not asked last.

    A law that answered for several inputs keeps a row for each input.

    Example:
        >>> kept = [LawAnswer("finite", "", KEPT), LawAnswer("causal", "input_ids", KEPT)]
        >>> law_rows([*kept, LawAnswer("padding", "", NOT_ASKED, "no input is a mask")])[0].laws
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
        rows.append(ShownLaw(tuple(dict.fromkeys(answer.law for answer in members)), first))
    order = (BROKEN, KEPT, NOT_ASKED)
    return tuple(sorted(rows, key=lambda row: order.index(row.answer.state)))


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


def listed_laws(row: ShownLaw) -> str:
    """Return the names of the laws of a row as one sentence, as "causal, padding"."""
    return joined([named_law(law) for law in row.laws], "comma")


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
        return Message("laws.page.first_in", about=answer.about, site=answer.site)
    return answer.site or answer.about  # a law that changes no input has a place alone


def draw_laws(printer: Printer, answers: Sequence[LawAnswer]) -> None:
    """Print the table of laws, and a picture of the moved positions for each broken law.

    Args:
        printer: Where to print, and in which language.
        answers: Answers of the laws; if there are none, nothing is printed.
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
    ]
    printer.table(columns, cells, indent=2)
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
    for function in (answer_in_words, caption, counts, law_rows, law_tone, named_law, picture, what_of)
}
