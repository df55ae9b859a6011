"""Draws one plot on a matplotlib figure: series, intervals, reference lines, ticks and legend."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqrtdk.extending import load_extra
from sqrtdk.report.plain import plain
from sqrtdk_lab.figures import HeatMap, Plot, Series

# Distinct under every kind of colour blindness and dark enough on white; the page has a lighter set for dark mode.
SERIES_COLOURS = ("#0072b2", "#d55e00", "#7d2ae0", "#5c3a1e", "#cd7a99", "#1f9fc4", "#a0005c", "#c25cff")
INK, SOFT, LINE, PAPER = "#171c26", "#566072", "#dfe3ea", "#ffffff"
SIZE_INCHES = (6.4, 3.6)

_MARKERS = "os^DvPX*"
_MANY = 24  # a line with more points shows its interval as a band instead of whiskers
_LABEL_LINES = 4
_LONGEST_WORD = 20  # a word of at most this many characters is never cut, however narrow the label
_TICK_CHARACTERS = 58  # characters that fit on one line below the axes
_LEGEND_INCHES = 0.35  # height of a legend of one line
_LEVEL_SPREAD = 1e-6  # relative spread of a constant that was computed in float32
_LARGEST_DRAWN = 1e100  # matplotlib's own arithmetic overflows on larger values
_ON_CELLS = ("#101010", "#f4f4f4")  # on light and on dark cells; the page's own ink would turn light in dark mode
_MOST_WRITTEN = 64  # a map of more cells shows its numbers by colour alone
_MOST_BRACES = 20  # mathtext's parser recurses about a dozen calls deep for each brace
_WRITTEN_OUT = 2**16  # ticks up to 2^16 read "65536"; larger ones read "2^17"


@dataclass(frozen=True, slots=True)
class _Points:
    """The points of a series that the axes can show. Without an interval, `low` and `high` equal `y`."""

    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]

    @property
    def spread(self) -> bool:
        return any(low < high for low, high in zip(self.low, self.high, strict=True))


def draw(figure: Any, plot: Plot, colours: Mapping[str, str] | None = None) -> None:
    """Draw a plot.

    Values that an axis can't show are left out: non-finite ones, ones beyond 1e100, and on a log axis zero and less.

    Args:
        figure: an empty matplotlib figure.
        plot: the data.
        colours: series label -> colour. Each series without an entry takes the next of COLOURS.
    """
    axes = figure.add_subplot()
    names = _names(plot)
    axes.set_yscale(plot.y_axis)
    if not names and plot.x_axis == "log":
        axes.set_xscale("log", base=2 if _powers_of_two(plot) else 10)
    if plot.map is not None:
        _map(figure, axes, plot.map, plot)
    bars = [series for series in plot.series if series.style == "bars"]
    handles, shown = [], []
    for series, colour, marker in _looks(plot.series):
        colour = (colours or {}).get(series.label, colour)
        points = _points(series, plot, names)
        shown.append(points)
        if series.style == "bars":
            # bars of one name stand side by side, centred on its tick
            width = 0.8 / len(bars)
            offset = (bars.index(series) - (len(bars) - 1) / 2) * width
            handle = _bars(axes, points, offset, width, colour)
        else:
            handle = _series(axes, points, series.style, colour, marker)
        handles.append((handle, matplotlib_label(series.label)))
    if plot.map is None and not any(points.x for points in shown):
        axes.text(0.5, 0.5, "no value that can be shown", transform=axes.transAxes, ha="center", color=SOFT)
    if plot.map is None:
        _level(axes, plot, shown)
    _ticks(axes, plot, names)
    # widths in characters: about the lengths of the two axes
    axes.set_xlabel(matplotlib_label(plot.x_label, 72))
    axes.set_ylabel(matplotlib_label(plot.y_label, 38))
    _lines(axes, plot)
    if len(handles) > 1 and any(text for _, text in handles):  # without labels the page has a legend of its own
        _legend(figure, handles)
    if names:
        _keep_apart(figure, axes, names)


def shows_nothing(plot: Plot) -> bool:
    """Return whether the axes can show no value of a plot.

    Example:
        >>> from sqrtdk_lab.figures import curve_series
        >>> from sqrtdk.messages import Text
        >>> zeros = Plot("zeros", Text("", ""), "$x$", "$y$", (curve_series("", [1, 2], [0, 0]),), "linear", "log", ())
        >>> shows_nothing(zeros)
        True
    """
    names = _names(plot)
    return plot.map is None and not any(_points(series, plot, names).x for series in plot.series)


def matplotlib_label(text: str, width: int = 60) -> str:
    """Return a label that matplotlib can draw, in lines of about `width` characters.

    Mathematics that matplotlib can't parse is shown as plain text.

    Example:
        >>> matplotlib_label("a $q_i$ b", 5), matplotlib_label("$\\\\frac{$")
        ('a $q_i$\\nb', '\\\\$\\\\frac{\\\\$')
    """
    text = plain(text)[:200]  # an untrusted record may carry labels of any length
    if not _parses(text):
        # An escaped dollar is drawn as a dollar and opens no formula.
        text = text.replace("$", r"\$")
    lines = [""]
    for word in _words(text, width):
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and _size(longer) > width:
            lines.append(word)
        else:
            lines[-1] = longer
    return "\n".join([*lines[:_LABEL_LINES], *["..."][: len(lines) - _LABEL_LINES]])


def _parses(text: str) -> bool:
    if text.count("{") > _MOST_BRACES:  # parsing may succeed here and still overflow the stack deeper in the draw
        return False
    try:
        load_extra("matplotlib.mathtext").MathTextParser("path").parse(text)
    except (ValueError, RecursionError):
        return False
    return True


def _words(text: str, width: int) -> Iterator[str]:
    """Yield the words of a label. A formula stays whole; a word that no line can hold is cut."""
    most = max(width, _LONGEST_WORD)
    for word in re.findall(r"(?:\$[^$]*\$|\S)+", text):  # "$a + b$," is one word, blanks included
        if "$" in word or len(word) <= most:
            yield word
        else:
            yield from (word[start : start + most] for start in range(0, len(word), most))


def _size(text: str) -> int:
    """Return about how many characters are visible once TeX commands and braces are gone."""
    return len(re.sub(r"\\[A-Za-z]+|[${}_^]", "", text))


def _looks(every: Sequence[Series]) -> list[tuple[Series, str, str]]:
    """Return each series with its colour and marker. A dashed series takes the colour of its solid partner, or grey."""
    solid = [series for series in every if series.style != "dashed"]
    dashed = [series for series in every if series.style == "dashed"]
    lines = [series for series in solid if series.style != "points"]
    places = {id(series): place for place, series in enumerate(solid)}
    free = len(solid)
    for index, series in enumerate(dashed):
        owner = _owner(series, solid)
        # no label names a partner, but there are as many dashed as solid series: pair them in order
        if owner is not None or len(dashed) == len(solid) > 1:
            places[id(series)] = index if owner is None else places[id(owner)]
        elif not series.label and 1 < len(dashed) <= len(
            lines
        ):  # the page names them: the first lines are their partners
            places[id(series)] = places[id(lines[index])]
        elif len(dashed) > 1:
            places[id(series)] = free
            free += 1
    drawn = []
    for series in every:
        place = places.get(id(series))
        colour = SOFT if place is None else SERIES_COLOURS[place % len(SERIES_COLOURS)]
        drawn.append((series, colour, _MARKERS[(place or 0) % len(_MARKERS)]))
    return drawn


def _owner(series: Series, others: Sequence[Series]) -> Series | None:
    """Return the series that this label names: "unscaled" for "theory, unscaled" and for "unscaled, upper end"."""
    first = series.label.split(",")[0]
    labelled = [one for one in others if one.label]
    named = [one for one in labelled if one.label in series.label or one.label.split(",")[0] == first]
    return max(named, key=lambda one: len(one.label), default=None)


def _points(series: Series, plot: Plot, names: Sequence[str]) -> _Points:
    x_log, y_log = not names and plot.x_axis == "log", plot.y_axis == "log"
    x = [float(names.index(str(value)) if series.style == "bars" else value) for value in series.x]
    low, high = series.low or series.y, series.high or series.y
    shown = _Points([], [], [], [])
    for one in zip(x, series.y, low, high, strict=True):
        if not (_fits(one[0], x_log) and _fits(one[1], y_log)):
            continue
        shown.x.append(one[0])
        shown.y.append(one[1])
        # an end at zero or below becomes the floor of a log axis; an end that does not fit otherwise becomes the value
        shown.low.append(min(one[2], one[1]) if _fits(one[2], y_log) else _floor(plot) if y_log else one[1])
        shown.high.append(max(one[3], one[1]) if _fits(one[3], y_log) else one[1])
    return shown


def _names(plot: Plot) -> list[str]:
    """Return the names under the bars, in order."""
    return list(dict.fromkeys(str(x) for series in plot.series if series.style == "bars" for x in series.x))


def _level(axes: Any, plot: Plot, shown: Sequence[_Points]) -> None:
    """Widen the y axis around values that differ by rounding alone, so that it does not magnify rounding errors."""
    values = [value for points in shown for value in (*points.y, *points.low, *points.high)]
    largest = max(map(abs, values), default=0.0)
    if plot.y_axis == "linear" and largest and max(values) - min(values) <= _LEVEL_SPREAD * largest:
        axes.set_ylim(values[0] - largest / 4, values[0] + largest / 4)


def _fits(value: float, log: bool) -> bool:
    return abs(value) <= _LARGEST_DRAWN and (value > 0 or not log)


def _floor(plot: Plot) -> float:
    """Return the lower end of a bar or whisker that reaches down to zero, which a log axis can't show."""
    values = [value for series in plot.series for value in (*series.y, *series.low) if _fits(value, True)]
    return min(values, default=1.0) / 2


