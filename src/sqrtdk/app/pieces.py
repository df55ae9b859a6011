"""Pieces of the page; a text is escaped, and only what is marked as markup is markup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

from sqrtdk.report.plain import plain

Cell = str | Markup


def shown(text: object) -> Markup:
    """A text with every character visible and none that is markup."""
    return escape(text) if isinstance(text, Markup) else escape(plain(str(text)))


def table(caption: Cell, head: Sequence[Cell], rows: Iterable[Sequence[Cell]]) -> Markup:
    """A table whose first column names its rows; on a narrow screen a row's cells stand below its name, each labelled.

    The roles are said, as a row that is laid out otherwise would lose them.
    """
    titles = [shown(cell) for cell in head]
    top = Markup("").join(Markup('<th scope="col" role="columnheader">{}</th>').format(title) for title in titles)
    body = Markup("").join(
        Markup('<tr role="row"><th scope="row" role="rowheader">{}</th>{}</tr>').format(
            shown(row[0]),
            Markup("").join(
                Markup('<td role="cell" data-label="{}">{}</td>').format(title.striptags(), shown(cell))
                for title, cell in zip(titles[1:], row[1:], strict=True)
            ),
        )
        for row in rows
    )
    return Markup(
        '<div class="wide" tabindex="0"><table role="table"><caption>{}</caption>'
        '<thead role="rowgroup"><tr role="row">{}</tr></thead><tbody role="rowgroup">{}</tbody></table></div>'
    ).format(shown(caption), top, body)


def notice(text: Cell, tone: str = "bad") -> Markup:
    """A message that a reader of the screen hears at once."""
    return Markup('<p class="notice {}" role="alert">{}</p>').format(tone, shown(text))


def headline(word: str, tone: str, of: str) -> Markup:
    """The result, and what it is of."""
    return Markup('<h3 class="result {}"><b>{}</b> <span>{}</span></h3>').format(tone, shown(word), shown(of))


def lead(text: Cell) -> Markup:
    """A paragraph."""
    return Markup("<p>{}</p>").format(shown(text))
