"""Prints the sentences of a report in one language: a speaker with a console."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from sqrtdk._language import Language
from sqrtdk.messages import Message
from sqrtdk.report.console import PROSE_WIDTH, Cell, TableColumn, console_text, paragraph, print_table
from sqrtdk.report.plain import plain
from sqrtdk.report.speaker import Speaker


@dataclass(frozen=True, slots=True)
class Printer(Speaker):
    """Prints sentences in one language.

    Every `str` passes through `plain`, which removes control characters, as it may hold a name from an untrusted model.
    """

    console: Console

    def line(self, sentence: Text | str, style: str = "") -> Text:
        """Return a sentence as a `rich` text, in the printer's language and without control characters.

        Args:
            sentence: The sentence; a `rich` text is returned unchanged.
            style: Style of rich, such as "bold".
        """
        # who made a text of rich has coloured it, and made its parts safe one by one
        return sentence if isinstance(sentence, Text) else Text(plain(self.said(sentence)), style)

    def paragraph(self, sentence: Text | str, indent: int = 0, style: str = "", *, most: int = PROSE_WIDTH) -> None:
        """Print a paragraph that wraps.

        Args:
            sentence: The sentence, or a `rich` text.
            indent: Columns of blanks before the first line; further lines have two more.
            style: Style of rich, such as "dim".
            most: Largest width in columns.
        """
        paragraph(self.console, self.line(sentence, style), indent, most=most)

    def table(self, columns: Sequence[TableColumn], rows: Sequence[Sequence[Cell]], **layout: int) -> None:
        """Print a table.

        Args:
            columns: The columns; titles may be messages, which are said in the printer's language.
            rows: One cell for each column, likewise.
            layout: Options `lead` and `indent` of `print_table`.
        """
        titled = [replace(column, title=self.said(column.title)) for column in columns]
        cells = [[self.line(cell) for cell in row] for row in rows]
        print_table(self.console, titled, cells, language=self.language, **layout)

    def print(self, sentence: str, style: str = "") -> None:
        """Print a sentence that is known to fit on one line."""
        self.console.print(self.line(sentence, style))

    def more(self, count: int, id: str = "terminal.more", indent: int = 2) -> None:
        """Print how many entries were left out; print nothing if `count` is 0 or less.

        Args:
            count: Number of entries that were left out.
            id: Id of the sentence in the catalogue; it has the part `count`.
            indent: Columns of blanks before the line.
        """
        if count > 0:
            self.paragraph(Message(id, count=count), indent)

    def blank(self) -> None:
        """Print an empty line."""
        self.console.print()


def printed(draw: Callable[[Printer], None], width: int, color: bool, language: Language) -> str:
    """Return what `draw` prints in one language, as text.

    Args:
        draw: Prints on the printer that it is given.
        width: Columns at which lines wrap.
        color: Whether to add ANSI colours.
        language: "en" or "zh".
    """
    return console_text(lambda console: draw(Printer(language, console)), width, color)
