"""Writes the lesson as a notebook, examples/lesson/why-sqrt-dk.{en,zh}.ipynb, from docs/{en,zh}/why-sqrt-dk.md.

    python scripts/lesson_notebook.py            # writes the notebooks
    python scripts/lesson_notebook.py --check    # exit code 1 where a notebook is not that of its page

Each block of Python with prompts becomes a cell of code, whose output is the one that the page shows; links and
pictures lead to the same files as on the page.
"""

from __future__ import annotations

import doctest
import json
import os
import re
from pathlib import Path
from typing import Any

from made import ROOT, settle_texts

NOTEBOOKS = ROOT / "examples" / "lesson"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
LANGUAGES = ("en", "zh")


def notebook(language: str) -> str:
    """The notebook of one language, as the text of its file."""
    page = ROOT / "docs" / language / "why-sqrt-dk.md"
    text = page.read_text(encoding="utf-8")
    for heading in re.findall(r"^## (.*)$", text, re.MULTILINE):
        text = text.replace(f"](#{slug(heading)})", f"](#{heading.replace(' ', '-')})")  # as Jupyter names it
    cells: list[dict[str, Any]] = []
    # Text and blocks of code take turns.
    for turn, piece in enumerate(BLOCK.split(text)):
        made = code(piece) if turn % 2 else markdown(relinked(piece, page.parent))
        cells += [{**cell, "id": f"cell-{len(cells) + place}"} for place, cell in enumerate(made)]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    whole = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(whole, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def slug(heading: str) -> str:
    """The anchor of a heading on the page."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-")


def markdown(text: str) -> list[dict[str, Any]]:
    """A cell of text for each section."""
    parts = re.split(r"^(?=## )", text.strip("\n"), flags=re.MULTILINE)
    return [{"cell_type": "markdown", "metadata": {}, "source": lines(part.strip("\n"))} for part in parts if part]


def code(block: str) -> list[dict[str, Any]]:
    """The cells of one block with prompts: a new one begins after each output."""
    made, source = [], ""
    for example in doctest.DocTestParser().get_examples(block):
        source += example.source
        if example.want:
            made.append(cell(source, example.want))
            source = ""
    return [*made, *([cell(source, "")] if source else [])]


def cell(source: str, output: str) -> dict[str, Any]:
    """A cell of code with what it prints: what the page shows, which its tests run."""
    streams = [{"name": "stdout", "output_type": "stream", "text": lines(output)}] if printed(source) else []
    if output and not streams:
        data = {"text/plain": lines(output.rstrip("\n"))}
        streams = [{"data": data, "execution_count": None, "metadata": {}, "output_type": "execute_result"}]
    source = lines(source.rstrip("\n"))
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": streams, "source": source}


def printed(source: str) -> bool:
    """Whether the last statement prints, and is no expression that is shown."""
    return re.search(r"^ *print\(", source, re.MULTILINE) is not None


def lines(text: str) -> list[str]:
    """As a notebook keeps text."""
    return text.splitlines(keepends=True)


def relinked(text: str, folder: Path) -> str:
    """The text with the paths of its links and pictures taken from the notebook's own place."""

    def anew(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        return f"]({Path(os.path.relpath(folder / path, NOTEBOOKS)).as_posix()}{anchor})"

    text = re.sub(r"\[([^\]]*)\]\(page:[^)]*\)", r"\1", text)  # a page of the site alone
    return re.sub(r"\]\((?!https?:|#)([^)#]+)(#[^)]*)?\)", anew, text)


def main() -> None:
    """The command."""
    settle_texts(__doc__, {NOTEBOOKS / f"why-sqrt-dk.{language}.ipynb": notebook(language) for language in LANGUAGES})


if __name__ == "__main__":
    main()
