"""What a plot shows: numbers and words only. `sqrtdk.report.plots` draws it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from sqrtdk.lab.figures import Figure
from sqrtdk.lab.text import Text

Axis = Literal["linear", "log"]
Style = Literal["line", "curve", "dashed", "points", "bars"]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one kind.

    Attributes:
        label: in the legend; English or symbols.
        x: numbers, or the names of bars.
        y: one for each x.
        low: lower end of each interval; empty where there is none.
        high: upper end.
        style: "line" (with markers), "curve" (without), "dashed" (a reference, without), "points" or "bars".
    """

    label: str
    x: tuple[float, ...] | tuple[str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    style: Style = "line"


def over(label: str, figures: Sequence[Figure], axis: str, *, style: Style = "line", factor: float = 1.0) -> Series:
    """Figures with their intervals, over one entry of their place.

    Args:
        label: in the legend.
        figures: of one name; each has the entry.
        axis: name of the entry, e.g. "d_k".
        style: of the series.
        factor: on values and intervals.

    Example:
        >>> over("measured", [Figure("peak", 0.5, 0.4, 0.6, "t", 9, {"d_k": 64})], "d_k").x
        (64.0,)
    """
    places = [figure.at[axis] for figure in figures]
    x: tuple[float, ...] | tuple[str, ...]
    x = tuple(map(str, places)) if style == "bars" else tuple(map(float, places))
    low, high = (tuple(factor * getattr(figure, end) for figure in figures) for end in ("low", "high"))
    return Series(label, x, tuple(factor * figure.value for figure in figures), low, high, style)


def curve(label: str, x: Iterable[float], y: Iterable[float], *, style: Style = "curve") -> Series:
    """Points without intervals: a formula, or a run over its steps.

    Example:
        >>> curve("theory", [1, 2], [1, 4]).y
        (1.0, 4.0)
    """
    return Series(label, tuple(map(float, x)), tuple(map(float, y)), style=style)


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of an experiment.

    Attributes:
        name: of its file, after the claim's id; words joined by hyphens.
        caption: what it shows, under the plot.
        x_label: with the unit; English or symbols ($...$ for mathematics), as all that is drawn.
        y_label: the same.
        series: what is drawn, in this order.
        x_axis: linear or log.
        y_axis: linear or log.
        lines: horizontal reference lines, as (label, y).
    """

    name: str
    caption: Text
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_axis: Axis = "linear"
    y_axis: Axis = "linear"
    lines: tuple[tuple[str, float], ...] = ()
