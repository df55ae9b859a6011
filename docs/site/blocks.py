"""Blocks of code without the blank line that ends an example: doctest wants it on the page, and no reader does."""

from __future__ import annotations

from docutils import nodes
from sphinx.application import Sphinx


def _trim(app: Sphinx, doctree: nodes.document) -> None:
    for block in list(doctree.findall(nodes.literal_block)):
        text = block.astext().rstrip()
        block.rawsource = text
        block.clear()
        block += nodes.Text(text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect it."""
    app.connect("doctree-read", _trim)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