def _series(axes: Any, points: _Points, style: str, colour: str, marker: str) -> Any:
    marked = style == "points" or (style == "line" and len(points.x) <= _MANY)
    (handle,) = axes.plot(
        points.x,
        points.y,
        color=colour,
        linestyle={"points": "none", "dashed": (0, (5, 2.5))}.get(style, "-"),
        marker=marker if marked else "",
        markersize=3 if len(points.x) > 4 * _MANY else 5,  # smaller if they crowd
        # from back to front: lines (2.2), whiskers (2.3), markers (2.4), dashed theory (2.5)
        zorder=2.5 if style == "dashed" else 2.4 if marked else 2.2,
    )
    if points.spread and marked:
        axes.vlines(points.x, points.low, points.high, color=colour, linewidth=1.3, zorder=2.3)
    elif points.spread:
        axes.fill_between(points.x, points.low, points.high, color=colour, alpha=0.18, linewidth=0)
    return handle


def _map(figure: Any, axes: Any, drawn: HeatMap, plot: Plot) -> None:
    """Draw the cells of a map, their colour bar, and in a small map their numbers. A cell without a number is empty."""
    colors = load_extra("matplotlib.colors")
    log = drawn.colours == "log"
    rows = [[value if _fits(value, log) else math.nan for value in row] for row in drawn.values]
    found = [value for row in rows for value in row if math.isfinite(value)] or [1.0]
    low, high = min(found), max(found)
    if drawn.centre is not None and _fits(drawn.centre, log):  # as far to either side, so that no side looks stronger
        centre = drawn.centre
        far = max(high / centre, centre / low) if log else max(high - centre, centre - low)
        low, high = (centre / far, centre * far) if log else (centre - far, centre + far)
    norm = (colors.LogNorm if log else colors.Normalize)(low, high)
    cells = axes.pcolormesh(
        _cell_edges(drawn.x, plot.x_axis == "log"),
        _cell_edges(drawn.y, plot.y_axis == "log"),
        rows,
        norm=norm,
        # the bar is drawn in as many steps as there are colours
        cmap=load_extra("matplotlib").colormaps["viridis" if drawn.centre is None else "PuOr_r"].resampled(49),
    )
    axes.grid(False)
    bar = figure.colorbar(cells, ax=axes, label=matplotlib_label(drawn.label, 38))
    bar.solids.set_rasterized(False)  # the page takes no bitmap
    if len(found) > _MOST_WRITTEN:
        return
    for y, row in zip(drawn.y, rows, strict=True):
        for x, value in zip(drawn.x, row, strict=True):
            if math.isfinite(value):
                dark = sum(cells.cmap(norm(value))[:3]) < 1.5
                axes.text(x, y, f"{value:.2g}", ha="center", va="center", fontsize=9, color=_ON_CELLS[bool(dark)])


