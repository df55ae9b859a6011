"""The explorer's figures. Plots are labelled with symbols, so that one drawing serves both languages."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, cast

from markupsafe import Markup

from sqrtdk.extending import Language
from sqrtdk.messages import Message, Text, said, word
from sqrtdk.stats import RowSummary
from sqrtdk.theory import largest_finite, spacing
from sqrtdk_lab.app import sample
from sqrtdk_lab.app.settings import CONTROLS, ExplorerSettings
from sqrtdk_lab.figures import Axis, Plot, Series, Style, curve_series
from sqrtdk_lab.report import markup
from sqrtdk_lab.report.axes import shows_nothing
from sqrtdk_lab.report.plots import to_svg

Mark = Literal["line", "dots", "dashes"]
LegendEntry = tuple[Mark, int, Message]
_NO_CAPTION = Text("", "")
HALVES = ("float16", "bfloat16")
_GREY = 8  # number of the legend's grey, after the eight colours
_PEN = threading.Lock()  # held while drawing: matplotlib's settings are global


@dataclass(frozen=True, slots=True)
class ExplorerFigure:
    """One figure.

    Attributes:
        plot: labelled with symbols; its series have no labels.
        legend: entries of the series: (mark, number of the colour, text).
        note: id of a sentence at the beginning of the caption, or "".
    """

    plot: Plot
    legend: tuple[LegendEntry, ...]
    note: str = ""


def _plot(
    name: str, x: str, y: str, series: tuple[Series, ...], axes: tuple[Axis, Axis], lines: tuple[tuple[str, float], ...]
) -> Plot:
    return Plot(name, _NO_CAPTION, x, y, series, *axes, lines)


def _entries(settings: ExplorerSettings, id: str, mark: Mark = "line", colour: int = 0) -> list[LegendEntry]:
    """Return an entry for each scale: the chosen one, and in the next colour the overlaid one, which is named."""
    named = Message(id)
    over = [Message(f"app.legend.over_{settings.overlay}", of=named)] if len(settings.sides()) > 1 else []
    return [(mark, colour + place, text) for place, text in enumerate((named, *over))]


def draw_logits(settings: ExplorerSettings) -> ExplorerFigure:
    """Draw the histogram of the logits and the exact density for Gaussian components, for each scale."""
    series: list[Series] = []
    for side in settings.sides():
        histogram = sample.logit_statistics(side).logit_histogram[0]
        bins = len(histogram.counts)
        width = (histogram.high - histogram.low) / bins
        edges = [histogram.low + width * index for index in range(bins + 1)]
        ends = list(itertools.pairwise(edges))
        theory, total = sample.distribution(side), sum(histogram.counts)
        middles = [(low + high) / 2 for low, high in ends]
        # equal logits have a histogram without width, and no density
        measured = [count / total / width for count in histogram.counts] if width else []
        expected = [theory.probability_within(low, high) / width for low, high in ends] if width else []
        series += [
            curve_series("", middles[: len(measured)], measured, style="points"),
            curve_series("", middles[: len(expected)], expected, style="dashed"),
        ]
    plot = _plot("logits", "$z$", "$p(z)$", tuple(series), ("linear", "linear"), ())
    return ExplorerFigure(plot, (*_entries(settings, "app.legend.measured", "dots"), _theory(settings)))


def draw_weights(settings: ExplorerSettings) -> ExplorerFigure:
    """Draw the weights of three rows, each sorted from the largest to the smallest; dashed with the overlaid scale."""
    ranks = range(1, settings.keys + 1)
    drawn = [sample.sorted_weights(side) for side in settings.sides()]
    styles: tuple[Style, Style] = ("line", "dashed")
    series = tuple(
        curve_series("", ranks, row, style=style) for rows, style in zip(drawn, styles, strict=False) for row in rows
    )
    lines = (("$1/n$", 1.0 / settings.keys),)
    plot = _plot("weights", "$i$", "$p_{(i)}$", series, ("log", "log"), lines)
    marks: tuple[Mark, Mark] = ("line", "dashes")
    entries = _entries(settings, "app.legend.rows")
    legend = tuple((mark, 0, text) for mark, (_, _, text) in zip(marks, entries, strict=False))
    # on a log axis zeros are left out, so the note has to say that one key has all the weight
    alone = all(row[0] == 1 and not any(row[1:]) for row in drawn[0])
    return ExplorerFigure(plot, legend, "app.note.one_key" if alone else "")


def _over_dims(
    name: str, y: str, settings: ExplorerSettings, of: Callable[[sample.AtDim], RowSummary], expected: int
) -> ExplorerFigure:
    """Draw a statistic over d_k: its mean, its 5% to 95% range over rows, and the theory for Gaussian logits."""
    series: list[Series] = []
    theory: list[Series] = []
    for side in settings.sides():
        found = [sample.at_dim(side, d_k) for d_k in sample.dims(side)]
        x = tuple(float(one.d_k) for one in found)
        rows = [of(one) for one in found]
        low, high = (tuple(one.quantiles[share][0] for one in rows) for share in (0.05, 0.95))
        series.append(Series("", x, tuple(one.mean[0] for one in rows), low, high, "line"))
        theory.append(curve_series("", x, [one.expected[expected] for one in found], style="dashed"))
    legend = (*_entries(settings, "app.legend.mean"), _theory(settings), _chosen(len(series)))
    here = series[0].y[x.index(float(settings.d_k))]
    points = curve_series("", [settings.d_k], [here], style="points")
    plot = _plot(name, "$d_k$", y, (*series, *theory, points), ("log", "linear"), ())
    return ExplorerFigure(plot, legend)


def draw_entropy(settings: ExplorerSettings) -> ExplorerFigure:
    """Draw the entropy (nats) over d_k."""
    return _over_dims("entropy", "$H$ / nat", settings, lambda one: one.entropy, 0)


def draw_peak(settings: ExplorerSettings) -> ExplorerFigure:
    """Draw the largest weight over d_k."""
    return _over_dims("peak", r"$\max_i\, p_i$", settings, lambda one: one.peak, 1)


def draw_jacobian(settings: ExplorerSettings) -> ExplorerFigure:
    """Draw the norm of the softmax Jacobian over d_k: root mean square and median over rows."""
    roots, medians, theory = [], [], []
    for side in settings.sides():
        found = [sample.at_dim(side, d_k) for d_k in sample.dims(side)]
        x = [one.d_k for one in found]
        roots.append(curve_series("", x, [one.jacobian.mean[0] ** 0.5 for one in found], style="line"))
        middle = [one.jacobian.quantiles[0.5][0] ** 0.5 for one in found]
        medians.append(curve_series("", x, middle))
        theory.append(curve_series("", x, [one.expected[2] for one in found], style="dashed"))
    here = curve_series("", [settings.d_k], [roots[0].y[x.index(settings.d_k)]], style="points")
    series = (*roots, *medians, here, *theory)
    plot = _plot("jacobian", "$d_k$", r"$\Vert J \Vert_F$", series, ("log", "linear"), ())
    rms = _entries(settings, "app.legend.rms")
    median = _entries(settings, "app.legend.median", colour=len(roots))
    return ExplorerFigure(plot, (*rms, *median, _theory(settings), _chosen(2 * len(roots))))


def gradient(settings: ExplorerSettings) -> ExplorerFigure:
    """Draw the norm of dL/dq over d_k, as quantiles over rows; dashed with the overlaid scale."""
    shares = (0.95, 0.5, 0.05)
    styles: tuple[Style, Style] = ("line", "dashed")
    series: list[Series] = []
    for side, style in zip(settings.sides(), styles, strict=False):
        found = [sample.at_dim(side, d_k) for d_k in sample.dims(side)]
        x = [one.d_k for one in found]
        series += [
            curve_series("", x, [one.gradient.quantiles[share][0] for one in found], style=style) for share in shares
        ]
    y = r"$\Vert \partial L / \partial q \Vert$"
    names = ("app.legend.high", "app.legend.median", "app.legend.low")
    legend: list[LegendEntry] = [("line", index, Message(name)) for index, name in enumerate(names)]
    legend += [("dashes", _GREY, text) for _, _, text in _entries(settings, "app.legend.same")[1:]]
    return ExplorerFigure(_plot("gradient", "$d_k$", y, tuple(series), ("log", "log"), ()), tuple(legend))


def of_range(settings: ExplorerSettings) -> ExplorerSettings:
    """Return the settings with defaults for everything that a range forecast ignores, so that its cache hits more."""
    plain = {"components": "normal", "softcap": None, "dtype": CONTROLS["dtype"].default, "seed": 0, "overlay": "off"}
    return replace(settings, **plain)  # type: ignore[arg-type]


def _largest(settings: ExplorerSettings, before: bool) -> list[tuple[int, float]]:
    """Return (d_k, largest product expected) for a few d_k, including the chosen one."""
    asked = of_range(settings)
    places = sorted({*sample.RANGE_DIMS, settings.d_k})
    return [(d_k, sample.forecast(asked, d_k, HALVES[0], before).expected_max) for d_k in places]


def dtype_range(settings: ExplorerSettings) -> ExplorerFigure:
    """Draw the largest product expected among n^2 pairs over d_k, with the limit of fp16."""
    places = [zip(*_largest(settings, before), strict=True) for before in (False, True)]
    (x, after), (_, first) = places
    limit = [largest_finite("float16")] * len(x)
    series = (
        curve_series("", x, after, style="line"),
        curve_series("", x, first, style="line"),
        curve_series("", x, limit, style="dashed"),
    )
    legend: tuple[LegendEntry, ...] = (
        ("line", 0, Message("app.legend.after")),
        ("line", 1, Message("app.legend.before")),
        ("dashes", _GREY, Message("app.legend.limit")),
    )
    return ExplorerFigure(_plot("range", "$d_k$", r"$\max\, |q \cdot k|$", series, ("log", "log"), ()), legend)


def draw_step(settings: ExplorerSettings) -> ExplorerFigure:
    """Draw the spacing of fp16 and bf16 numbers at the largest product, over d_k."""
    series, legend = [], []
    for before, mark in ((False, "line"), (True, "dashes")):
        for colour, dtype in enumerate(HALVES):
            x, largest = zip(*_largest(settings, before), strict=True)
            steps = [spacing(value, dtype) for value in largest]
            series.append(curve_series("", x, steps, style="dashed" if before else "line"))
            text = Message(f"app.legend.{dtype}_{'before' if before else 'after'}")
            legend.append((cast(Mark, mark), colour, text))
    return ExplorerFigure(_plot("step", "$d_k$", r"$\Delta z$", tuple(series), ("log", "log"), ()), tuple(legend))


def _theory(settings: ExplorerSettings) -> LegendEntry:
    """Return the entry of the theory's curve, which must say that the theory knows no softcap."""
    return "dashes", _GREY, Message("app.legend.theory" if settings.softcap is None else "app.legend.uncapped")


