"""Draws the summary of a sweep as a table, from the document of `sqrtdk_lab.sweep`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from sqrtdk.extending import Language
from sqrtdk.messages import named, said, word
from sqrtdk.report.console import TableColumn, console_text, paragraph, print_table
from sqrtdk.report.plain import plain

_SWEEP_TITLES = ("d_k", "keys", "scale", "components", "std", "theory", "entropy", "+-", "theory")
_MOST_SWEEP_LINES = 60


def to_text(document: dict[str, Any], *, width: int = 100, color: bool = False, language: Language = "en") -> str:
    """Draw the document as text of at most `width` columns."""

    def draw(console: Console) -> None:
        grid = document["grid"]
        counts = {name: f"{document[name]:,}" for name in ("cells", "computed", "reused")}
        cells = word("terminal.sweep.cells", language, rows=f"{grid['rows']:,}", **counts)
        paragraph(console, Text(cells, style="bold"))
        for name in document["damaged"]:
            damaged = word("terminal.sweep.damaged", language, name=plain(name))
            paragraph(console, Text(damaged, style="yellow"))
        seeds = len(grid["seeds"])
        one = seeds == 1
        mean = word("terminal.sweep.one_seed", language) if one else word("terminal.sweep.seeds", language, count=seeds)
        paragraph(console, Text(mean, style="dim"))
        console.print()
        _table(console, document["combinations"][:_MOST_SWEEP_LINES], language)
        left = len(document["combinations"]) - _MOST_SWEEP_LINES
        if left > 0:
            console.print(Text(word("terminal.sweep.more", language, count=f"{left:,}"), style="dim"))
        console.print()
        results = word("terminal.sweep.results", language, path=plain(document["results"]))
        console.print(Text(results, style="dim"), soft_wrap=True)  # unbroken, so that the path can be copied

    return console_text(draw, width, color)


def _table(console: Console, combinations: list[dict[str, Any]], language: Language) -> None:
    left = ("scale", "components")
    columns = [
        TableColumn(said(named("words.column", name), language), right=name not in left) for name in _SWEEP_TITLES
    ]
    rows = [
        (
            str(one["d_k"]),
            str(one["keys"]),
            one["scale"],
            one["distribution"],
            *(f"{one[name]:.4g}" for name in ("logit_std", "logit_std_expected", "entropy_nats")),
            f"{one['entropy_nats_se']:.1g}",
            f"{one['entropy_nats_expected']:.4g}",
        )
        for one in combinations
    ]
    print_table(console, columns, rows, lead=4, language=language)
