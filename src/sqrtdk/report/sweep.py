"""The summary of a sweep as a table, from the document of `sqrtdk.lab.sweep`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text as Line

from sqrtdk._language import Language
from sqrtdk.lab.text import Text, say
from sqrtdk.report.console import Column, drawn, paragraph, print_table
from sqrtdk.report.plain import plain

WORDS = {
    "counts": Text(
        "{cells} cells of {rows} rows: {computed} computed, {reused} reused",
        "{cells} 个单元，各 {rows} 行：新计算 {computed} 个，沿用 {reused} 个",
    ),
    "damaged": Text("damaged, its cells computed again: {name}", "已损坏，其单元已重新计算：{name}"),
    "one seed": Text(
        "mean over one seed; entropy in nats; +- one standard error; theory: Gaussian",
        "一个种子的均值；熵的单位为 nat；+- 为一个标准误差；理论：高斯",
    ),
    "seeds": Text(
        "mean over {seeds} seeds; entropy in nats; +- one standard error; theory: Gaussian",
        "{seeds} 个种子的均值；熵的单位为 nat；+- 为一个标准误差；理论：高斯",
    ),
    "more": Text("... and {count} more", "……另有 {count} 行"),
    "results": Text("results: {path}", "结果：{path}"),
    "keys": Text("keys", "键"),
    "scale": Text("scale", "缩放"),
    "components": Text("components", "分量"),
    "std": Text("std", "标准差"),
    "theory": Text("theory", "理论"),
    "entropy": Text("entropy", "熵"),
}
_COLUMNS = ("d_k", "keys", "scale", "components", "std", "theory", "entropy", "+-", "theory")
_MOST_LINES = 60


def to_text(document: dict[str, Any], *, width: int = 100, color: bool = False, language: Language = "en") -> str:
    """Draw the document."""

    def draw(console: Console) -> None:
        grid = document["grid"]
        counts = {name: f"{document[name]:,}" for name in ("cells", "computed", "reused")}
        paragraph(console, Line(say(WORDS["counts"], language, rows=f"{grid['rows']:,}", **counts), style="bold"))
        for name in document["damaged"]:
            paragraph(console, Line(say(WORDS["damaged"], language, name=plain(name)), style="yellow"))
        seeds = len(grid["seeds"])
        mean = say(WORDS["one seed" if seeds == 1 else "seeds"], language, seeds=seeds)
        paragraph(console, Line(mean, style="dim"))
        console.print()
        _table(console, document["combinations"][:_MOST_LINES], language)
        left = len(document["combinations"]) - _MOST_LINES
        if left > 0:
            console.print(Line(say(WORDS["more"], language, count=f"{left:,}"), style="dim"))
        console.print()
        results = say(WORDS["results"], language, path=plain(document["results"]))
        console.print(Line(results, style="dim"), soft_wrap=True)  # on one line, so that the path can be copied

    return drawn(draw, width, color)


def _table(console: Console, combinations: list[dict[str, Any]], language: Language) -> None:
    titles = [say(WORDS[name], language) if name in WORDS else name for name in _COLUMNS]
    columns = [
        Column(title, right=name not in ("scale", "components")) for name, title in zip(_COLUMNS, titles, strict=True)
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
    print_table(console, columns, rows, lead=4)