def _chosen(colour: int) -> LegendEntry:
    """Return the entry of the point at the chosen d_k."""
    return "dots", colour, Message("app.legend.here")


EXPLORER_FIGURES: Mapping[str, Callable[[ExplorerSettings], ExplorerFigure]] = {
    "logits": draw_logits,
    "weights": draw_weights,
    "entropy": draw_entropy,
    "peak": draw_peak,
    "jacobian": draw_jacobian,
    "gradient": gradient,
    "range": dtype_range,
    "step": draw_step,
}


@functools.lru_cache(maxsize=256)
def figure_svg(plot: Plot, prefix: str) -> Markup:
    """Return a plot as an element of the page, labelled by its caption."""
    with _PEN:
        return markup.plot_svg(to_svg(plot), f"{prefix}.", f"{prefix}-caption")


def drawing(plot: Plot, prefix: str, language: Language) -> Markup:
    """Return a plot as an element of the page, or a sentence that there is nothing to show."""
    if shows_nothing(plot):
        return Markup('<p class="empty">{}</p>').format(word("app.figure.empty", language))
    return figure_svg(plot, prefix)


def to_html(name: str, figure: ExplorerFigure, language: Language) -> Markup:
    """Return a figure with title, legend and caption."""
    entries = Markup("").join(
        Markup('<li><span class="mark {} k{}"></span>{}</li>').format(mark, colour, said(text, language))
        for mark, colour, text in figure.legend
    )
    note = Markup("<b>{}</b> ").format(word(figure.note, language)) if figure.note else ""
    return Markup(
        '<figure class="plot" id="figure-{}"><h3>{}</h3><ul class="legend">{}</ul>{}'
        '<figcaption id="{}-caption">{}{}</figcaption></figure>'
    ).format(
        name,
        word(f"app.figure.{name}", language),
        entries,
        drawing(figure.plot, name, language),
        name,
        note,
        word(f"app.caption.{name}", language),
    )
