"""Draws the heat map of every kind of call at every length, in English and Chinese, from the record cliffs.json.

    python scripts/cliffs_figure.py            # writes docs/{en,zh}/figures/cliffs.svg
    python scripts/cliffs_figure.py --check    # exit code 1 where a figure shows other numbers or words

As in lesson_figures.py a figure holds a hash of what it shows, and its text stays text.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from lesson_figures import SETTINGS
from made import ROOT, settle

RECORD = ROOT / "benchmarks" / "results" / "cliffs.json"
SIZE_INCHES = (12.5, 6.2)
FARTHEST = 8.0  # ratio at which the colours end, and its inverse
DARK = 3.2  # from here on, either way, the cell is dark and its number light
PASSES = {
    "forward": ("forward", "前向"),
    "statistics": ("with all statistics", "带全部统计量"),
    "both passes": ("forward and backward", "前向和反向"),
}
KINDS = {
    "plain": "普通",
    "causal": "因果",
    "window": "窗口",
    "documents": "文档",
    "padding mask": "填充掩码",
    "float mask": "浮点掩码",
    "ALiBi": "ALiBi",
    "T5 bias": "T5 偏置",
    "relative table": "相对位置表",
    "softcap": "softcap",
    "sinks": "sink",
    "cosine": "余弦",
    "distance": "距离",
    "learned scale": "学习的缩放",
    "log n scale": "log n 缩放",
    "score_mod": "score_mod",
    "score function": "评分函数",
}
TIMES = ("time over torch's, below 1 sqrtdk is faster", "与 torch 的时间之比，低于 1 表示 sqrtdk 更快")
LENGTH = ("rows and keys", "行数与键数")

Cell = Mapping[str, Any]


def figure(cells: Sequence[Cell], language: str) -> dict[str, Any]:
    """What the picture shows: words, and for each pass the ratios by kind, and by dtype and length."""
    chinese = language == "zh"
    columns = sorted({(cell["dtype"], cell["length"]) for cell in cells}, key=lambda c: (_order(c[0]), c[1]))
    ratios = {(c["pass"], c["kind"], c["dtype"], c["length"]): round(c["ratio"]["median"], 2) for c in cells}
    return {
        "title": TIMES[chinese],
        "length": LENGTH[chinese],
        "kinds": [chosen if chinese else kind for kind, chosen in KINDS.items()],
        "columns": columns,
        "panels": {
            both[chinese]: [[ratios.get((name, kind, *column)) for column in columns] for kind in KINDS]
            for name, both in PASSES.items()
        },
    }


def _order(dtype: str) -> int:
    return ("float32", "bfloat16", "float16").index(dtype)


def digest(shown: Mapping[str, Any]) -> str:
    """Hash of the numbers and words of a figure, as it stands in the file."""
    return f"sqrtdk-{hashlib.sha256(json.dumps(shown).encode()).hexdigest()[:32]}"


def draw(shown: Mapping[str, Any]) -> bytes:
    """The heat map as an SVG document on white."""
    for name in ("font_manager", "mathtext"):
        logging.getLogger(f"matplotlib.{name}").setLevel(logging.ERROR)
    buffer = io.BytesIO()
    with style.context(["default", SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        canvas = Figure(figsize=SIZE_INCHES, layout="constrained")
        FigureCanvasAgg(canvas)
        panels = canvas.subplots(1, len(shown["panels"]), sharey=True)
        for axes, (title, rows) in zip(panels, shown["panels"].items(), strict=True):
            drawn = _panel(axes, title, rows, shown)
        bar = canvas.colorbar(
            drawn, ax=panels, location="bottom", shrink=0.4, aspect=40, ticks=[1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8]
        )
        bar.ax.set_xticklabels(["1/8", "1/4", "1/2", "1", "2", "4", "8"])
        bar.minorticks_off()
        bar.set_label(shown["title"])
        canvas.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Identifier": digest(shown)})
    return b"\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + b"\n"


def _panel(axes: Any, title: str, rows: Sequence[Sequence[float | None]], shown: Mapping[str, Any]) -> Any:
    """One pass."""
    values = np.array([[np.nan if value is None else value for value in row] for row in rows])
    drawn = axes.imshow(values, cmap="RdBu_r", norm=LogNorm(1 / FARTHEST, FARTHEST, clip=True), aspect="auto")
    for (row, column), value in np.ndenumerate(values):
        if np.isfinite(value):
            text = f"{value:.2f}" if value < 9.95 else f"{value:.0f}"
            ink = "#ffffff" if max(value, 1 / value) > DARK else "#101010"
            axes.text(column, row, text, ha="center", va="center", fontsize=6.2, color=ink)
    columns = shown["columns"]
    lengths = sorted({length for _, length in columns})
    axes.grid(visible=False)
    axes.set_yticks(range(len(rows)), shown["kinds"], fontsize=8.5)
    axes.set_xticks(range(len(columns)), [str(length) for _, length in columns], fontsize=6.5, rotation=60)
    axes.set_xlabel(shown["length"], fontsize=8.5)
    for first in range(0, len(columns), len(lengths)):
        axes.axvline(first - 0.5, color="#ffffff", linewidth=2.5)
        middle = first + (len(lengths) - 1) / 2
        axes.text(middle, -0.65, columns[first][0], ha="center", va="bottom", fontsize=7.5)
    axes.set_title(title, fontsize=10.5, pad=18)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    return drawn


def figures() -> dict[Path, dict[str, Any]]:
    """What each file shows."""
    cells = json.loads(RECORD.read_text(encoding="utf-8"))["cliffs"]
    return {ROOT / "docs" / language / "figures" / "cliffs.svg": figure(cells, language) for language in ("en", "zh")}


def is_current(path: Path, shown: Mapping[str, Any]) -> bool:
    """Whether a file is there and shows this."""
    return path.exists() and digest(shown) in path.read_text(encoding="utf-8")


def main() -> None:
    """The command."""
    wanted = figures()
    stale = [path for path, shown in wanted.items() if not is_current(path, shown)]
    settle(__doc__, stale, lambda path: path.write_bytes(draw(wanted[path])))


if __name__ == "__main__":
    main()
