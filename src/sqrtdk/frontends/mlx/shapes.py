"""MLX's operations that move, pick, sort or place numbers, as torch operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sqrtdk.frontends.arrays import DTYPES_OF_BOTH, along, flat_index
from sqrtdk.frontends.mlx.arrays import dtype_name
from sqrtdk.frontends.mlx.nodes import Operation, Primitive, on_one
from sqrtdk.frontends.program import RunDtypes

_HELD_BITS = {"uint16": torch.int16, "uint32": torch.int32, "uint64": torch.int64}  # dtypes of the same bits


def _arange(numbers: RunDtypes, node: Primitive) -> Tensor:
    start, _, step = node.args
    dtype = numbers.dtype(node.gives[0].held)
    whole = not dtype.is_floating_point or all(float(x).is_integer() for x in (start, step))
    if whole:
        start, step = int(start), int(step)
    count = node.shape[0]
    if (start, step) == (0, 1):
        return torch.arange(count, dtype=dtype, device=numbers.device)
    if whole:
        return torch.arange(start, start + step * count, step, dtype=dtype, device=numbers.device)
    made: Tensor = start + step * torch.arange(count, dtype=dtype, device=numbers.device)
    return made


def _expand(numbers: RunDtypes, node: Primitive, x: Tensor, *_: Tensor) -> Tensor:
    return x if tuple(x.shape) == node.shape else x.expand(node.shape)


def _expand_dims(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    for at in sorted(node.args[0]):
        x = x.unsqueeze(at)
    return x


def _reshape(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    return x.reshape(node.shape)


def _as_type(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    held = DTYPES_OF_BOTH[dtype_name(node.args[0])]
    if x.is_complex() and not held.is_complex:
        x = x.real
    if x.is_floating_point() and not held.is_floating_point and not held.is_complex and held is not torch.bool:
        return x.to(torch.int64).to(held)
    return numbers.cast(x, held)


def _view(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    source, target = node.takes[0], node.gives[0]
    bits = x.to(_HELD_BITS.get(source.dtype, source.held)).contiguous()
    made = bits.view(_HELD_BITS.get(target.dtype, target.held))
    return made.to(target.held)


def _as_strided(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    shape, strides, offset = node.args
    return torch.as_strided(x.contiguous(), tuple(shape), tuple(strides), int(offset))


def _slice(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    """Return a slice, whose stops are those of its size; torch has no steps back, so these are picked one by one."""
    start, _, step = node.args
    steps = list(zip(map(int, start), map(int, step), node.shape, strict=True))
    x = x[tuple(slice(None) if s < 0 or (a == 0 and s == 1 and n == size) else slice(a, a + s * (n - 1) + 1, s)
                for (a, s, n), size in zip(steps, x.shape, strict=True))]  # fmt: skip
    for axis, (a, s, n) in enumerate(steps):
        if s < 0:
            x = x.index_select(axis, a + s * torch.arange(n, device=x.device))
    return x


# In the order of MLX's enum: max, min, sum, product, none.
_REDUCED = ("amax", "amin", "sum", "prod", "")


def _written(x: Tensor, index: Sequence[Tensor], update: Tensor, reduction: str) -> Tensor:
    """Return `x` with numbers written, or combined, at an index for each of its axes."""
    made = x.clone(memory_format=torch.contiguous_format)
    shape = torch.broadcast_shapes(*(i.shape for i in index))  # type: ignore[no-untyped-call]
    if not reduction or (reduction == "sum" and x.is_floating_point()):
        return made.index_put_(tuple(index), update.expand(shape), accumulate=bool(reduction))
    flat = flat_index(index, x).expand(shape)
    whole = made.dtype is torch.bool
    line = made.reshape(-1).to(torch.int64) if whole else made.reshape(-1)
    values = update.expand(shape).reshape(-1).to(line.dtype)
    return line.scatter_reduce(0, flat.reshape(-1), values, reduction).reshape(x.shape).to(made.dtype)


def _slice_update(numbers: RunDtypes, node: Primitive, x: Tensor, update: Tensor) -> Tensor:
    kind, start, stop, step = node.args if len(node.args) == 4 else (4, *node.args)
    shape = [max(0, math.ceil((b - a) / s)) for a, b, s in zip(start, stop, step, strict=True)]
    if not _REDUCED[int(kind)] and all(s > 0 for s in step):
        made = x.clone(memory_format=torch.contiguous_format)
        made[tuple(slice(int(a), int(b), int(s)) for a, b, s in zip(start, stop, step, strict=True))] = update
        return made
    index = [along(axis, a + s * torch.arange(n, device=x.device), x.dim())
             for axis, (a, s, n) in enumerate(zip(start, step, shape, strict=True))]  # fmt: skip
    return _written(x, index, update, _REDUCED[int(kind)])


def _dynamic_slice(numbers: RunDtypes, node: Primitive, x: Tensor, start: Tensor) -> Tensor:
    axes, sizes = node.args
    for at, axis in enumerate(axes):
        first = start.reshape(-1)[at].clamp(0, x.shape[axis] - sizes[axis])
        x = x.index_select(axis, first + torch.arange(sizes[axis], device=x.device))
    return x


def _dynamic_slice_update(numbers: RunDtypes, node: Primitive, x: Tensor, update: Tensor, start: Tensor) -> Tensor:
    (axes,) = node.args
    starts: list[Any] = [0] * x.dim()
    for at, axis in enumerate(axes):
        starts[axis] = start.reshape(-1)[at].clamp(0, x.shape[axis] - update.shape[axis])
    index = [along(axis, starts[axis] + torch.arange(n, device=x.device), x.dim())
             for axis, n in enumerate(update.shape)]  # fmt: skip
    return _written(x, index, update, "")


def _pad(numbers: RunDtypes, node: Primitive, x: Tensor, value: Any) -> Tensor:
    axes, low, high = node.args
    pads = [(0, 0)] * x.dim()
    for axis, before, after in zip(axes, low, high, strict=True):
        pads[axis] = int(before), int(after)
    fill = value.item() if isinstance(value, Tensor) else value
    return F.pad(x, [n for pair in reversed(pads) for n in pair], value=fill)


def _positive(index: Tensor, size: int, aval: Any) -> Tensor:
    """Return indices from the front: negative ones count from the end."""
    if aval.dtype.startswith("uint") or index.is_meta or not bool((index < 0).any()):
        return index.long()
    return torch.where(index < 0, index + size, index).long()


def _gather(numbers: RunDtypes, node: Primitive, x: Tensor, *indices: Tensor) -> Tensor:
    """Return slices of `x` that begin at the indices: (index shape, slice shape)."""
    axes, sizes = node.args
    index = [_positive(i, x.shape[axis], aval) for i, axis, aval in zip(indices, axes, node.takes[1:], strict=True)]
    whole = all(size == (1 if at in axes else x.shape[at]) for at, size in enumerate(sizes))
    if whole and tuple(axes) == (0,) and x.dim() == 2:
        return F.embedding(index[0], x).unsqueeze(index[0].dim())
    if whole and len(axes) == 1:
        rows = x.index_select(axes[0], index[0].reshape(-1)).movedim(axes[0], 0)
        return rows.reshape(node.shape)
    return x[_windows(x, axes, sizes, index)]


def _windows(x: Tensor, axes: Sequence[int], sizes: Sequence[int], index: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Return for each axis of `x` the index of each element of slices, of shape (index shape, slice shape)."""
    rank = index[0].dim() if index else 0
    made = []
    for axis, size in enumerate(sizes):
        line = torch.arange(size, device=x.device)
        line = line.reshape([1] * rank + [-1 if at == axis else 1 for at in range(x.dim())])
        if axis in axes:
            first = index[list(axes).index(axis)]
            line = line + first.reshape([*first.shape, *[1] * x.dim()])
        made.append(line)
    return tuple(torch.broadcast_tensors(*made))  # type: ignore[no-untyped-call]


