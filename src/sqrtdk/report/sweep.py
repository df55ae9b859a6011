"""The summary of a sweep as a table, from the document of `sqrtdk.lab.sweep`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from sqrtdk.report.console import drawn
from sqrtdk.report.plain import plain

_MOST_LINES = 60


def to_text(document: dict[str, Any], *, width: int = 100, color: bool = False) -> str:
    """Draw the document."""

    def draw(console: Console) -> None:
        grid = document["grid"]
        seeds = len(grid["seeds"])
        console.print(
            f"{document['cells']:,} cells of {grid['rows']:,} rows: {document['computed']:,} computed, "
            f"{document['reused']:,} reused",
            style="bold",
        )
        for name in document["damaged"]:
            console.print(f"damaged, its cells computed again: {plain(name)}", style="yellow")
        over = "one seed" if seeds == 1 else f"{seeds} seeds"
        console.print(f"mean over {over}; entropy in nats; +- one standard error; theory: Gaussian", style="dim")
        console.print()
        console.print(_table(document["combinations"][:_MOST_LINES]))
        left = len(document["combinations"]) - _MOST_LINES
        if left > 0:
            console.print(f"... and {left:,} more", style="dim")
        console.print()
        console.print(f"results: {plain(document['results'])}", style="dim", soft_wrap=True)

    return drawn(draw, width, color)


def _table(combinations: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("d_k", "keys", "scale", "components", "std", "theory", "entropy", "+-", "theory"):
        is_text = name in ("scale", "components")
        table.add_column(name, justify="left" if is_text else "right", no_wrap=not is_text, overflow="fold")
    for one in combinations:
        table.add_row(
            str(one["d_k"]),
            str(one["keys"]),
            one["scale"],
            one["distribution"],
            *(f"{one[name]:.4g}" for name in ("logit_std", "logit_std_expected", "entropy_nats")),
            f"{one['entropy_nats_se']:.1g}",
            f"{one['entropy_nats_expected']:.4g}",
        )
    return table
