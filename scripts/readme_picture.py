"""Draw the picture of the README, in English and Chinese, from a committed record; `--record` measures that anew.

The embedded model with its scale and without: the weights of one head on a line of code, and of each head how large the
largest weight of a row is on average, as `sqrtdk check` measures it on the model's own text. The letters are drawn as
paths, so that no reader needs the fonts; drawing the Chinese one needs Noto Sans CJK (Debian: fonts-noto-cjk).

    python scripts/readme_picture.py [--record]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

import sqrtdk
from sqrtdk._environment import environment
from sqrtdk.models.demo import load_demo

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "benchmarks" / "results" / "readme_picture.json"
MODELS = ("demo", "demo:unscaled")
LINE = "def attention(query, key, value):"
LAYER, HEAD = 1, 1
COLORS = {"demo": "#1f6fb2", "demo:unscaled": "#c2410c"}
INK, PALE = "#1f2328", "#59636e"
FONTS = ["DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP"]
WORDS = {
    "en": {
        "demo": r"softmax(q·k / $\sqrt{d_k}$)",
        "demo:unscaled": "softmax(q·k): the scale is missing",
        "heat": "weights of one head: each character's row, over the characters before it",
        "peak": "largest weight of a row, mean",
        "rows": "layer {layer}, head {head}",
        "legend": {"demo": "with the scale", "demo:unscaled": "without"},
    },
    "zh": {
        "demo": r"softmax(q·k / $\sqrt{d_k}$)",
        "demo:unscaled": "softmax(q·k)：漏掉了缩放",
        "heat": "一个头的权重：每个字符一行，落在它之前的各个字符上",
        "peak": "每行最大权重的平均值",
        "rows": "第 {layer} 层，头 {head}",
        "legend": {"demo": "有缩放", "demo:unscaled": "没有缩放"},
    },
}


def weights(model: str) -> list[list[float]]:
    """The weights of one head on the line, row by row, computed from the q and k that the trace kept."""
    demo = load_demo(model)
    with torch.no_grad(), sqrtdk.trace(demo, keep=True) as run:
        demo(torch.tensor([list(LINE.encode())]))
    kept, call = run.tensors[LAYER], run.calls[LAYER]
    query, key = (side.values[0, HEAD].double() for side in (kept.query, kept.key))
    logits = query @ key.mT * call.scale.effective
    future = torch.ones_like(logits, dtype=torch.bool).triu(1)
    probabilities = logits.masked_fill(future, -torch.inf).softmax(-1)
    return [[round(value, 3) for value in row] for row in probabilities.tolist()]


def measure() -> dict[str, Any]:
    """Run both models."""
    here = environment()
    reports = {model: sqrtdk.check(model) for model in MODELS}
    return {
        "command": "python scripts/readme_picture.py --record",
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": {name: here[name] for name in ("versions", "cpu", "cpus", "threads")},
        "line": LINE,
        "layer": LAYER,
        "head": HEAD,
        "peak": {
            model: [[round(value, 4) for value in judged.call.stats.peak] for judged in report.calls]
            for model, report in reports.items()
        },
        "weights": {model: weights(model) for model in MODELS},
    }


def heat_map(axes: Axes, record: Mapping[str, Any], model: str, words: Mapping[str, Any]) -> None:
    """The weights of one head as an image, a character of the line a row and a column."""
    rows = record["weights"][model]
    shown = [[value if key <= row else float("nan") for key, value in enumerate(line)] for row, line in enumerate(rows)]
    ramp = matplotlib.colors.LinearSegmentedColormap.from_list(model, ["#f3f4f6", COLORS[model]])
    axes.imshow(shown, cmap=ramp, vmin=0, vmax=1, interpolation="nearest")
    letters = list(record["line"])
    axes.set_xticks(range(len(letters)), letters, fontsize=5.5, family="DejaVu Sans Mono")
    axes.set_yticks(range(len(letters)), letters, fontsize=5.5, family="DejaVu Sans Mono")
    axes.tick_params(length=0, pad=1.5, colors=PALE)
    axes.spines[:].set_visible(False)
    axes.set_title(words[model], fontsize=11, color=COLORS[model], pad=8)


def peaks(axes: Axes, record: Mapping[str, Any], words: Mapping[str, Any]) -> None:
    """Of each head the mean largest weight, in both models."""
    flat = {model: [value for layer in record["peak"][model] for value in layer] for model in MODELS}
    heads = len(record["peak"]["demo"][0])
    places = range(len(flat["demo"]))
    axes.hlines(places, flat["demo"], flat["demo:unscaled"], color="#d0d7de", linewidth=3, zorder=1)
    for model, values in flat.items():
        axes.scatter(values, places, s=62, color=COLORS[model], label=words["legend"][model], zorder=2)
    rows = [words["rows"].format(layer=place // heads, head=place % heads) for place in places]
    axes.set_yticks(places, rows, fontsize=8.5)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, 1.03)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"], fontsize=8.5)
    axes.tick_params(length=0, colors=INK)
    axes.grid(axis="x", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[:].set_visible(False)
    axes.set_title(words["peak"], fontsize=11, color=INK, pad=8)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), ncols=2, fontsize=9, frameon=False, handletextpad=0.2)


def draw(record: Mapping[str, Any], language: str) -> Figure:
    """The picture, on a light card of its own, so that it reads on light and on dark pages."""
    words = WORDS[language]
    figure = Figure(figsize=(11, 4.5), facecolor="none")
    card = FancyBboxPatch(
        (0.004, 0.01),
        0.992,
        0.98,
        boxstyle="round,pad=0,rounding_size=0.02",
        transform=figure.transFigure,
        facecolor="white",
        edgecolor="#d0d7de",
        mutation_aspect=11 / 4.5,
        zorder=-1,
    )
    figure.add_artist(card)
    left, right, third = (
        figure.add_axes(box) for box in ([0.025, 0.12, 0.3, 0.76], [0.345, 0.12, 0.3, 0.76], [0.77, 0.18, 0.205, 0.7])
    )
    heat_map(left, record, "demo", words)
    heat_map(right, record, "demo:unscaled", words)
    figure.text(0.335, 0.035, words["heat"], ha="center", fontsize=9.5, color=INK)
    peaks(third, record, words)
    return figure


def file_of(language: str) -> Path:
    """Where the picture of a language lies."""
    return ROOT / "docs" / language / "figures" / "scale.svg"


def origin() -> str:
    """What a picture says of the record that it was drawn from."""
    return f"Drawn from {RECORD.name}, SHA-256 {hashlib.sha256(RECORD.read_bytes()).hexdigest()}"


def main() -> int:
    """Draw, and measure before if that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the models again, and write the record")
    if parser.parse_args().record:
        RECORD.write_text(json.dumps(measure(), ensure_ascii=False) + "\n", encoding="utf-8")
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    settings = {
        "svg.fonttype": "path",
        "svg.hashsalt": "sqrtdk",
        "font.family": FONTS,
        "mathtext.fontset": "dejavusans",
    }
    for language in WORDS:
        path = file_of(language)
        path.parent.mkdir(parents=True, exist_ok=True)
        with matplotlib.rc_context(settings):
            draw(record, language).savefig(
                path, format="svg", metadata={"Date": None, "Creator": None, "Description": origin()}
            )
        lines = (line.rstrip() for line in path.read_text(encoding="utf-8").splitlines())
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        print(path.relative_to(ROOT), f"{path.stat().st_size / 1024:.0f} KiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
