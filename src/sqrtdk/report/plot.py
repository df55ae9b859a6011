"""Pictures of measured attention with matplotlib: statistics by head, along the queries or over a model's attentions.

The figure belongs to no window and no global state of matplotlib: a notebook shows it, `savefig` writes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sqrtdk._extras import load_extra
from sqrtdk._sites import ROOT_NAME
from sqrtdk.errors import InvalidValueError
from sqrtdk.report.plain import plain

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from sqrtdk.audit.records import CheckReport, JudgedCall
    from sqrtdk.stats import RowStats

# statistics that are drawn, with what the colour bar says and the colours: bright is where the softmax is sharp
_PANELS = (
    ("max_logit", "largest logit", "viridis"),
    ("entropy_nats", "entropy, nats", "viridis_r"),
    ("peak", "largest weight", "viridis"),
)
_MOST_LABELS = 24  # labels of rows; more would be written over one another
_INCHES_A_ROW, _LEAST_INCHES, _MOST_INCHES, _WIDTH = 0.22, 2.2, 12.0, 4.4


@dataclass(frozen=True, slots=True)
class _Grid:
    """One picture: a row of cells for each name, in the columns `across`; `panels` has (rows, columns) a statistic."""

    title: str
    rows: tuple[str, ...]
    down: str
    across: str
    panels: Mapping[str, Float[Tensor, "R C"]]


def to_figure(record: object) -> Any:
    """Return a `matplotlib.figure.Figure` of a check, of one of its calls, or of statistics of rows.

    Statistics of rows are drawn for each head along the queries, as means over the batch; a check and its calls for
    each attention and head. Cells without a finite value stay blank.

    Raises:
        InvalidValueError: There is nothing to draw.
        MissingExtraError: matplotlib is not installed.

    Example:
        >>> import torch, sqrtdk
        >>> figure = to_figure(sqrtdk.measure(torch.randn(1, 4, 16, 8), torch.randn(1, 4, 16, 8), is_causal=True))
        >>> [axes.get_xlabel() for axes in figure.axes if axes.get_xlabel()]
        ['query', 'query', 'query']
    """
    grid = _GRIDS[type(record).__name__](record)
    if not grid.panels or not all(cells.numel() for cells in grid.panels.values()):
        raise InvalidValueError("there is nothing to draw: no statistics were measured", hint="Run it with values.")
    return _drawn(grid)


def _drawn(grid: _Grid) -> Any:
    figures, agg = load_extra("matplotlib.figure"), load_extra("matplotlib.backends.backend_agg")
    count = len(grid.rows)
    height = min(max(_LEAST_INCHES, 1.2 + _INCHES_A_ROW * count), _MOST_INCHES)
    figure = figures.Figure(figsize=(_WIDTH * len(grid.panels), height), layout="constrained")
    agg.FigureCanvasAgg(figure)
    figure.suptitle(grid.title, fontsize=10.5)
    for place, (name, title, colors) in enumerate((panel for panel in _PANELS if panel[0] in grid.panels), 1):
        axes = figure.add_subplot(1, len(grid.panels), place)
        shown = grid.panels[name].double()
        image = axes.imshow(
            shown.masked_fill(~shown.isfinite(), torch.nan).numpy(), aspect="auto", cmap=colors, interpolation="nearest"
        )
        axes.set_xlabel(grid.across)
        axes.xaxis.get_major_locator().set_params(integer=True)
        step = -(-count // _MOST_LABELS)
        axes.set_yticks(range(0, count, step), grid.rows[::step] if place == 1 else [""] * len(grid.rows[::step]))
        if place == 1:
            axes.set_ylabel(grid.down)
        figure.colorbar(image, ax=axes, label=title, shrink=0.9)
    return figure


def _of_rows(rows: RowStats) -> _Grid:
    """Return the statistics of `measure` or of `attention(..., return_aux=True)`."""
    there = {name: values for name, _, _ in _PANELS if (values := getattr(rows, name, None)) is not None}
    panels = {name: _by_head(values) for name, values in there.items()}
    heads, length = next(iter(panels.values())).shape if panels else (0, 0)
    title = f"{heads} {'heads' if heads != 1 else 'head'}, {length} queries"
    return _Grid(title, tuple(map(str, range(heads))), "head", "query", panels)


def _by_head(values: Float[Tensor, "*B Hq L"]) -> Float[Tensor, "Hq L"]:
    values = values.detach().cpu().double()
    values = values[None] if values.ndim == 1 else values
    flat = values.reshape(-1, *values.shape[-2:])
    return flat.masked_fill(~flat.isfinite(), torch.nan).nanmean(0)


def _of_check(report: CheckReport) -> _Grid:
    return _of_calls(report.calls, report.model.id)


def _of_calls(calls: Sequence[JudgedCall], title: str) -> _Grid:
    measured = [(judged.call, judged.call.stats) for judged in calls if judged.call.stats is not None]
    names = tuple(plain(call.site or ROOT_NAME) + (f" #{call.index}" if call.index else "") for call, _ in measured)
    heads = max((stats.heads for _, stats in measured), default=0)
    panels = {}
    for name, _, _ in _PANELS:
        cells = torch.full((len(measured), heads), torch.nan, dtype=torch.float64)
        for row, (_, stats) in enumerate(measured):
            cells[row, : stats.heads] = torch.tensor(getattr(stats, name), dtype=torch.float64)
        panels[name] = cells
    return _Grid(plain(title), names, "attention", "head", panels)


_GRIDS: Mapping[str, Callable[[Any], _Grid]] = {
    "RowStats": _of_rows,
    "AuxOutput": _of_rows,
    "CheckReport": _of_check,
    "JudgedCall": lambda judged: _of_calls((judged,), judged.formula),
}
