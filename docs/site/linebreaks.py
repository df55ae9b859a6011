"""Where a line may break.

Line breaks of a Chinese source: a browser shows each as a space, which Chinese has neither between characters nor
beside full-width punctuation. Nor is there one behind a bold sentence, where Markdown asks for it.

A browser may break a line beside a formula even where a full stop follows. So the marks around a formula are kept with
it, in both languages.

Code that holds a word for which a phone has no room is marked, in both languages: the style sheet keeps the words of
all other code whole.
"""

from __future__ import annotations

import re

from docutils import nodes
from sphinx.application import Sphinx

MARKS = "\u2018\u2019\u201c\u201d\u2026\u3001-\u3011\uff01-\uff65"
WIDEST = 40  # characters of code that a line of a phone holds
HAN = "\u3400-\u9fff"
ENDS = re.compile(rf"[{MARKS}]\Z"), re.compile(rf"[{MARKS}{HAN}]\Z")
BEGINS = re.compile(rf"[{MARKS}]"), re.compile(rf"[{MARKS}{HAN}]")

OPENING, CLOSING = re.compile(r"[(（“]+\Z"), re.compile(r"[,.:;?!)，。：；？！、）”]+")


def spaceless(before: str, after: str) -> bool:
    """Whether nothing stands between these pieces of text where a line ends.

    Example:
        >>> spaceless("缩放，", "softmax"), spaceless("缩放", "因子"), spaceless("缩放", "softmax")
        (True, True, False)
    """
    marks, any_full = zip(ENDS, BEGINS, strict=True)
    beside_mark = marks[0].search(before) or marks[1].match(after)
    return bool(beside_mark or (any_full[0].search(before) and any_full[1].match(after)))


def join_lines(doctree: nodes.Element) -> None:
    """Take the line breaks at which nothing stands out of the text; code keeps its own."""
    for block in list(doctree.findall(nodes.TextElement)):
        if isinstance(block, (nodes.FixedTextElement, nodes.literal)):
            continue
        pieces = [child.astext() for child in block.children]
        for at, child in enumerate(block.children):
            if isinstance(child, nodes.Text) and ("\n" in child or child.startswith(" ")):
                after = pieces[at + 1] if at + 1 < len(pieces) else ""
                joined, *lines = pieces[at].split("\n")
                if at and ENDS[0].search(pieces[at - 1]):
                    joined = joined.lstrip()
                for line in lines:
                    before = joined or (pieces[at - 1] if at else "")
                    joined += line if spaceless(before, line or after) else f"\n{line}"
                block[at] = nodes.Text(joined)


def keep_marks(doctree: nodes.Element) -> None:
    """Put each formula and the marks that touch it into one piece of the class `whole`."""
    for formula in list(doctree.findall(nodes.math)):
        around = formula.parent
        at = around.index(formula)
        before, after = (around[place] if 0 <= place < len(around) else None for place in (at - 1, at + 1))
        opening = OPENING.search(before) if isinstance(before, nodes.Text) else None
        closing = CLOSING.match(after) if isinstance(after, nodes.Text) else None
        if opening or closing:
            pieces = [nodes.Text(opening[0] if opening else ""), formula, nodes.Text(closing[0] if closing else "")]
            around[at] = nodes.inline("", "", *pieces, classes=["whole"])
        if closing:
            around[at + 1] = nodes.Text(after[closing.end() :])
        if opening:
            around[at - 1] = nodes.Text(before[: opening.start()])


def mark_long(doctree: nodes.Element) -> None:
    """Give code with a word of over `WIDEST` characters the class `long`."""
    for code in doctree.findall(nodes.literal):
        if max(map(len, code.astext().split()), default=0) > WIDEST:
            code["classes"].append("long")


def _joined(app: Sphinx, doctree: nodes.document) -> None:
    mark_long(doctree)
    if app.config.language == "zh_CN":
        join_lines(doctree)
    keep_marks(doctree)


def setup(app: Sphinx) -> dict[str, bool]:
    """Look at the line breaks of each page."""
    app.connect("doctree-read", _joined)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
