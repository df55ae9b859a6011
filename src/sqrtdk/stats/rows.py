"""Row statistics of a tensor of logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk._subclasses import as_bool_mask, check_class, named_in_errors
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.stats._block import Block, Masks, cut, four_dims, visible_rows, wide
from sqrtdk.stats._partial import RowStats as RowStats
from sqrtdk.stats._sweep import sweep

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from sqrtdk._shapes import Logits, Visible


@dataclass(frozen=True, slots=True)
class LogitSource:
    """Logits (B, Hq, L, S) that are already there; tiles are copies of their parts."""

    logits: Float[Tensor, "B Hq L S"]
    masks: Masks
    group: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, Hq, L, S."""
        batch, heads, length, keys = self.logits.shape
        return batch, heads, length, keys

    @property
    def dtype(self) -> torch.dtype:
        """That of the statistics."""
        return wide(self.logits.dtype)

    @property
    def device(self) -> torch.device:
        """That of the logits."""
        return self.logits.device

    def load(
        self,
        block: Block,
        tile: Float[Tensor, "B Hq R C"],
        scratch: Float[Tensor, "B Hq R C"],
        mask: Float[Tensor, "*#BHq #R T"] | None,
        start: int,
    ) -> None:
        """Copy, and widen half types."""
        tile.copy_(cut(self.logits, block))

    def moments(self, block: Block) -> None:
        """Not without a pass."""

    def sample(self, batch: slice, rows: Int[Tensor, " R"]) -> LogitSource:
        """The same call with some batch elements and the given rows only."""
        logits = self.logits[batch].index_select(2, rows)
        return replace(self, logits=logits, masks=visible_rows(self.masks, batch, rows, logits.shape[-1]))


def logit_source(logits: Logits, visible: Visible | None) -> LogitSource:
    """Validate, and view (..., L, S) as (B, Hq, L, S)."""
    check_class("logits", logits)
    if not logits.is_floating_point():
        raise InvalidTypeError(f"logits are a floating tensor; got {logits.dtype}", hint="Pass logits before softmax.")
    if logits.ndim < 2:
        raise InvalidValueError(
            f"logits have the shape (..., L, S); got {tuple(logits.shape)}", hint="Add the missing dimensions."
        )
    view = four_dims(logits.detach(), logits.shape, "logits")
    visible = as_bool_mask("visible", visible, logits.shape[-2], logits.shape[-1], logits.device)
    return LogitSource(view, Masks(None if visible is None else four_dims(visible, logits.shape, "visible")))


def row_stats(logits: Logits, visible: Visible | None = None) -> RowStats:
    """Statistics of rows of logits, read in tiles that fit in cache; the input is not changed.

    Args:
        logits: (..., L, S), any floating dtype, natural-log units; half types are widened tile by tile.
        visible: bool, broadcastable to `logits`, True where the row sees the key; None: every key.

    Returns:
        RowStats of shape (..., L), float64 for float64 logits and float32 otherwise. A logit of -inf at a visible
        key is a key of weight zero, not a hidden one.

    Raises:
        InvalidTypeError: the logits are no floating tensor, or the mask is not bool.
        InvalidValueError: the logits have fewer than two dimensions, or the mask does not broadcast.

    Example:
        >>> row_stats(torch.zeros(1, 4)).effective_keys
        tensor([4.])
    """
    with torch.no_grad(), named_in_errors({"logits": logits, "visible": visible}):
        rows, _ = sweep(logit_source(logits, visible))
        return rows.map(lambda field: field.reshape(logits.shape[:-1]))
