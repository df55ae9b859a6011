"""Draws paragraphs and tables with rich into a string, without markup and trailing blanks.

A table that is too wide puts the first columns of each row on a line above the others. If the others still do not fit,
each row becomes a name and a paragraph. Nothing is cut, and no line exceeds the width.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from sqrtdk._language import Language
from sqrtdk.messages import word

TONE_STYLES = {"good": "bold green", "bad": "bold red", "doubtful": "bold yellow", "": "bold"}
FINDING_STYLES = {"note": "cyan", "warn": "yellow", "fail": "red", "critical": "bold white on red"}  # by severity
PROSE_WIDTH = 110  # columns; on a wider line the eye loses the beginning of the next one
_LEAST_NAME = 8  # a name is folded down to this width
_LEAST_PROSE = 24  # a column of text narrower than this reads badly: the table is broken up instead
_GAP = 2  # blanks between columns; with one, two numbers read as one
# ranges of East Asian characters that take two cells
_WIDE_CHARACTERS = (
    "\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe4f\uff00-\uff60\uffe0-\uffe6"
)
# Chinese punctuation that must not end a line, and that must not begin one
_OPENING, _CLOSING = "（《「『【〔“‘", "，。：；？！、）》」』】〕”’…"
# Lines break between these units: a run of narrow characters ("scale"), or one wide character (Chinese), each with
# the punctuation that must stay beside it.
_UNIT = re.compile(
    rf"[{_OPENING}]*(?:[^\s{_WIDE_CHARACTERS}{_OPENING}{_CLOSING}]+|[{_WIDE_CHARACTERS}](?<![{_CLOSING}]))?[{_CLOSING}]*\s*|\S\s*"
)


def console_text(draw: Callable[[Console], None], width: int, color: bool) -> str:
    """Return what a function prints on a console of rich.

    Args:
        draw: Prints on the console that it is given.
        width: Columns of the console; at least 40 are used.
        color: Whether to write ANSI colours; without them the text is plain.
    """
    console = Console(
        file=io.StringIO(),
        width=max(width, 40),
        force_terminal=color,  # the text is written later, so rich can't ask the terminal itself
        no_color=not color,
        color_system="standard" if color else None,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )
    with console.capture() as capture:
        draw(console)
    return "\n".join(line.rstrip() for line in capture.get().split("\n"))  # rich pads tables to their width


def line(text: str, width: int) -> str:
    """Return a text as one paragraph that wraps at `width` columns, without colours; it ends with a newline."""
    return console_text(lambda console: paragraph(console, text, most=console.width), width, False)


def wrapped(text: Text, width: int) -> list[Text]:
    """Break a text into lines of at most `width` cells, at blanks and between Chinese characters.

    A line never begins with closing Chinese punctuation and never ends with opening punctuation. A word wider than a
    line is broken anywhere. Only blanks at the ends of lines are dropped.

    Example:
        >>> [line.plain for line in wrapped(Text("scale 1, 8 times"), 8)]
        ['scale 1,', '8 times']
        >>> [line.plain for line in wrapped(Text("缩放因子太大，没有除以"), 12)]
        ['缩放因子太', '大，没有除以']
    """
    lines: list[Text] = []
    for paragraph_of in text.split("\n", allow_blank=True):
        start = end = 0
        for begin, stop in _pieces(paragraph_of.plain, max(width, 2)):
            if end > start and cell_len(paragraph_of.plain[start:stop].rstrip()) > width:
                lines.append(paragraph_of[start:end])
                start = begin
            end = stop
        lines.append(paragraph_of[start:end])
    for line in lines:
        line.rstrip()
    return lines


def _pieces(text: str, width: int) -> list[tuple[int, int]]:
    """Return (start, end) of each piece between which a line may break; a piece wider than `width` is split."""
    pieces = []
    for unit in _UNIT.finditer(text):
        begin, stop = unit.span()
        cells = 0
        if cell_len(unit.group().rstrip()) > width:
            for at in range(begin, stop):
                size = cell_len(text[at])  # 1, or 2 for a wide character
                if cells + size > width:
                    cut = at
                    # move back so that the next line does not begin with closing punctuation
                    while text[cut] in _CLOSING and cut > begin + 1:
                        cut -= 1
                    if cell_len(text[cut : at + 1]) > width:  # the punctuation alone is longer than a line
                        cut = at
                    pieces.append((begin, cut))
                    begin, cells = cut, cell_len(text[cut:at])
                cells += size
        if stop > begin:
            pieces.append((begin, stop))
    return pieces


def paragraph(console: Console, text: Text | str, indent: int = 0, *, most: int = PROSE_WIDTH) -> None:
    """Print a paragraph of at most `most` columns, whose wrapped lines are indented by two more columns.

    Args:
        console: Where to print.
        text: The text; newlines in it are kept.
        indent: Columns of blanks before the first line.
        most: Largest width in columns, on a wide console; long lines are hard to read.
    """
    text = Text(text) if isinstance(text, str) else text
    width = min(console.width, most) - indent
    if max(map(cell_len, text.plain.split("\n"))) > width:
        width -= 2  # leaves room for the indent of the wrapped lines
    for number_of, words in enumerate(wrapped(text, width)):
        console.print(Text(" " * (indent + (2 if number_of else 0))) + words)


@dataclass(frozen=True, slots=True)
class Prose:
    """A table cell whose text wraps by the rules of `wrapped` (Chinese punctuation, paths), not by those of rich."""

    text: Text

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the wrapped text."""
        yield Text("\n").join(wrapped(self.text, options.max_width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        """Return the least and the largest width of the cell."""
        widest = max(cell_len(line) for line in self.text.plain.split("\n"))
        return Measurement(min(widest, _LEAST_PROSE), widest).with_maximum(options.max_width)


@dataclass(frozen=True, slots=True)
class TableColumn:
    """A column of a table.

    Attributes:
        title: above the column.
        right: whether to align to the right, as numbers are.
        prose: whether the text may wrap between words.
        fold: whether a long name may break anywhere, so that a row stays a row.
    """

    title: str
    right: bool = False
    prose: bool = False
    fold: bool = False


Cell = str | Text


def print_table(
    console: Console,
    columns: Sequence[TableColumn],
    rows: Sequence[Sequence[Cell]],
    *,
    lead: int = 1,
    indent: int = 0,
    language: Language = "en",
) -> None:
    """Print a table; the module's docstring says how one that is too wide is broken up.

    Args:
        console: receives the table.
        columns: the line of titles is left out if no column has a title.
        rows: one cell for each column. Untrusted text must already have passed `plain`.
        lead: the number of columns that identify a row. They get a line of their own if the table is too wide.
        indent: blanks before each line.
        language: sets the punctuation between cells if a row becomes a paragraph.
    """
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths = [_widest(column, [row[at] for row in cells]) for at, column in enumerate(columns)]
    room = console.width - indent
    # prose counts with its least width: it wraps before the table is broken up
    if _needed(columns, widths) <= room:
        shared = _shared(columns, widths, room)
        console.print(Padding(_table(columns, shared, cells, titles=True), (0, 0, 0, indent)))
        return
    rest, rest_widths = columns[lead:], widths[lead:]
    # the columns below the lead are indented if there is room for that
    step = 2 if _needed(rest, rest_widths) + 2 <= room else 0
    fits = _needed(rest, rest_widths) <= room - step
    shared = _shared(rest, rest_widths, room - step)
    if fits and any(column.title for column in rest):
        console.print(Padding(_table(rest, shared, [], titles=True), (0, 0, 0, indent + step)))
    for row in cells:
        _lead(console, row[:lead], indent)
        if fits:
            console.print(Padding(_table(rest, shared, [row[lead:]], titles=False), (0, 0, 0, indent + step)))
        else:
            paragraph(console, _pairs(rest, row[lead:], language), indent + 2)


def _widest(column: TableColumn, cells: Sequence[Text]) -> int:
    return max(cell_len(line) for cell in (Text(column.title), *cells) for line in cell.plain.split("\n"))


def _needed(columns: Sequence[TableColumn], widths: Sequence[int]) -> int:
    """Return the least width of a table, in terminal cells."""
    least = [
        min(width, _LEAST_PROSE if column.prose else _LEAST_NAME) if column.prose or column.fold else width
        for column, width in zip(columns, widths, strict=True)
    ]
    return sum(least) + _GAP * (len(columns) - 1)


def _shared(columns: Sequence[TableColumn], widths: Sequence[int], room: int) -> list[int | None]:
    """Return the width of each column, the same for all rows: prose gets what the other columns leave.

    Several columns of prose share the room; rich then decides for each row, and None stands for that.
    """
    prose = [width for column, width in zip(columns, widths, strict=True) if column.prose]
    left = room - sum(widths) + sum(prose) - _GAP * (len(columns) - 1)
    fixed = min(prose[0], max(left, 1)) if len(prose) == 1 else None
    return [
        fixed if column.prose else None if column.fold else width for column, width in zip(columns, widths, strict=True)
    ]


def _table(
    columns: Sequence[TableColumn], widths: Sequence[int | None], rows: Sequence[Sequence[Text]], *, titles: bool
) -> Table:
    """Return a table of rich, in which cells of prose wrap by our own rules."""
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="dim")
    table.show_header = titles and any(column.title for column in columns)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            no_wrap=not (column.prose or column.fold),
            overflow="fold",
            min_width=width,
            max_width=width if column.prose else None,
        )
    for row in rows:
        table.add_row(*(Prose(cell) if column.prose else cell for column, cell in zip(columns, row, strict=True)))
    return table


def _lead(console: Console, cells: Sequence[Text], indent: int) -> None:
    """Print the cells that identify a row: on one line if they fit, else one a line."""
    line = Text("   ").join(cell for cell in cells if cell.plain)
    if line.cell_len <= console.width - indent:
        console.print(Text(" " * indent) + line)
        return
    for at, cell in enumerate(cells):
        paragraph(console, cell, indent + (2 if at else 0))


def _pairs(columns: Sequence[TableColumn], cells: Sequence[Text], language: Language) -> Text:
    """Return the titles and cells of a row as one text. A no-break space joins a title to its cell."""
    titled = [
        Text.assemble((f"{column.title} ".lstrip(), "dim"), cell)
        for column, cell in zip(columns, cells, strict=True)
        if cell.plain
    ]
    return Text(word("words.mark.semicolon", language)).join(titled)
