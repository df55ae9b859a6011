"""Draws the figures of the lesson that a report of the lab has no drawing for: panels side by side, labelled points."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure as Canvas

from sqrtdk_lab.figures import HeatMap, Plot
from sqrtdk_lab.report import axes

SIZE_INCHES = (8.0, 3.7)


def draw_panels(canvas: Canvas, panels: Sequence[Plot], colours: Mapping[str, str]) -> None:
    """Draw the panels, which are all maps or all curves, each under its caption as the title.

    Args:
        canvas: an empty figure.
        panels: with the same axes.
        colours: series label -> colour.
    """
    canvas.set_size_inches(SIZE_INCHES)
    areas = canvas.subplots(1, len(panels), sharey=True)
    for area, plot in zip(areas, panels, strict=True):
        area.set_title(plot.caption.en, fontsize=11)
        area.set_xscale(plot.x_axis, **({"base": 2} if plot.x_axis == "log" and axes._powers_of_two(plot) else {}))
        area.set_yscale(plot.y_axis)
        area.set_xlabel(plot.x_label)
    areas[0].set_ylabel(panels[0].y_label)
    maps = [plot.map for plot in panels if plot.map is not None]
    if maps:
        norm = _shared_norm(maps)
        for area, drawn, plot in zip(areas, maps, panels, strict=True):
            cells = _cells(area, drawn, plot, norm)
        bar = canvas.colorbar(cells, ax=areas, label=maps[0].label)
        bar.solids.set_rasterized(False)  # no bitmap in the document
        return
    handles = {}
    for area, plot in zip(areas, panels, strict=True):
        for series, _, marker in axes._looks(plot.series):
            points = axes._points(series, plot, [])
            handles[series.label] = axes._series(area, points, series.style, colours[series.label], marker)
        axes._ticks(area, plot, [])
    canvas.legend(handles.values(), handles, loc="outside upper left", ncols=2 if len(handles) < 5 else 3)


def draw_reports(canvas: Canvas, plot: Plot, colours: Mapping[str, str]) -> None:
    """Draw single points, each with its label beside it, over bars that have their labels at the right end.

    Args:
        canvas: an empty figure.
        plot: its dashed series are in the legend.
        colours: of the dashed series.
    """
    canvas.set_size_inches(SIZE_INCHES[0], 4.2)
    area = canvas.subplots()
    area.set_yscale(plot.y_axis)
    area.set_xlabel(plot.x_label)
    area.set_ylabel(plot.y_label)
    area.grid(False, axis="x")
    handles = []
    for series in plot.series:
        points = axes._points(series, plot, [])
        if series.style == "dashed":
            handles.append(axes._series(area, points, series.style, colours[series.label], ""))
            continue
        axes._series(area, points, series.style, axes.INK, "o")
        place = (points.x[0], points.y[0])
        box = {
            "facecolor": axes.PAPER,
            "edgecolor": "none",
            "pad": 0.8,
        }  # a line ends at a label instead of crossing it
        area.annotate(series.label, place, (7, 0), textcoords="offset points", va="center", fontsize=8.5, bbox=box)
    ends = [x for series in plot.series for x in series.x if series.style == "dashed"]
    area.set_xlim(min(ends), max(ends))
    area.set_xticks(sorted({x for series in plot.series for x in series.x if series.style == "points"}))
    area.set_ylim(1, 1e5)
    axes._ticks(area, plot, [])
    axes._lines(area, plot)
    labels = [series.label for series in plot.series if series.style == "dashed"]
    canvas.legend(handles, labels, loc="outside upper left", ncols=2)


def _shared_norm(maps: Sequence[HeatMap]) -> Normalize:
    """One scale of colours for all: a cell of one panel can be compared with one of another."""
    values = [value for drawn in maps for row in drawn.values for value in row]
    if maps[0].colours == "log":
        farthest = max(abs(math.log(value)) for value in values)  # around 1, as far to either side
        return LogNorm(math.exp(-farthest), math.exp(farthest))
    return Normalize(0, max(1.0, *values))


def _cells(area: Axes, drawn: HeatMap, plot: Plot, norm: Normalize) -> object:
    """Draw the cells of a map with their numbers; the ticks are the middles of the cells."""
    log = plot.x_axis == "log"
    edges = [axes._cell_edges(places, log) for places in (drawn.x, drawn.y)]
    colours = colormaps["PuOr_r" if drawn.colours == "log" else "viridis"].resampled(49)
    cells = area.pcolormesh(*edges, drawn.values, norm=norm, cmap=colours)
    area.grid(False)
    for y, row in zip(drawn.y, drawn.values, strict=True):
        for x, value in zip(drawn.x, row, strict=True):
            colour = axes._ON_CELLS[bool(sum(colours(norm(value))[:3]) < 1.5)]
            area.text(x, y, written(value, log), ha="center", va="center", fontsize=9, color=colour)
    for axis, places in ((area.xaxis, drawn.x), (area.yaxis, drawn.y)):
        axis.set_ticks(places, [f"{place:g}" for place in places])
        axis.set_ticks([], minor=True)
    if not log:
        area.set_ylim(edges[1][-1], edges[1][0])  # the first query on top, as in the printed matrix
    return cells


def written(value: float, ratio: bool) -> str:
    """A number of a cell: a share to two decimals, a ratio to two digits."""
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}" if ratio else f"{value:.2f}"
