"""Views of ggml, which are strides into memory, as reshape, narrow and permute.

A trace follows these three, and does not follow `as_strided`. With `ne = (32, 2, 24)` and strides of 1, 64 and 128
elements at offset 32, a view of a tensor of 24 rows and 128 columns is:

    x.reshape(24, 2, 2, 32)  rows, blocks of 64, blocks of 32, elements
     .narrow(...)            all rows, both blocks of 64, the second block of 32
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sqrtdk.frontends.program import RunDtypes

Shape = tuple[int, ...]


def torch_shape(ne: Sequence[int], batched: bool) -> Shape:
    """Return the shape that a tensor of ggml has here.

    One that depends on the token ids has a first axis for rows of ids, which ggml's graph of one row lacks, and its
    third axis only if ggml has it. All others have no axes of size 1 in front.

    Example:
        >>> torch_shape((64, 24, 1, 1), True), torch_shape((32, 4, 24, 1), True), torch_shape((64, 1, 1, 1), False)
        ((-1, 24, 64), (-1, 24, 4, 32), (64,))
    """
    shape = tuple(ne[::-1])
    if batched:
        return (-1, *(shape[1:] if shape[1] > 1 else shape[2:]))
    first = next((at for at, size in enumerate(shape) if size > 1), 3)
    return shape[first:]


@dataclass(frozen=True, slots=True)
class View:
    """How a view is taken of the contiguous memory of a tensor, row by row of ids.

    Attributes:
        blocks: memory as nested blocks: their counts, the first one taken, and how many; the outermost first.
        order: where each axis of the result is among these blocks; None for an axis of size 1.
        shape: shape of the result; its first size is -1 if the tensor is batched.
        batched: whether the tensor has a first axis for rows of ids.
    """

    blocks: tuple[tuple[int, int, int], ...]
    order: tuple[int | None, ...]
    shape: Shape
    batched: bool

    def __call__(self, numbers: RunDtypes, x: Tensor) -> Tensor:
        """Return the view of a tensor."""
        lead = int(self.batched)
        counts = [count for count, _, _ in self.blocks]
        cut = any(count != taken for count, _, taken in self.blocks)
        axes = [at for at in self.order if at is not None]
        if not cut and axes == sorted(axes):
            return _reshaped(x, self.shape)
        y = _reshaped(x, (-1, *counts) if lead else tuple(counts))
        for at, (count, start, taken) in enumerate(self.blocks):
            if taken != count:
                y = y.narrow(at + lead, start, taken)
        rest = [at for at in range(len(counts)) if at not in axes]  # of size 1
        order = [*range(lead), *(at + lead for at in (*axes, *rest))]
        if order != sorted(order):
            y = y.permute(order)
        return _reshaped(y, self.shape)


def _reshaped(x: Tensor, shape: Shape) -> Tensor:
    same = len(shape) == x.dim() and all(a in (b, -1) for a, b in zip(shape, x.shape, strict=True))
    return x if same else x.reshape(shape)


def view_of(
    total: int, offset: int, sizes: Sequence[int], strides: Sequence[int], shape: Shape, batched: bool
) -> View | None:
    """Return how a strided view is taken of contiguous memory, or None if it is none of nested blocks.

    Args:
        total: Elements in the memory.
        offset: Index of the first element.
        sizes: Of the view's axes, the slowest in its shape first.
        strides: Elements between neighbours along each axis.
        shape: Shape of the result.
        batched: Whether the tensor has a first axis for rows of ids.

    Example:
        >>> import torch
        >>> view = view_of(12, 2, (3, 2), (4, 1), (3, 2), False)
        >>> view(RunDtypes(), torch.arange(12)).tolist()
        [[2, 3], [6, 7], [10, 11]]
    """
    axes = [at for at, size in enumerate(sizes) if size > 1]
    blocks: list[tuple[int, int, int]] = []
    places: dict[int, int] = {}
    block, rest = total, offset
    for at in sorted(axes, key=lambda at: -strides[at]):
        step = strides[at]
        if step <= 0 or block % step:
            return None
        start, rest = divmod(rest, step)
        if start + sizes[at] > block // step:
            return None
        places[at] = len(blocks)
        blocks.append((block // step, start, sizes[at]))
        block = step
    if block > 1:
        blocks.append((block, rest, 1))
    if not blocks:
        blocks.append((total, offset, 1))
    return View(tuple(blocks), tuple(places.get(at) for at in range(len(sizes))), shape, batched)


def elements_of(offset: int, ne: Sequence[int], nb: Sequence[int], item: int) -> NDArray[np.int64]:
    """Return the index in memory of each element of a view, with the slowest axis first.

    Args:
        offset: Bytes from the begin of the memory.
        ne: Sizes, the fastest axis first.
        nb: Strides in bytes.
        item: Bytes of one element.
    """
    made: NDArray[np.int64] = np.full(tuple(ne[::-1]), offset // item, np.int64)
    for axis, (size, stride) in enumerate(zip(ne[::-1], nb[::-1], strict=True)):
        steps = np.arange(size, dtype=np.int64) * (stride // item)
        made += steps.reshape([-1 if at == axis else 1 for at in range(len(ne))])
    return made


def strides_of(elements: NDArray[np.int64]) -> tuple[int, Shape] | None:
    """Return offset and strides of a view by the indices of its elements, or None if these are no grid."""
    if not elements.size:
        return None
    first = int(elements.flat[0])
    strides = []
    for axis, size in enumerate(elements.shape):
        here = elements.take(1, axis).flat[0] - first if size > 1 else 0
        strides.append(int(here))
    grid = np.full(elements.shape, first, np.int64)
    for axis, (size, stride) in enumerate(zip(elements.shape, strides, strict=True)):
        shape = [-1 if at == axis else 1 for at in range(elements.ndim)]
        grid += (np.arange(size, dtype=np.int64) * stride).reshape(shape)
    return (first, tuple(strides)) if np.array_equal(grid, elements) else None
