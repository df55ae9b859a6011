"""Row statistics of a tensor of logits, and summaries of one statistic of every row for each head.

A head is summarised by quantiles over its rows, and by fractions of rows above thresholds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk._subclasses import as_bool_mask, check_class, named_in_errors
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats._block import Block, Masks, cut, four_dims, visible_rows
from sqrtdk.stats._block import statistics_dtype as statistics_dtype
from sqrtdk.stats._partial import RowStats as RowStats
from sqrtdk.stats._sweep import sweep_tiles

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from sqrtdk._shapes import Logits, Visible

QUANTILES = (0.05, 0.50, 0.95)


@dataclass(frozen=True, slots=True)
class RowSummary:
    """Statistics of each head over its rows.

    Every tuple has one entry per head, which is NaN for a head without counted rows.
    """

    rows: tuple[int, ...]  # counted rows: those whose value is finite
    mean: tuple[float, ...]
    quantiles: dict[float, tuple[float, ...]]
    above: dict[float, tuple[float, ...]]  # fraction of the counted rows above the threshold


def row_summary(
    values: Float[Tensor, "*B Hq L"], *, quantiles: Sequence[float] = QUANTILES, above: Sequence[float] = ()
) -> RowSummary:
    """Summarise one statistic of every row for each head, over rows and batch; one transfer off the device.

    Args:
        values: (..., Hq, L), a field of `AuxOutput` or `RowStats`. Rows that are NaN or infinite, such as rows that see
            no key, are left out.
        quantiles: from 0 to 1; linear between rows.
        above: thresholds, in the unit of the values.

    Returns:
        RowSummary; its figures are float64.

    Raises:
        InvalidTypeError: The values are not a floating tensor.
        InvalidValueError: There are fewer than two dimensions; or a quantile or threshold is out of range.

    Example:
        >>> summary = row_summary(torch.tensor([[1.0, 2.0, 60.0, 4.0]]), quantiles=[0.5], above=[50.0])
        >>> summary.quantiles[0.5], summary.above[50.0]
        ((3.0,), (0.25,))
    """
    if not isinstance(values, Tensor) or not values.is_floating_point():
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise InvalidTypeError(
            f"values are a floating tensor; got {got}", hint="Pass rows.max_logit, aux.entropy_nats, ..."
        )
    if values.ndim < 2:
        raise InvalidValueError(
            f"values have the shape (..., H, L); got {tuple(values.shape)}", hint="Add the missing dimensions."
        )
    for quantile in quantiles:
        if not 0.0 <= quantile <= 1.0:
            raise InvalidValueError(f"a quantile is from 0 to 1; got {quantile}", hint="The median is 0.5.")
    for threshold in above:
        if not math.isfinite(threshold):
            raise InvalidValueError(f"a threshold is finite; got {threshold}", hint="Rows are counted by it.")
    with torch.no_grad():
        # float64, as a float32 sum over many rows would lose the digits by which runs are compared.
        rows = values.movedim(-2, 0).flatten(1).double()
        good = rows.isfinite()
        total = good.sum(-1)
        mean = rows.masked_fill(~good, 0.0).sum(-1) / total
        ranked = row_quantiles(rows.masked_fill(~good, math.inf), total, quantiles)
        counted = [(rows.masked_fill(~good, -math.inf) > threshold).sum(-1) / total for threshold in above]
        # One table for all figures, because each transfer from a GPU waits for its queue.
        table = torch.stack([total.double(), mean, *ranked, *(count.double() for count in counted)]).tolist()
    columns = [tuple(column) for column in table]
    after = 2 + len(quantiles)
    return RowSummary(
        rows=tuple(int(count) for count in columns[0]),
        mean=columns[1],
        quantiles=dict(zip(quantiles, columns[2:after], strict=True)),
        above=dict(zip(above, columns[after:], strict=True)),
    )


def row_quantiles(
    values: Float[Tensor, "Hq rows"], total: Int[Tensor, " Hq"], quantiles: Sequence[float]
) -> list[Float[Tensor, " Hq"]]:
    """Return quantiles of a part of each head's values, with linear interpolation.

    Args:
        values: (Hq, N) values; those that don't count are +inf, so that they sort last.
        total: (Hq,) number of values that count.
        quantiles: Numbers from 0 to 1.

    Returns:
        (Hq,) for each quantile; NaN for a head with `total` 0.
    """
    if not values.shape[1]:
        return [torch.full_like(total, math.nan, dtype=values.dtype) for _ in quantiles]
    # Not torch.quantile: it refuses more than 2^24 values, and takes no number of values for each head.
    ordered = values.sort(-1).values
    results = []
    for quantile in quantiles:
        position = quantile * (total - 1).clamp(min=0).to(values.dtype)
        below = position.floor().long()
        low = ordered.gather(-1, below.unsqueeze(-1)).squeeze(-1)
        high = ordered.gather(-1, torch.minimum(below + 1, (total - 1).clamp(min=0)).unsqueeze(-1)).squeeze(-1)
        results.append((low + (high - low) * (position - below)).masked_fill(total == 0, math.nan))
    return results


@dataclass(frozen=True, slots=True)
class LogitSource:
    """An attention call whose logits exist as a tensor (B, Hq, L, S)."""

    logits: Float[Tensor, "B Hq L S"]
    masks: Masks
    group: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of the logits: (B, Hq, L, S)."""
        batch, heads, length, keys = self.logits.shape
        return batch, heads, length, keys

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the statistics: float32 or float64."""
        return statistics_dtype(self.logits.dtype)

    @property
    def device(self) -> torch.device:
        """Device of the logits."""
        return self.logits.device

    def load(
        self,
        block: Block,
        tile: Float[Tensor, "B Hq R C"],
        scratch: Float[Tensor, "B Hq R C"],
        mask: Float[Tensor, "*#BHq #R T"] | None,
        start: int,
    ) -> None:
        """Copy the logits of a block into `tile`, widened to the dtype of the statistics."""
        tile.copy_(cut(self.logits, block))

    def moments(self, block: Block) -> None:
        """Return None: moments of given logits have no closed form, so a pass is needed."""

    def sample(self, batch: slice, rows: Int[Tensor, " R"]) -> LogitSource:
        """Return the same call with only some batch elements and some rows, (R,) int64 indices."""
        logits = self.logits[batch].index_select(2, rows)
        return replace(self, logits=logits, masks=visible_rows(self.masks, batch, rows, logits.shape[-1]))


def logit_source(logits: Logits, visible: Visible | None) -> LogitSource:
    """Check logits and return them as the source of a pass.

    Args:
        logits: (..., L, S) floating logits, before the softmax.
        visible: Bool mask that broadcasts to the logits, True where a key takes part; None: all do.

    Raises:
        InvalidTypeError: An argument is not a tensor, or has another dtype.
        InvalidValueError: The shapes don't fit.
    """
    check_class("logits", logits)
    if not logits.is_floating_point():
        raise InvalidTypeError(f"logits are a floating tensor; got {logits.dtype}", hint="Pass logits before softmax.")
    if logits.ndim < 2:
        raise InvalidValueError(
            f"logits have the shape (..., L, S); got {tuple(logits.shape)}", hint="Add the missing dimensions."
        )
    # Detached, as the passes write in place into buffers, which autograd would refuse.
    view = four_dims(logits.detach(), logits.shape, "logits")
    visible = as_bool_mask("visible", visible, logits.shape[-2], logits.shape[-1], logits.device)
    return LogitSource(view, Masks(None if visible is None else four_dims(visible, logits.shape, "visible")))


def row_stats(logits: Logits, visible: Visible | None = None) -> RowStats:
    """Return statistics of rows of logits, read in tiles that fit in cache; the input is not changed.

    Args:
        logits: (..., L, S), any floating dtype, natural-log units; half types are widened tile by tile.
        visible: bool, broadcastable to `logits`, True where the row sees the key; None: every key.

    Returns:
        RowStats of shape (..., L), float64 for float64 logits and float32 otherwise. A logit of -inf at a visible
        key is a key of weight zero, not a hidden one.

    Raises:
        InvalidTypeError: The logits are not a floating tensor, or the mask is not bool.
        InvalidValueError: The logits have fewer than two dimensions, or the mask does not broadcast.

    Example:
        >>> row_stats(torch.zeros(1, 4)).effective_keys
        tensor([4.])
    """
    with torch.no_grad(), named_in_errors({"logits": logits, "visible": visible}):
        rows, _ = sweep_tiles(logit_source(logits, visible))
        return rows.map(lambda field: field.reshape(logits.shape[:-1]))
