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
import re
import tomllib
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Canvas

from lesson_panels import draw_panels, draw_reports
from lesson_words import BARE, CHINESE, COLOURS, SCALED
from made import ROOT, settle
from sqrtdk.messages import Text
from sqrtdk.theory import critical_sigma, expected_peak
from sqrtdk_lab.figures import Axis, Figure, Figures, HeatMap, Plot, Series, curve_series, map_over, series_over
from sqrtdk_lab.record import Record, read_record
from sqrtdk_lab.report import axes, plots

MODELS = ROOT / "docs" / "large-models.toml"
RECORDS = ROOT / "benchmarks" / "results" / "lesson"
FONTS = ["DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Microsoft YaHei", "sans-serif"]
SETTINGS = {**plots._MATPLOTLIB_SETTINGS, "svg.fonttype": "none", "font.family": FONTS}

FEW_AND_MANY_KEYS = (32, 1024)
ONE_RATE = "0.003"  # learning rate that all head dimensions share
REPORTED = "reported"  # name of the plot whose points have labels
SIDES = {"unscaled": BARE, "scaled": SCALED}

# What stands beside a reported logit: by its source, what became of the model, and the size. And beside each bar.
REPORTS = {
    ("dehghani2023", "diverged", 50000): "ViT 8B, diverged",
    ("wortsman2023", "diverged", 10000): "small models, diverged",
    ("wortsman2023", "forced", 1000): "10M, forced, loss rises",
    ("wortsman2023", "forced", 10000): "10M, forced, loss is poor",
    ("ye2024-outliers", "healthy", 318): "3B, trained well",
    ("gemma2024", "bound", 50): "Gemma 2, softcap",
    ("grok1-code", "bound", 30): "Grok-1, softcap",
    ("liu2025", "healthy", 100): "Moonlight, trained well",
    ("kimi2025", "grew", 1000): "Kimi 53B, end not reported",
    ("kimi2025", "bound", 100): "Kimi K2, QK-clip",
}
BARS = {100: "QK-clip acts", 1000: "forced logits cost loss", 10000: "small models, not forced, diverged"}


def by_hand() -> tuple[Plot, ...]:
    """The weights of the example that the lesson computes by hand, without the scale and with it."""
    dot_products = ((2.0, 0.0), (2.0, 1.0))
    panels = []
    for title, scale in ((BARE, 1.0), (SCALED, 2**-0.5)):
        rows = tuple(_softmax([scale * product for product in row]) for row in dot_products)
        drawn = HeatMap("weight", (1.0, 2.0), (1.0, 2.0), rows)
        panels.append(replace(_plot("key", "query", ()), caption=Text(title, ""), map=drawn))
    return tuple(panels)


def _softmax(logits: list[float]) -> tuple[float, ...]:
    powers = [math.exp(logit) for logit in logits]
    return tuple(power / sum(powers) for power in powers)


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


def gradient_map(record: Record) -> tuple[Plot, ...]:
    """The gradient of the query without the scale over that with it, by dimension and number of keys."""
    measured, panels = Figures(list(record.outcome.figures)), []
    for title, name in (("median row", "median_gradient_ratio"), ("root mean square", "rms_gradient_ratio")):
        label = "gradient, no scale over with the scale"
        drawn = map_over(label, measured.all(name), "d_k", "keys", colours="log", centre=1.0)
        plot = _plot("head dimension dₖ", "number of keys n", (), "log", "log")
        panels.append(replace(plot, caption=Text(title, ""), map=drawn))
    return tuple(panels)


def gradients(record: Record) -> tuple[Plot, ...]:
    """The gradient of the query over the dimension, with few keys and with many."""
    measured, panels = Figures(list(record.outcome.figures)), []
    names = {"root mean square": "rms_gradient_norm", "median row": "median_gradient_norm"}
    for keys in FEW_AND_MANY_KEYS:
        lines = tuple(
            series_over(f"{side}: {label}", measured.all(name, case=case, keys=keys, upstream="unit"), "d_k")
            for case, side in SIDES.items()
            for label, name in names.items()
        )
        plot = _plot("head dimension dₖ", "norm of the gradient of q", lines, "log", "log")
        panels.append(replace(plot, caption=Text(f"{keys} keys", "")))
    return tuple(panels)


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


