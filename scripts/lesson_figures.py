"""Draws the figures of the lesson, in English and Chinese, from the records in benchmarks/results/lesson.

    python scripts/lesson_figures.py            # writes docs/{en,zh}/figures/why-*.svg
    python scripts/lesson_figures.py --check    # exit code 1 where a figure shows other numbers, words or colours

A figure holds a hash of what it shows, and --check compares this: matplotlib's releases differ in the bytes. Text
stays text, so that a browser sets the Chinese in a font that it has.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from made import ROOT, settle
from sqrtdk.lab.figures import Axis, Figure, Figures, Plot, Series, curve_series, series_over
from sqrtdk.lab.record import Record, read_record
from sqrtdk.messages import Text
from sqrtdk.report import axes, plots

RECORDS = ROOT / "benchmarks" / "results" / "lesson"
FONTS = ["DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Microsoft YaHei", "sans-serif"]
SETTINGS = {**plots._MATPLOTLIB_SETTINGS, "svg.fonttype": "none", "font.family": FONTS}

BARE, SCALED = "no scale", "with the scale"
SIDES = {"unscaled": BARE, "scaled": SCALED}

# What is drawn, English to Chinese; symbols and numbers alone are the same in both.
CHINESE = {
    BARE: "不缩放",
    SCALED: "缩放",
    "divided by √dₖ": "除以 √dₖ",
    "theory: dₖ": "理论值：dₖ",
    "head dimension dₖ": "头维度 dₖ",
    "variance of the logits": "logit 的方差",
    "largest weight of 10": "10 个权重中的最大值",
    "gradient of q, no scale: root mean square": "q 的梯度，不缩放：均方根",
    "gradient of q, no scale: median row": "q 的梯度，不缩放：中位数",
    "gradient of q, with the scale: root mean square": "q 的梯度，缩放：均方根",
    "Jacobian of the softmax, no scale": "softmax 的雅可比矩阵，不缩放",
    "norm": "范数",
    "uniform weights: log n": "均匀权重：log n",
    "with the scale, every dₖ": "缩放，任意 dₖ",
    "no scale, dₖ = 16": "不缩放，dₖ = 16",
    "no scale, dₖ = 64": "不缩放，dₖ = 64",
    "no scale, dₖ = 256": "不缩放，dₖ = 256",
    "measured": "实测",
    "number of keys n": "键的个数 n",
    "entropy, nats": "熵，单位 nat",
    "scale on q, before the product": "乘在 q 上（点积之前）",
    "scale on the stored product": "乘在存储的点积上",
    "inside a fused kernel": "在融合内核中",
    "where the scale is applied": "缩放的位置",
    "share of calls with inf or NaN": "出现 inf 或 NaN 的调用所占比例",
    "the inputs grow": "放大输入",
    "the matrices W_q and W_k grow": "放大矩阵 W_q、W_k",
    "factor": "放大倍数",
    "growth of the logits": "logit 的放大倍数",
    "training step": "训练步",
    "loss, nats a symbol": "损失，nat/符号",
}

# As in README's picture, blue is with the scale and orange is without, in shades where several lines are; what is
# neither has neither colour.
BLUE, ORANGE, DARK_ORANGE, DARKEST_ORANGE = axes.SERIES_COLOURS[0], axes.SERIES_COLOURS[1], "#a04000", "#5f2600"
VIOLET, OLIVE = axes.SERIES_COLOURS[2], "#6b6b00"
COLOURS = {
    BARE: ORANGE,
    SCALED: BLUE,
    "divided by √dₖ": BLUE,
    "theory: dₖ": axes.INK,
    "gradient of q, no scale: root mean square": ORANGE,
    "gradient of q, with the scale: root mean square": BLUE,
    "gradient of q, no scale: median row": DARK_ORANGE,
    "Jacobian of the softmax, no scale": DARKEST_ORANGE,
    "with the scale, every dₖ": BLUE,
    "no scale, dₖ = 16": ORANGE,
    "no scale, dₖ = 64": DARK_ORANGE,
    "no scale, dₖ = 256": DARKEST_ORANGE,
    "measured": axes.INK,
    "the inputs grow": VIOLET,
    "the matrices W_q and W_k grow": OLIVE,
}
COLOURS |= {CHINESE[label]: colour for label, colour in COLOURS.items()}


def variance(record: Record) -> Plot:
    """The variance of q . k over the dimension, before and after the division."""
    scaled = Figures(list(record.outcome.figures)).all("variance_over_d_k")
    bare = [_times(figure, float(figure.at["d_k"])) for figure in scaled]
    dims = [float(figure.at["d_k"]) for figure in scaled]
    lines = (
        series_over(BARE, bare, "d_k"),
        series_over("divided by √dₖ", scaled, "d_k"),
        curve_series("theory: dₖ", dims, dims, style="dashed"),
    )
    return _plot("head dimension dₖ", "variance of the logits", lines, "log", "log")


def saturation(record: Record) -> Plot:
    """The largest weight over the dimension."""
    peaks = Figures(list(record.outcome.figures))
    lines = tuple(series_over(label, peaks.all("peak", side=side), "d_k") for side, label in SIDES.items())
    return _plot("head dimension dₖ", "largest weight of 10", lines, "log")


def gradients(record: Record) -> Plot:
    """The softmax Jacobian against the gradient of the query, over the dimension."""
    norms = Figures(list(record.outcome.figures))
    shown = {
        "gradient of q, no scale: root mean square": ("rms_gradient_norm", "unscaled"),
        "gradient of q, with the scale: root mean square": ("rms_gradient_norm", "scaled"),
        "gradient of q, no scale: median row": ("median_gradient_norm", "unscaled"),
        "Jacobian of the softmax, no scale": ("rms_jacobian_norm", "unscaled"),
    }
    lines = tuple(series_over(label, norms.all(name, case=case), "d_k") for label, (name, case) in shown.items())
    return _plot("head dimension dₖ", "norm", lines, "log", "log")


def entropy(record: Record) -> Plot:
    """The entropy over the number of keys: theory, what was measured at 10 keys, and uniform weights."""
    drawn = {series.label: series for series in record.plots[0].series}
    names = {
        "unscaled, $d_k$ = 16": "no scale, dₖ = 16",
        "scaled, every $d_k$": "with the scale, every dₖ",
        "unscaled, $d_k$ = 64": "no scale, dₖ = 64",
        "unscaled, $d_k$ = 256": "no scale, dₖ = 256",
        "measured": "measured",
    }
    lines = [replace(drawn[name], label=label) for name, label in names.items()]
    lengths = [float(x) for x in lines[0].x]
    uniform = curve_series("uniform weights: log n", lengths, map(math.log, lengths), style="dashed")
    return _plot("number of keys n", "entropy, nats", (uniform, *lines), "log")


def precision(record: Record) -> Plot:
    """Calls in float16 whose output is not finite, by the place of the scale."""
    places = {
        "query": "scale on q, before the product",
        "product": "scale on the stored product",
        "kernel": "inside a fused kernel",
    }
    shares = Figures(list(record.outcome.figures))
    lines = tuple(
        replace(
            series_over(label, shares.all("calls_not_finite", scale=scale), "place", style="bars"),
            x=tuple(places.values()),
        )
        for label, scale in ((BARE, "none"), (SCALED, "sqrt_dk"))
    )
    assert [f.at["place"] for f in shares.all("calls_not_finite", scale="none")] == list(places)
    return _plot("where the scale is applied", "share of calls with inf or NaN", lines)


def norms(record: Record) -> Plot:
    """How the logits behind a layer normalisation grow with the inputs and with the weights."""
    ratios = Figures(list(record.outcome.figures))
    labels = {"inputs": "the inputs grow", "weights": "the matrices W_q and W_k grow"}
    lines = tuple(series_over(label, ratios.all("std_ratio", grown=grown), "times") for grown, label in labels.items())
    return _plot("factor", "growth of the logits", lines, "log", "log")


def training(record: Record) -> Plot:
    """The loss of a small model over the steps."""
    drawn = next(plot for plot in record.plots if plot.name == "loss")
    labels = {"no scale": BARE, r"$1/\sqrt{d_k}$": SCALED}
    lines = tuple(replace(series, label=labels[series.label]) for series in drawn.series)
    return _plot("training step", "loss, nats a symbol", lines)


# File name: the claim whose record it shows, and how.
FIGURES: dict[str, tuple[str, Callable[[Record], Plot]]] = {
    "why-variance": ("var-linear", variance),
    "why-saturation": ("saturation-by-dim", saturation),
    "why-gradient": ("grad-norm", gradients),
    "why-entropy": ("entropy-table", entropy),
    "why-precision": ("fp16-overflow", precision),
    "why-norm": ("layernorm-role", norms),
    "why-training": ("train-instability", training),
}


def _plot(x: str, y: str, lines: tuple[Series, ...], x_axis: Axis = "linear", y_axis: Axis = "linear") -> Plot:
    return Plot("lesson", Text("", ""), x, y, lines, x_axis, y_axis)


def _times(figure: Figure, factor: float) -> Figure:
    return replace(figure, value=factor * figure.value, low=factor * figure.low, high=factor * figure.high)


def translated(plot: Plot, words: Mapping[str, str]) -> Plot:
    """The plot with each of its words replaced; a word that is not there is an error."""
    series = tuple(
        replace(one, label=words[one.label], x=tuple(words[str(x)] for x in one.x) if one.style == "bars" else one.x)
        for one in plot.series
    )
    return replace(plot, x_label=words[plot.x_label], y_label=words[plot.y_label], series=series)


def figures() -> dict[Path, Plot]:
    """What each file shows."""
    shown = {}
    for name, (claim, build) in FIGURES.items():
        plot = build(read_record(RECORDS / f"{claim}.json"))
        shown[ROOT / "docs" / "en" / "figures" / f"{name}.svg"] = plot
        shown[ROOT / "docs" / "zh" / "figures" / f"{name}.svg"] = translated(plot, CHINESE)
    return shown


def digest(plot: Plot) -> str:
    """Hash of the numbers, words and colours of a plot, as it stands in the file."""
    shown = repr((plot, [COLOURS.get(series.label) for series in plot.series]))
    return f"sqrtdk-{hashlib.sha256(shown.encode()).hexdigest()[:32]}"


def is_current(path: Path, plot: Plot) -> bool:
    """Whether a file is there and shows this plot: by its hash, as the bytes depend on the fonts of a machine."""
    return path.exists() and digest(plot) in path.read_text(encoding="utf-8")


def draw(plot: Plot) -> bytes:
    """The plot as an SVG document on white."""
    buffer = io.BytesIO()
    for name in ("font_manager", "mathtext"):  # of FONTS a machine has some
        logging.getLogger(f"matplotlib.{name}").setLevel(logging.ERROR)
    with style.context(["default", SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        canvas = Canvas(figsize=axes.SIZE_INCHES)
        FigureCanvasAgg(canvas)
        axes.draw(canvas, plot, COLOURS)
        metadata = {"Date": None, "Creator": None, "Identifier": digest(plot)}
        canvas.savefig(buffer, format="svg", metadata=metadata)
    return b"\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + b"\n"


def main() -> None:
    """The command."""
    plots = figures()
    stale = [path for path, plot in plots.items() if not is_current(path, plot)]
    settle(__doc__, stale, lambda path: path.write_bytes(draw(plots[path])))


if __name__ == "__main__":
    main()
