"""Pieces of the page; a text is escaped, and only what is marked as markup is markup."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from markupsafe import Markup, escape

from sqrtdk.app import fields
from sqrtdk.app.catalogue import Words
from sqrtdk.report.plain import plain
from sqrtdk.report.said import said

Cell = str | Markup


def shown(text: object) -> Markup:
    """A text of a file or of a model, with every character visible and none that is markup."""
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


def recorded(text: str, words: Words) -> Markup:
    """A sentence that was recorded in English: in the page's language, or marked as English where that is not known."""
    there = said(text, words.language)
    if words.language == "en" or there != text:
        return shown(there)
    return Markup('<span lang="en">{}</span>').format(shown(text))


def headline(word: str, tone: str, of: str) -> Markup:
    """The result, and what it is of."""
    return Markup('<h3 class="result {}"><b>{}</b> <span>{}</span></h3>').format(tone, shown(word), shown(of))


def lead(text: Cell) -> Markup:
    """A paragraph."""
    return Markup("<p>{}</p>").format(shown(text))


def command(document: Mapping[str, Any], words: Words) -> Markup:
    """The command that gave the report, where it says one."""
    written = fields.maybe_text(document.get("command"))
    if written in ("", "-"):
        return Markup("")
    return Markup("<p>{} <code>{}</code></p>").format(words("saved.command"), shown(written))


def left(rows: int, words: Words) -> Markup:
    """How many rows a table left out."""
    more = rows - fields.MOST_ROWS
    return lead(words("saved.left", count=more)) if more > 0 else Markup("")