def best(interval: Record, exponent: Record) -> tuple[Plot, ...]:
    """The standard deviation of the logits with the largest Jacobian, and the one that training starts from best."""
    at_start, trained = (Figures(list(record.outcome.figures)) for record in (interval, exponent))
    largest = series_over("largest Jacobian", at_start.all("sigma_of_largest_jacobian"), "keys")
    lowest = [
        series_over(label, trained.all("best_sigma", rate=rate), "d_k")
        for label, rate in (("smallest loss, own rates", "own"), ("smallest loss, rate 0.003", ONE_RATE))
    ]
    left, right = largest.x, lowest[0].x
    panels = []
    for title, x_label, found, x, bare in (
        ("largest Jacobian", "number of keys n", [largest], left, [8.0] * len(left)),
        ("best training", "head dimension dₖ", lowest, right, [float(d) ** 0.5 for d in right]),
    ):
        rules = curve_series(BARE, x, bare, style="dashed"), curve_series(SCALED, x, [1.0] * len(x), style="dashed")
        plot = _plot(x_label, "σ of the logits at the start", (*rules, *found), "log", "log")
        panels.append(replace(plot, caption=Text(title, "")))
    return tuple(panels)


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
            series_over(label, shares.all("calls_not_finite", inputs="outlier", scale=scale), "place", style="bars"),
            x=tuple(places.values()),
        )
        for label, scale in ((BARE, "none"), (SCALED, "sqrt_dk"))
    )
    assert [f.at["place"] for f in shares.all("calls_not_finite", inputs="outlier", scale="none")] == list(places)
    return _plot("where the scale is applied", "share of runs with inf or NaN", lines)


def norms(record: Record) -> Plot:
    """The logits behind a layer normalisation when the inputs or the weights grow, with the scale and without."""
    measured, d_k = Figures(list(record.outcome.figures)), 64
    start = measured("unscaled_logit_std", d_k=d_k).value
    grown = {"weights": ("larger matrices", "line"), "inputs": ("larger inputs", "dashed")}
    lines = tuple(
        series_over(
            f"{side}, {label}", measured.all("std_ratio", grown=what), "times", style=style, factor=start * factor
        )
        for side, factor in ((BARE, 1.0), (SCALED, d_k**-0.5))
        for what, (label, style) in grown.items()
    )
    return _plot("factor", "standard deviation of the logits", lines, "log", "log")


def mistakes() -> Plot:
    """The largest weight that theory expects, over the scale ratio, with the mistakes that step 10 lists."""
    keys, ratios = 64, [2 ** (power / 4) for power in range(-14, 26)]
    others = [1 / 8, 12**-0.5, (64 / 12) ** 0.5, 64.0]
    lines = (
        curve_series("normal logits, theory", ratios, expected_peak(keys, ratios)),
        curve_series("with the scale: r = 1", [1], expected_peak(keys, [1.0]), style="points"),
        curve_series("no scale: r = 8", [8], expected_peak(keys, [8.0]), style="points"),
        curve_series("other mistakes", others, expected_peak(keys, others), style="points"),
        curve_series("uniform weights: 1/64", ratios, [1 / keys] * len(ratios), style="dashed"),
    )
    return _plot("scale ratio r", "largest weight of 64", lines, "log")


def training(record: Record) -> Plot:
    """The loss of a small model on new strings after training, over the dimension."""
    losses = Figures(list(record.outcome.figures))
    lines = tuple(
        series_over(label, losses.all("held_out_loss_nats", task="strings", scale=scale, start="unit"), "d_k")
        for label, scale in ((BARE, "none"), (SCALED, "sqrt_dk"))
    )
    smaller = losses.all("held_out_loss_nats", task="strings", scale="none", start="folded")
    lines += (series_over("no scale, W_q starts smaller", smaller, "d_k", style="points"),)
    return _plot("head dimension dₖ", "loss on new strings, nats a symbol", lines, "log")


def growth() -> Plot:
    """The largest logits that were reported, a series for each size and year; its label says of which models."""
    with MODELS.open("rb") as file:
        models = tomllib.load(file)
    labels: dict[tuple[int, float], list[str]] = {}
    for report in models["growth"]:
        said = f"{report['sign']} {report['value']}: {REPORTS[report['source'], report['kind'], report['value']]}"
        labels.setdefault((report["year"], report["value"]), []).append(said.strip())
    dots = [curve_series("\n".join(lines), [year], [value], style="points") for (year, value), lines in labels.items()]
    years, random = (2022.8, 2026.4), critical_sigma(1024)  # of logits with a standard deviation of 1
    start = (
        curve_series("random vectors, no scale", years, [random * 128**0.5] * 2, style="dashed"),
        curve_series("random vectors, with the scale", years, [random] * 2, style="dashed"),
    )
    bars = tuple((BARS[bar["value"]], float(bar["value"])) for bar in models["bar"])
    plot = _plot("year of the report", "largest logit", (*start, *dots), y_axis="log")
    return replace(plot, name=REPORTED, lines=bars)


