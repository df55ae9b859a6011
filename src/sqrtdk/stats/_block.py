"""A tile's place, (batch, heads, rows, keys), and the masks of its rows.

`Values` and `Future` define what the weights of a block are summed to.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk._subclasses import check_class
from sqrtdk.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int, Shaped

# a float mask at or below hides its key: half of float16's lowest, so that the fill value of any dtype counts
HIDDEN_BELOW = -3e4


@dataclass(frozen=True, slots=True)
class Block:
    """A block of logits, by half-open ranges: b of batch elements, h of query heads, r of rows, c of keys.

    `b0` is the first batch element, and `b1` the one after the last. The heads are whole groups that share key heads.
    """

    b0: int
    b1: int
    h0: int
    h1: int
    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """Sizes of the ranges: (batch, heads, rows, keys)."""
        return self.b1 - self.b0, self.h1 - self.h0, self.r1 - self.r0, self.c1 - self.c0

    @property
    def rows(self) -> tuple[slice, slice, slice]:
        """Index of the block's rows in a tensor (B, Hq, L)."""
        return slice(self.b0, self.b1), slice(self.h0, self.h1), slice(self.r0, self.r1)


@dataclass(frozen=True, slots=True)
class Masks:
    """What hides keys; every tensor has four dimensions of size 1 or full, (B, Hq, L, S)."""

    visible: Bool[Tensor, "#B #Hq #L #S"] | None = None
    float_mask: Float[Tensor, "#B #Hq #L #S"] | None = None  # additive
    is_causal: bool = False  # upper-left

    def window(
        self, block: Block, dtype: torch.dtype, device: torch.device
    ) -> tuple[Float[Tensor, "*BHq R T"] | None, int, int]:
        """Return which keys of a block differ between its rows.

        Args:
            block: A block with all keys.
            dtype: dtype of the mask.
            device: Device of the mask.

        Returns:
            (mask, start, stop): every row sees all keys before `start`, and none from `stop` on. The mask is 1 where a
            row sees a key in between and 0 elsewhere; None if every row sees them all.
        """
        stop = min(block.c1, block.r1) if self.is_causal else block.c1
        height = block.r1 - block.r0
        if self.visible is None and self.float_mask is None:
            if not self.is_causal or block.r0 >= stop:
                return None, stop, stop
            triangle = torch.ones(height, stop - block.r0, dtype=dtype, device=device).tril_()
            return triangle, block.r0, stop
        block = replace(block, c1=stop)
        mask = torch.ones((), dtype=dtype, device=device)
        if self.visible is not None:
            mask = mask * cut(self.visible, block)
        if self.float_mask is not None:
            mask = mask * (cut(self.float_mask, block) > HIDDEN_BELOW)
        if self.is_causal:
            mask = mask * torch.ones(height, stop, dtype=dtype, device=device).tril_(block.r0)
        mask = mask.expand(*mask.shape[:-1], stop)
        if stop == 0:
            return None, 0, 0
        some = mask.amax((0, 1, 2)).nonzero()
        stop = int(some[-1]) + 1 if len(some) else 0
        part = (mask[..., :stop].amin((0, 1, 2)) == 0).nonzero()
        start = int(part[0]) if len(part) else stop
        return (mask[..., start:stop] if start < stop else None), start, stop


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of statistics: float64 for float64, float32 for every other floating type.

    Example:
        >>> statistics_dtype(torch.bfloat16)
        torch.float32
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def four_dims(tensor: Tensor, shape: Sequence[int], name: str) -> Shaped[Tensor, "_ _ _ _"]:
    """Return a tensor that broadcasts to (..., Hq, L, S) as a 4-D view; the leading dimensions become one.

    Args:
        tensor: Tensor whose sizes are 1 or full.
        shape: Full shape, (..., Hq, L, S).
        name: Name of the argument, for the error.

    Returns:
        (#B, #Hq, #L, #S). Sizes of 1 stay 1 where possible, so that nothing of size L S is copied.

    Raises:
        InvalidTypeError: It is not a tensor, or `visible` is not bool.
        InvalidValueError: The shapes don't broadcast.

    Example:
        >>> four_dims(torch.ones(5), (2, 3, 4, 5), "bias").shape
        torch.Size([1, 1, 1, 5])
    """
    check_class(name, tensor)
    if name == "visible" and tensor.dtype != torch.bool:
        raise InvalidTypeError(f"visible is a bool tensor; got {tensor.dtype}", hint="Use `float_mask=` or `mask > x`.")
    sizes = (1,) * (len(shape) - tensor.ndim) + tuple(tensor.shape)
    if len(sizes) > len(shape) or any(size not in (1, full) for size, full in zip(sizes, shape, strict=False)):
        raise InvalidValueError(
            f"{name} broadcasts to {tuple(shape)}; got {tuple(tensor.shape)}",
            hint="Align the dimensions from the right.",
        )
    tensor = tensor.detach().reshape((1,) * (4 - len(sizes)) + sizes)
    lead, full = tensor.shape[:-3], tuple(shape[:-3])
    if len(lead) > 1 and any(size != 1 for size in lead):
        tensor = tensor.expand(*full, *tensor.shape[-3:])
    return tensor.reshape(-1 if tensor.numel() else math.prod(tensor.shape[:-3]), *tensor.shape[-3:])