def _cell_edges(centres: Sequence[float], log: bool) -> list[float]:
    """Return the edges of cells around their centres, halfway between neighbours on the axis."""
    places = [math.log(centre) if log else centre for centre in centres]
    steps = [b - a for a, b in itertools.pairwise(places)] or [1.0]
    inner = [(a + b) / 2 for a, b in itertools.pairwise(places)]
    edges = [places[0] - steps[0] / 2, *inner, places[-1] + steps[-1] / 2]
    return [math.exp(edge) for edge in edges] if log else edges


def _bars(axes: Any, points: _Points, offset: float, width: float, colour: str) -> Any:
    x = [value + offset for value in points.x]
    handle = axes.bar(x, points.y, width * 0.92, color=colour)  # leaves a gap between neighbours
    if points.spread:
        axes.vlines(x, points.low, points.high, color=INK, linewidth=1.3, zorder=2.5)
    return handle


def _ticks(axes: Any, plot: Plot, names: Sequence[str]) -> None:
    ticker = load_extra("matplotlib.ticker")
    if names:
        room = max(6, _TICK_CHARACTERS // len(names))
        axes.set_xticks(range(len(names)), [matplotlib_label(name, room) for name in names])
        axes.set_xlim(-0.6, len(names) - 0.4)
        axes.grid(False, axis="x")
        if plot.y_axis == "log":
            axes.set_ylim(bottom=_floor(plot))
    elif plot.x_axis == "log" and _powers_of_two(plot):
        beside = axes.get_subplotspec().get_gridspec().ncols > 1  # a panel of two has half the room
        axes.xaxis.set_major_locator(ticker.LogLocator(base=2, numticks=8 if beside else 11))
        axes.xaxis.set_major_formatter(ticker.FuncFormatter(_power))
        axes.xaxis.set_minor_locator(ticker.NullLocator())
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if axis.get_scale() == "log" and axis.get_transform().base == 10:
            few = high < 100 * low  # less than two decades: powers of ten alone would leave one or two ticks
            axis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5) if few else (1,), numticks=9))
            axis.set_minor_formatter(ticker.NullFormatter())
            if few or (low > 5e-4 and high < 2e4):  # short enough to be written out: 0.001 to 10000
                axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))