def _scatter(numbers: RunDtypes, node: Primitive, x: Tensor, *rest: Tensor) -> Tensor:
    """Return `x` with slices written, or combined, at the indices; the updates are (index shape, slice shape)."""
    kind, axes = node.args
    *indices, update = rest
    takes = node.takes[1:-1]
    index = [_positive(i, x.shape[axis], aval) for i, axis, aval in zip(indices, axes, takes, strict=True)]
    sizes = update.shape[index[0].dim() if index else 0 :]
    return _written(x, _windows(x, axes, sizes, index), update, _REDUCED[int(kind)])


def _gather_axis(numbers: RunDtypes, node: Primitive, x: Tensor, index: Tensor) -> Tensor:
    (axis,) = node.args
    index = _positive(index, x.shape[axis], node.takes[1]).expand(node.shape)
    sizes = [x.shape[axis] if at == axis else n for at, n in enumerate(node.shape)]
    return torch.gather(x.expand(sizes), axis, index)


def _scatter_axis(numbers: RunDtypes, node: Primitive, x: Tensor, index: Tensor, update: Tensor) -> Tensor:
    kind, axis = node.args
    shape = torch.broadcast_shapes(index.shape, update.shape)  # type: ignore[no-untyped-call]
    index = _positive(index, x.shape[axis], node.takes[1]).expand(shape)
    made = x.clone(memory_format=torch.contiguous_format)
    update = update.expand(shape)
    return made.scatter_add(axis, index, update) if int(kind) == 0 else made.scatter(axis, index, update)


