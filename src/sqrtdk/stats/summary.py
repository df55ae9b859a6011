"""What one statistic of every row says of a head: quantiles over its rows, fractions of them above thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from jaxtyping import Float, Int

QUANTILES = (0.05, 0.50, 0.95)


@dataclass(frozen=True, slots=True)
class RowSummary:
    """Every tuple has one entry a head; a head without a row to count holds NaN."""

    rows: tuple[int, ...]  # rows counted: those whose value is finite
    mean: tuple[float, ...]
    quantiles: dict[float, tuple[float, ...]]
    above: dict[float, tuple[float, ...]]  # fraction of the rows counted that lie above the threshold


def row_summary(
    values: Float[Tensor, "*B Hq L"], *, quantiles: Sequence[float] = QUANTILES, above: Sequence[float] = ()
) -> RowSummary:
    """Sum one statistic of every row up a head, over rows and batch; one transfer off the device.

    Args:
        values: (..., Hq, L), a field of `AuxOutput` or `RowStats`. Rows that are NaN or infinite, as those that see no
            key, are left out.
        quantiles: from 0 to 1; linear between rows.
        above: thresholds, in the unit of the values.

    Returns:
        RowSummary; its figures are float64.

    Raises:
        InvalidTypeError: the values are no floating tensor.
        InvalidValueError: fewer than two dimensions; a quantile or threshold out of range.

    Example:
        >>> summary = row_summary(torch.tensor([[1.0, 2.0, 60.0, 4.0]]), quantiles=[0.5], above=[50.0])
        >>> summary.quantiles[0.5], summary.above[50.0]
        ((3.0,), (0.25,))
    """
    if not isinstance(values, Tensor) or not values.is_floating_point():
        got = values.dtype if isinstance(values, Tensor) else type(values).__name__
        raise InvalidTypeError(f"values are a floating tensor; got {got}", hint="Pass rows.max, aux.entropy, ...")
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
        rows = values.movedim(-2, 0).flatten(1).double()
        good = rows.isfinite()
        total = good.sum(-1)
        mean = rows.masked_fill(~good, 0.0).sum(-1) / total
        ranked = row_quantiles(rows.masked_fill(~good, math.inf), total, quantiles)
        counted = [(rows.masked_fill(~good, -math.inf) > threshold).sum(-1) / total for threshold in above]
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
    """Quantiles of the first `total` of each head's sorted values (Hq, N); the others are +inf."""
    if not values.shape[1]:
        return [torch.full_like(total, math.nan, dtype=values.dtype) for _ in quantiles]
    ordered = values.sort(-1).values
    results = []
    for quantile in quantiles:
        position = quantile * (total - 1).clamp(min=0).to(values.dtype)
        below = position.floor().long()
        low = ordered.gather(-1, below.unsqueeze(-1)).squeeze(-1)
        high = ordered.gather(-1, torch.minimum(below + 1, (total - 1).clamp(min=0)).unsqueeze(-1)).squeeze(-1)
        results.append((low + (high - low) * (position - below)).masked_fill(total == 0, math.nan))
    return results