# File name: the claims whose records it shows, and how.
FIGURES: dict[str, tuple[Any, ...]] = {
    "why-variance": ("var-linear", variance),
    "why-saturation": ("saturation-by-dim", saturation),
    "why-gradient-map": ("grad-norm", gradient_map),
    "why-gradient": ("grad-norm", gradients),
    "why-training": ("train-instability", training),
    "why-entropy": ("entropy-table", entropy),
    "why-best": ("optimal-interval", "best-exponent", best),
    "why-precision": ("fp16-overflow", precision),
    "why-norm": ("layernorm-role", norms),
}
COMPUTED: dict[str, Callable[[], Plot | tuple[Plot, ...]]] = {
    "why-hand": by_hand,
    "why-growth": growth,
    "why-mistakes": mistakes,
}


def _plot(x: str, y: str, lines: tuple[Series, ...], x_axis: Axis = "linear", y_axis: Axis = "linear") -> Plot:
    return Plot("lesson", Text("", ""), x, y, lines, x_axis, y_axis)


def _times(figure: Figure, factor: float) -> Figure:
    return replace(figure, value=factor * figure.value, low=factor * figure.low, high=factor * figure.high)


def translated(plot: Plot, words: Mapping[str, str]) -> Plot:
    """The plot with each of its words replaced; a word that is not there is an error."""
    series = tuple(
        replace(
            one, label=_label(one.label, words), x=tuple(words[str(x)] for x in one.x) if one.style == "bars" else one.x
        )
        for one in plot.series
    )
    return replace(
        plot,
        lines=tuple((words[label], y) for label, y in plot.lines),
        caption=Text(words[plot.caption.en], "") if plot.caption.en else plot.caption,
        x_label=words[plot.x_label],
        y_label=words[plot.y_label],
        series=series,
        map=plot.map and replace(plot.map, label=words[plot.map.label]),
    )


def _label(label: str, words: Mapping[str, str]) -> str:
    """A label in other words; a report is a line for each, with its size in front."""
    numbered = re.findall(r"^([<>≈≤ \d]+): (.*)$", label, re.MULTILINE)
    return "\n".join(f"{size}：{words[line]}" for size, line in numbered) if numbered else words[label]


def figures() -> dict[Path, tuple[Plot, ...]]:
    """The panels of each file; most have one."""
    drawn = {name: build() for name, build in COMPUTED.items()}
    for name, (*claims, build) in FIGURES.items():
        drawn[name] = build(*(read_record(RECORDS / f"{claim}.json") for claim in claims))
    shown = {}
    for name, one in drawn.items():
        panels = one if isinstance(one, tuple) else (one,)
        shown[ROOT / "docs" / "en" / "figures" / f"{name}.svg"] = panels
        shown[ROOT / "docs" / "zh" / "figures" / f"{name}.svg"] = tuple(translated(panel, CHINESE) for panel in panels)
    return shown


def digest(panels: tuple[Plot, ...]) -> str:
    """Hash of the numbers, words and colours of a figure, as it stands in the file."""
    shown = repr((panels, [COLOURS.get(series.label) for plot in panels for series in plot.series]))
    return f"sqrtdk-{hashlib.sha256(shown.encode()).hexdigest()[:32]}"


def is_current(path: Path, panels: tuple[Plot, ...]) -> bool:
    """Whether a file is there and shows these panels: by its hash, as the bytes depend on the fonts of a machine."""
    return path.exists() and digest(panels) in path.read_text(encoding="utf-8")


def draw(panels: tuple[Plot, ...]) -> bytes:
    """The panels as an SVG document on white."""
    buffer = io.BytesIO()
    for name in ("font_manager", "mathtext"):  # of FONTS a machine has some
        logging.getLogger(f"matplotlib.{name}").setLevel(logging.ERROR)
    with style.context(["default", SETTINGS]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        canvas = Canvas(figsize=axes.SIZE_INCHES)
        FigureCanvasAgg(canvas)
        if panels[0].name == REPORTED:
            draw_reports(canvas, panels[0], COLOURS)
        elif len(panels) == 1:
            axes.draw(canvas, panels[0], COLOURS)
        else:
            draw_panels(canvas, panels, COLOURS)
        metadata = {"Date": None, "Creator": None, "Identifier": digest(panels)}
        canvas.savefig(buffer, format="svg", metadata=metadata)
    return b"\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + b"\n"


def main() -> None:
    """The command."""
    plots = figures()
    stale = [path for path, plot in plots.items() if not is_current(path, plot)]
    settle(__doc__, stale, lambda path: path.write_bytes(draw(plots[path])))


if __name__ == "__main__":
    main()