def _masked_scatter(numbers: RunDtypes, node: Primitive, x: Tensor, mask: Tensor, source: Tensor) -> Tensor:
    return x.masked_scatter(mask.expand(x.shape), source)


def _split(numbers: RunDtypes, node: Primitive, x: Tensor) -> Sequence[Tensor]:
    indices, axis = node.args
    return torch.tensor_split(x, [int(i) for i in indices], int(axis))


def _sort(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    return torch.sort(x, dim=int(node.args[-1]), stable=True).values


def _argsort(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    return torch.sort(x, dim=int(node.args[-1]), stable=True).indices


def _searched(numbers: RunDtypes, node: Primitive, a: Tensor, values: Tensor) -> Tensor:
    return torch.searchsorted(a.contiguous(), values.contiguous(), right=bool(node.args[0]))


def _full(numbers: RunDtypes, node: Primitive, value: Tensor) -> Tensor:
    return value.expand(node.shape)


def _count(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    axes, inverted, _ = node.args
    size = math.prod(x.shape[axis] for axis in axes)
    return torch.tensor(1 / size if inverted else size)


MLX_SHAPES: dict[str, Operation] = {
    "Arange": _arange, "Broadcast": _expand, "BroadcastAxes": _expand, "ExpandDims": _expand_dims,
    "Squeeze": lambda numbers, node, x: x.squeeze(tuple(node.args[0])), "Flatten": _reshape, "Unflatten": _reshape,
    "Reshape": _reshape, "Transpose": lambda numbers, node, x: x.permute(tuple(node.args[0])),
    "Concatenate": lambda numbers, node, *xs: torch.cat(xs, int(node.args[0])), "Split": _split, "Slice": _slice,
    "SliceUpdate": _slice_update, "DynamicSlice": _dynamic_slice, "DynamicSliceUpdate": _dynamic_slice_update,
    "AsType": _as_type, "View": _view, "AsStrided": _as_strided, "Pad": _pad, "Gather": _gather,
    "GatherAxis": _gather_axis, "Scatter": _scatter, "ScatterAxis": _scatter_axis, "MaskedScatter": _masked_scatter,
    "Sort": _sort, "ArgSort": _argsort, "Partition": _sort, "ArgPartition": _argsort, "SearchSorted": _searched,
    "Full": _full, "NumberOfElements": _count, "Copy": on_one(lambda x: x),
    "StopGradient": on_one(lambda x: x),
}  # fmt: skip

# What gives its first inputs as they are: orders of evaluation, derivatives of one's own.
UNCHANGED = frozenset({"Depends", "CustomTransforms"})
