"""Figures, the results of an experiment, each with the interval that a verdict rests on; and plots of them.

A plot holds only numbers and words. `sqrtdk_lab.report.plots` draws it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sqrtdk.messages import Text

CONFIDENCE = 0.99  # confidence of every interval: a run has hundreds, and one in twenty misleading would be too many

Method = Literal["exact", "t", "bootstrap", "Clopper-Pearson", "DKW", "observed"]
Place = str | int | float


@dataclass(frozen=True, slots=True)
class Figure:
    """One number with its confidence interval.

    Attributes:
        name: its quantity, in words joined by underscores, with the unit if it could be doubted.
        value: the estimate.
        low: lower end of the interval; the value itself if there is no interval.
        high: upper end.
        method: how the interval was computed; "exact" if nothing is random, "observed" for the extreme of the draws.
        samples: number of independent samples; 1 if nothing is random.
        at: where it was measured, e.g. `{"d_k": 64, "scale": "none"}`.
    """

    name: str
    value: float
    low: float
    high: float
    method: Method
    samples: int
    at: Mapping[str, Place] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the value to four digits, with its interval if it has one.

        Example:
            >>> print(Figure("peak", 0.5, 0.25, 0.75, "t", 9))
            0.5 [0.25, 0.75]
        """
        if self.method in ("exact", "observed"):
            return format_figure(self.value)
        return f"{format_figure(self.value)} [{format_figure(self.low)}, {format_figure(self.high)}]"


class Figures:
    """The figures of an experiment, found by name and place.

    Example:
        >>> figures = Figures([Figure("peak", 0.5, 0.4, 0.6, "t", 9, {"d_k": 64})])
        >>> figures("peak", d_k=64).value
        0.5
    """

    def __init__(self, figures: list[Figure]) -> None:
        self._figures = tuple(figures)
        places = [(f.name, tuple(sorted(f.at.items()))) for f in figures]
        twice = {f"{name} at {dict(at)}" for name, at in places if places.count((name, at)) > 1}
        assert not twice, f"figures given twice: {twice}"

    def __iter__(self) -> Iterator[Figure]:
        return iter(self._figures)

    def __call__(self, name: str, **at: Place) -> Figure:
        """Return the single figure of this name whose place has these entries."""
        found = self.all(name, **at)
        assert len(found) == 1, f"{len(found)} figures {name} at {at}"
        return found[0]

    def all(self, name: str, **at: Place) -> list[Figure]:
        """Return all figures of this name whose place has these entries, in the order of measurement."""
        return [f for f in self._figures if f.name == name and at.items() <= dict(f.at).items()]


def format_figure(value: float) -> str:
    """Format a number to four digits, with a power of ten only if it is very large or very small.

    Example:
        >>> format_figure(22.6274), format_figure(26489122129.8), format_figure(0.5)
        ('22.63', '2.649e+10', '0.5')
    """
    return f"{value:.4g}"


def enumerate_texts(entries: Iterable[str]) -> Text:
    """Write entries one after the other, with each language's comma.

    Example:
        >>> enumerate_texts(["0.5", "2"])
        Text(en='0.5, 2', zh='0.5、2')
    """
    entries = list(entries)
    return Text(", ".join(entries), "、".join(entries))


Axis = Literal["linear", "log"]
Style = Literal["line", "curve", "dashed", "points", "bars"]


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one series.

    Attributes:
        label: in the legend; English or symbols.
        x: numbers, or the names of bars.
        y: one for each x.
        low: lower end of each interval; empty without intervals.
        high: upper end.
        style: "line" (with markers), "curve" (without), "dashed" (a reference, without), "points" or "bars".
    """

    label: str
    x: tuple[float | str, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    style: Style = "line"


def series_over(
    label: str, figures: Sequence[Figure], axis: str, *, style: Style = "line", factor: float = 1.0
) -> Series:
    """Make a series of figures with their intervals, over one entry of their place.

    Args:
        label: in the legend.
        figures: of one name; each has the entry.
        axis: name of the entry, e.g. "d_k".
        style: of the series.
        factor: on values and intervals.

    Example:
        >>> series_over("measured", [Figure("peak", 0.5, 0.4, 0.6, "t", 9, {"d_k": 64})], "d_k").x
        (64.0,)
    """
    places = [figure.at[axis] for figure in figures]
    x: tuple[float | str, ...]
    x = tuple(map(str, places)) if style == "bars" else tuple(map(float, places))
    low, high = (tuple(factor * getattr(figure, end) for figure in figures) for end in ("low", "high"))
    return Series(label, x, tuple(factor * figure.value for figure in figures), low, high, style)


def curve_series(label: str, x: Iterable[float], y: Iterable[float], *, style: Style = "curve") -> Series:
    """Make a series without intervals: a formula, or a run over its steps.

    Example:
        >>> curve_series("theory", [1, 2], [1, 4]).y
        (1.0, 4.0)
    """
    return Series(label, tuple(map(float, x)), tuple(map(float, y)), style=style)


@dataclass(frozen=True, slots=True)
class HeatMap:
    """A quantity over two others, drawn as coloured cells; a small map writes its numbers into them.

    Attributes:
        label: of the colours, with the unit.
        x: of the columns, ascending.
        y: of the rows, ascending.
        values: one row for each y, one number for each x.
        colours: linear or log.
        centre: the number with a neutral colour, such as a ratio of 1; None: from the least to the largest value.
    """

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    values: tuple[tuple[float, ...], ...]
    colours: Axis = "linear"
    centre: float | None = None


def map_over(
    label: str, figures: Sequence[Figure], x: str, y: str, *, colours: Axis = "linear", centre: float | None = None
) -> HeatMap:
    """Make a map of figures over two entries of their place; each pair has one figure.

    Args:
        label: of the colours.
        figures: of one name.
        x: name of the entry of the columns, e.g. "d_k".
        y: name of the entry of the rows.
        colours: linear or log.
        centre: see `HeatMap`.

    Example:
        >>> peaks = [Figure("peak", 1 / n, 0, 1, "t", 9, {"d_k": d, "keys": n}) for d in (64, 16) for n in (4, 8)]
        >>> map_over("peak", peaks, "d_k", "keys").values
        ((0.25, 0.25), (0.125, 0.125))
    """
    places = {(float(figure.at[x]), float(figure.at[y])): figure.value for figure in figures}
    columns, rows = (tuple(sorted(set(ends))) for ends in zip(*places, strict=True))
    values = tuple(tuple(places[column, row] for column in columns) for row in rows)
    return HeatMap(label, columns, rows, values, colours, centre)


@dataclass(frozen=True, slots=True)
class Plot:
    """One plot of an experiment.

    Attributes:
        name: of its file, after the claim's id; words joined by hyphens.
        caption: text under the plot.
        x_label: with the unit; English or symbols ($...$ for mathematics), as in the whole drawing.
        y_label: the same.
        series: drawn in this order, over the map if there is one.
        x_axis: linear or log.
        y_axis: linear or log.
        lines: horizontal reference lines, as (label, y).
        map: coloured cells under the series; None in most plots.
    """

    name: str
    caption: Text
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_axis: Axis = "linear"
    y_axis: Axis = "linear"
    lines: tuple[tuple[str, float], ...] = ()
    map: HeatMap | None = None
