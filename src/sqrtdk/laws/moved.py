"""Decides which numbers of an output moved: differ by more than rounding between two runs.

Derivation of the bar: a forward rounds each number some 10^4 times in a row, by at most eps / 2 of its size. Such
errors add up like a random walk, to 50 eps. Layers enlarge them, by up to 10 times in measurements. The bar is 2^10 eps
of the size of a number. A broken law moves numbers by a hundredth or more.

The size of a number is not its own: a sum may cancel, and its terms are as large as those of the sums beside it. With a
row h of hidden states and a channel w of weights, the terms are as large as |h| |w|. The largest number of the row is
that for the largest |w|, and the largest number of the channel is that for the largest |h|, so the smaller of the two
is no less than |h| |w|, and an outlier in another row or channel has no part in it. Where a row or a channel is short,
all of its sums may cancel by chance, so it counts at least as the median of all. The largest of a few dozen sums is two
standard deviations of a sum, and that of a whole output, against which the bar was measured, is four: hence the factor
2. A channel that varies by less than its own bar, as a vocabulary padded with -1e4 or finfo.min, tells nothing of the
sizes of the others.

A half-precision model is asked as a float32 copy. A model that is too large to be copied runs twice on the same shapes.
Kernels then compute each row in the same order whatever other rows hold, so the bar is 4 eps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

MOVED_ROUNDINGS = 2.0**10  # times eps
LARGEST = 2.0  # size of the largest terms of an output, in units of the largest number of a row or channel
IN_HALF = 4.0  # times eps, between two runs on the same shapes
HALF_DTYPES = (torch.float16, torch.bfloat16)


def moved_entries(before: Tensor, after: Tensor, roundings: float = MOVED_ROUNDINGS) -> Tensor:
    """Return whether each entry of an output changed by more than rounding, as bool in the shape of `before`.

    The bound is relative to the size of the numbers in the entry's row and channel. An entry that is finite in only one
    run changed; NaN in both runs, and equal infinities, did not. If the shapes differ, all entries changed.

    Args:
        before: The output of the first run.
        after: The same output of the second run.
        roundings: The bound in units of eps, that of the dtype but at least float32's. In float16 and bfloat16 the
            bound is 4 eps of the dtype, whatever `roundings` says.

    Example:
        >>> moved_entries(torch.tensor([1.0, 2.0, float("nan")]), torch.tensor([1.0, 2.1, float("nan")])).tolist()
        [False, True, False]
        >>> before = torch.tensor([[1.0, -1e9], [2.0, -1e9]])  # a padded channel hides nothing
        >>> moved_entries(before, before + 0.01).tolist()
        [[True, False], [True, False]]
    """
    if before.shape != after.shape:
        return torch.ones(before.shape, dtype=torch.bool)
    if before.dtype == after.dtype and torch.equal(before, after):  # the usual case of a kept law, and cheap
        return torch.zeros_like(before, dtype=torch.bool)
    bar = roundings * max(torch.finfo(before.dtype).eps, torch.finfo(torch.float32).eps)
    if before.dtype in HALF_DTYPES:
        bar = IN_HALF * torch.finfo(before.dtype).eps
    one, other = (x if x.dtype is torch.float64 else x.float() for x in (before, after))
    gap = (one - other).abs_()
    same = gap == 0
    if gap.numel() and not bool(gap.amax().isfinite()):
        # Equal infinities differ by NaN, so they are compared by themselves.
        same = (one == other) | (one.isnan() & other.isnan())
        gap = gap.nan_to_num_(nan=torch.inf, posinf=torch.inf)
    if one.dim() < 2 or not one.numel():
        return ~same & (gap > bar * LARGEST * _largest(one))
    beside = _largest_beside(one, bar, same)
    moved = (gap > beside.values * (bar * LARGEST)).logical_and_(same.logical_not_())
    return moved & (gap > bar * LARGEST * beside.median()) if bool(moved.any()) else moved


def _largest(values: Tensor) -> Tensor:
    """Return the size of the largest finite number of a vector, or the sizes of no numbers."""
    size = torch.where(values.isfinite(), values, 0.0).abs_()
    return size.max() if values.numel() else size


@dataclass(frozen=True, slots=True, eq=False)
class _Beside:
    """The size of the largest number beside each number of a table of R rows and C channels.

    Attributes:
        values: In the shape of the numbers: the smaller of `row` and `channel`; `channel` where that does not vary.
        varies: (C,), which channels vary.
        row: (R, 1), the largest size of the varying channels, or infinity if there is one channel.
        channel: (C,), or infinity if there is one row.
    """

    values: Tensor
    varies: Tensor
    row: Tensor
    channel: Tensor

    def median(self) -> Tensor:
        """Return the median of the sizes of varying channels."""
        channel, least = self.channel[self.varies], self.row.amin()
        count = len(self.row) * len(channel)
        # Each size of a channel stands in R rows. Below the least row, the sizes of channels are those beside, so this
        # is the median of all of them, found among C numbers.
        middle = channel.kthvalue(-(-(count // 2 + 1) // len(self.row))).values
        if bool(middle <= least):
            return middle
        among = torch.minimum(self.row, channel)
        return among.flatten().kthvalue(count // 2 + 1).values


def _largest_beside(values: Tensor, bar: float, still: Tensor) -> _Beside:
    """Return the size of the largest number beside each; `values` has two axes or more, and numbers."""
    table = values.flatten(0, -2)
    least, greatest = table.aminmax(dim=0)
    if not bool((least.isfinite() & greatest.isfinite()).all()):
        finite = table.isfinite()
        least, greatest = (
            torch.where(finite, table, far).aminmax(dim=0)[end] for end, far in enumerate((torch.inf, -torch.inf))
        )
        table = torch.where(finite, table, 0.0)
    channel = table.abs().amax(0)
    varies = greatest - least > bar * channel if len(table) > 1 else ~still.flatten()
    if not varies.any():
        varies = torch.ones_like(varies)
    every = bool(varies.all())
    row = (table if every else torch.where(varies, table, 0.0)).abs().amax(1, keepdim=True)
    # One channel has no others beside it, and one row has no other rows.
    far = torch.full((), torch.inf, dtype=row.dtype, device=row.device)
    if len(table) == 1:
        beside = row.expand_as(table)
        beside = beside if every else torch.where(varies, beside, channel)
        return _Beside(beside.reshape(values.shape), varies, row, far.expand_as(channel))
    if table.shape[1] == 1:
        return _Beside(channel.expand_as(table).reshape(values.shape), varies, far.expand_as(row), channel)
    beside = torch.minimum(row, channel)
    beside = beside if every else torch.where(varies, beside, channel)
    return _Beside(beside.reshape(values.shape), varies, row, channel)


def any_moved(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> bool:
    """Return whether the outputs of two runs differ by more than rounding, or have different names.

    Args:
        before: Outputs of the first run by name.
        after: Outputs of the second run by name.
    """
    return before.keys() != after.keys() or any(bool(moved_entries(x, after[name]).any()) for name, x in before.items())


def position_axis(output: Tensor, batch: int, length: int) -> int | None:
    """Return the axis of positions of an output, or None if it has none.

    (B, n), (B, n, V) and a cache of keys (B, H, n, E) have one axis of n positions. Logits of rows and keys have two
    such axes, (B, H, n, n), so they give None.

    Example:
        >>> position_axis(torch.ones(2, 5, 9), 2, 5), position_axis(torch.ones(2, 4, 5, 3), 2, 5)
        (1, 2)
        >>> position_axis(torch.ones(2, 9), 2, 5), position_axis(-torch.ones(2, 4, 5, 5), 2, 5)
        (None, None)
    """
    if output.dim() < 2 or output.shape[0] != batch or is_logits(output, length):
        return None
    if output.shape[1] == length:
        return 1
    return 2 if output.dim() == 4 and output.shape[2] == length else None


def position_axes(outputs: Mapping[str, Tensor], batch: int, length: int) -> dict[str, int]:
    """Return the axes of positions of the outputs that have one.

    If some outputs have it as axis 1, those with it as axis 2 are left out: they are keys of a cache, or states with as
    many features as there are positions.

    Example:
        >>> position_axes({"0": torch.ones(2, 5, 9), "state": torch.ones(2, 4, 5, 3)}, 2, 5)
        {'0': 1}
    """
    axes = {name: axis for name, x in outputs.items() if (axis := position_axis(x, batch, length)) is not None}
    if not axes:  # these are then outputs of heads whose number of features equals the number of positions
        axes = {name: 2 for name, x in outputs.items() if x.shape[:1] == (batch,) and is_logits(x, length)}
    of_rows = {name: axis for name, axis in axes.items() if axis == 1}
    return of_rows or axes


def is_logits(tensor: Tensor, length: int) -> bool:
    """Return whether an output may hold unmasked attention logits (B, H, n, n) rather than attention weights.

    x-transformers returns them as `pre_softmax_attn`.

    Args:
        tensor: The output. Without negative numbers it is taken for weights.
        length: Number of positions n.
    """
    return tensor.dim() == 4 and tensor.shape[2:] == (length, length) and bool((tensor < 0).any())


def moved_positions(before: Tensor, after: Tensor, axis: int) -> Tensor:
    """Return which positions of each sample changed by more than rounding, as bool (B, n).

    Args:
        before: An output of the first run, with the batch on axis 0.
        after: The same output of the second run.
        axis: The axis of the n positions, at least 1; all other axes are reduced with `any`.
    """
    entries = moved_entries(before, after)
    others = [place for place in range(1, entries.dim()) if place != axis]
    return entries.any(dim=others) if others else entries