def _keep_apart(figure: Any, axes: Any, names: Sequence[str]) -> None:
    """Rotate the names below the bars if two of them would touch where all that is drawn has its place."""
    figure.get_layout_engine().execute(figure)
    boxes = [name.get_window_extent() for name in axes.get_xticklabels()]
    line = 1.3 * axes.get_xticklabels()[0].get_fontsize() * figure.dpi / 72  # height of a line, in pixels
    if all(left.x1 + line / 3 < right.x0 for left, right in itertools.pairwise(boxes)):
        return
    texts = [matplotlib_label(name, _LONGEST_WORD) for name in names]
    high = line * max(text.count("\n") + 1 for text in texts)
    # rotated by this angle, names whose ticks are `step` apart lie `high` apart
    angle = math.degrees(math.asin(min(1.0, high * len(names) / axes.bbox.width)))
    axes.set_xticks(range(len(names)), texts, rotation=max(25.0, angle), ha="right", rotation_mode="anchor")


def _powers_of_two(plot: Plot) -> bool:
    marked = [series for series in plot.series if series.style in ("line", "points")]
    values = [float(x) for series in marked for x in series.x if _fits(float(x), True)]
    values += plot.map.x if plot.map is not None else ()
    # frexp(8.0) == (0.5, 4): only powers of two have the mantissa 0.5
    return bool(values) and all(math.frexp(value)[0] == 0.5 for value in values)


def _power(value: float, _: int) -> str:
    return f"{value:g}" if 2**-4 <= value <= _WRITTEN_OUT else f"$2^{{{round(math.log2(value))}}}$"


def _lines(axes: Any, plot: Plot) -> None:
    """Draw the reference lines, each with its label to the right of the axes."""
    lines = sorted((line for line in plot.lines if _fits(line[1], plot.y_axis == "log")), key=lambda line: line[1])
    for _, y in lines:
        axes.axhline(y, color=INK, linewidth=1, linestyle=(0, (1.5, 2)), zorder=2.1)
    axes.set_ylim(axes.get_ylim())  # labels are placed by the limits: fix them before placing
    free = -1.0  # top of the previous label, as a share of the axes' height
    for name, y in lines:
        text = matplotlib_label(name, 16)
        half = 0.034 * (1 + text.count("\n"))  # half the label's height, as a share of the axes' height
        place = axes.transAxes.inverted().transform(axes.transData.transform((axes.get_xlim()[0], y)))[1]
        at = max(free + half, float(place))
        free = at + half
        axes.text(1.015, at, text, transform=axes.transAxes, va="center", fontsize=9.5)


def _legend(figure: Any, handles: Sequence[tuple[Any, str]]) -> None:
    """Place the legend above the axes in as many columns as fit. The figure grows by each line after the first."""
    width = figure.bbox.width - 12
    for columns in range(min(len(handles), 6), 0, -1):
        legend = figure.legend(*zip(*handles, strict=True), loc="outside upper left", ncols=columns)
        box = legend.get_window_extent(figure.canvas.get_renderer())
        if box.width < width or columns == 1:
            break
        legend.remove()
    further = max(0.0, box.height / figure.dpi - _LEGEND_INCHES)
    figure.set_size_inches(SIZE_INCHES[0], SIZE_INCHES[1] + further)
