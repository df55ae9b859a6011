"""Draws the summary of a sweep as a table, from the document of `sqrtdk.lab.sweep`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from sqrtdk._language import Language
from sqrtdk.report.console import Column, drawn, paragraph, print_table
from sqrtdk.report.plain import plain
from sqrtdk.report.said import TITLES, said

_COLUMNS = ("d_k", "keys", "scale", "components", "std", "theory", "entropy", "+-", "theory")
_MOST_LINES = 60


def to_text(document: dict[str, Any], *, width: int = 100, color: bool = False, language: Language = "en") -> str:
    """Draw the document as text of at most `width` columns."""

    def draw(console: Console) -> None:
        grid = document["grid"]
        cells, computed, reused = (f"{document[name]:,}" for name in ("cells", "computed", "reused"))
        counts = f"{cells} cells of {grid['rows']:,} rows: {computed} computed, {reused} reused"
        paragraph(console, Text(said(counts, language), style="bold"))
        for name in document["damaged"]:
            damaged = said(f"damaged, its cells computed again: {plain(name)}", language)
            paragraph(console, Text(damaged, style="yellow"))
        seeds = "one seed" if len(grid["seeds"]) == 1 else f"{len(grid['seeds'])} seeds"
        mean = f"mean over {seeds}; entropy in nats; +- one standard error; theory: Gaussian"
        paragraph(console, Text(said(mean, language), style="dim"))
        console.print()
        _table(console, document["combinations"][:_MOST_LINES], language)
        left = len(document["combinations"]) - _MOST_LINES
        if left > 0:
            console.print(Text(said(f"... and {left:,} more", language), style="dim"))
        console.print()
        results = said(f"results: {plain(document['results'])}", language)
        console.print(Text(results, style="dim"), soft_wrap=True)  # unbroken, so that the path can be copied

    return drawn(draw, width, color)


def _table(console: Console, combinations: list[dict[str, Any]], language: Language) -> None:
    left = ("scale", "components")
    columns = [Column(said(name, language, TITLES), right=name not in left) for name in _COLUMNS]
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