def pick_rows(
    tensor: Shaped[Tensor, "#B #Hq #L _"], batch: slice, rows: Int[Tensor, " R"]
) -> Shaped[Tensor, "_ _ _ _"]:
    """Return some rows of some batch elements of a tensor (#B, #Hq, #L, _); sizes of 1 stay 1."""
    tensor = tensor[batch] if tensor.shape[0] != 1 else tensor
    return tensor.index_select(2, rows) if tensor.shape[2] != 1 else tensor


def visible_rows(masks: Masks, batch: slice, rows: Int[Tensor, " R"], keys: int) -> Masks:
    """Return the masks of some rows of some batch elements.

    Args:
        masks: Masks of the whole call.
        batch: Batch elements to take.
        rows: (R,) int64 indices of the rows to take.
        keys: Number of keys, S.

    Returns:
        The masks of these rows. `is_causal`, which speaks of row numbers, is replaced by a mask (1, 1, R, S).
    """

    def pick(tensor: Shaped[Tensor, "#B #Hq #L #S"] | None) -> Shaped[Tensor, "#B #Hq #R #S"] | None:
        return None if tensor is None else pick_rows(tensor, batch, rows)

    visible, float_mask = pick(masks.visible), pick(masks.float_mask)
    if masks.is_causal:
        past = (torch.arange(keys, device=rows.device) <= rows.unsqueeze(-1))[None, None]
        visible = past if visible is None else visible & past
    return replace(masks, visible=visible, float_mask=float_mask, is_causal=False)


def cut(tensor: Shaped[Tensor, "_ _ _ _"], block: Block) -> Shaped[Tensor, "_ _ _ _"]:
    """Return the part of a 4-D tensor (sizes 1 or full) that belongs to a block, as a view."""
    ranges = ((block.b0, block.b1), (block.h0, block.h1), (block.r0, block.r1), (block.c0, block.c1))
    return tensor[tuple(slice(*r) if size != 1 else slice(None) for r, size in zip(ranges, tensor.shape, strict=True))]


def cut_keys(
    mask: Float[Tensor, "*BHq R T"] | None, start: int, block: Block
) -> tuple[Float[Tensor, "*BHq R C"] | None, int]:
    """Return the part of `Masks.window` that covers keys of a block.

    Args:
        mask: (..., R, T) mask of the last T keys, or None.
        start: First key that the mask covers.
        block: The block.

    Returns:
        The part of the mask, or None if it covers no key of the block; and the first key of the block that it covers.
    """
    if mask is None or block.c1 <= start:
        return None, block.c1 - block.c0
    begin = max(block.c0, start)
    return mask[..., begin - start : block.c1 - start], begin - block.c0


@dataclass(frozen=True, slots=True)
class Values:
    """Computes the output beside the statistics: weighted sums of values (B, H, S, Ev), widened a tile at a time."""

    value: Float[Tensor, "B H S Ev"]
    group: int  # query heads that share a value head

    @property
    def columns(self) -> int:
        """Number of features of a value, Ev."""
        return self.value.shape[-1]

    def __call__(self, weights: Float[Tensor, "B Hq R C"], block: Block) -> Float[Tensor, "B Hq R Ev"]:
        """Multiply once for all query heads that share a value head."""
        depth, width, height, keys = block.sizes
        heads = slice(block.h0 // self.group, block.h1 // self.group)
        v = self.value[block.b0 : block.b1, heads, block.c0 : block.c1].to(weights.dtype)
        pairs, rows = depth * width // self.group, self.group * height
        out = torch.empty(pairs, rows, self.columns, dtype=v.dtype, device=v.device)
        # autocast leaves operations with out= alone
        torch.bmm(weights.view(pairs, rows, keys), v.reshape(pairs, keys, self.columns), out=out)
        return out.view(depth, width, height, self.columns)


@dataclass(frozen=True, slots=True)
class Future:
    """Computes each row's weight on future keys, j > i, beside the statistics."""

    columns: int = 1

    def __call__(self, weights: Float[Tensor, "B Hq R C"], block: Block) -> Float[Tensor, "B Hq R 1"]:
        """Sum the part of the tile above the diagonal of the whole matrix."""
        first = max(0, min(block.sizes[3], block.r0 - block.c0))
        return weights[..., first:].triu(1 + block.r0 - block.c0 - first).sum(-1, keepdim=True)
