"""ONNX's operators on shapes as torch's: what moves, cuts and joins, and what is picked or written by its number."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_step import Result, Step

_PADS = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
_REDUCED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def reshape(step: Step) -> Tensor:
    """Other axes for the same values."""
    x, sizes = step.tensor(0), step.listed(1, "shape", [])
    if not step.attribute("allowzero", 0):
        sizes = [x.shape[i] if size == 0 and i < x.dim() else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def squeeze(step: Step) -> Tensor:
    """Without axes of one."""
    axes = step.listed(1, "axes")
    return step.tensor(0).squeeze() if axes is None else step.tensor(0).squeeze(tuple(axes))


def unsqueeze(step: Step) -> Tensor:
    """With more axes of one."""
    x, axes = step.tensor(0), step.listed(1, "axes", [])
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def expand(step: Step) -> Tensor:
    """Broadcast to a shape."""
    x = step.tensor(0)
    return x.expand(torch.broadcast_shapes(x.shape, tuple(step.numbers(1))))  # type: ignore[no-untyped-call]


def concat(step: Step) -> Tensor:
    """Tensors after one another."""
    axis = step.attribute("axis", 0)
    parts = [step.tensor(i) for i in range(len(step.inputs))]
    full = [part for part in parts if part.shape[axis]]  # without a cache that is empty
    return torch.cat(full, axis) if len(full) > 1 else (full or parts)[0]


def split(step: Step) -> Result:
    """Parts along an axis."""
    x, axis, count = step.tensor(0), step.attribute("axis", 0), len(step.node.outputs)
    most = -(-x.shape[axis] // count)
    equal = [min(most, x.shape[axis] - most * i) for i in range(count)]
    return torch.split(x, step.listed(1, "split", equal), axis)


def cut(step: Step) -> Tensor:
    """A part of each axis, in steps."""
    x, starts, ends = step.tensor(0), step.listed(1, "starts", []), step.listed(2, "ends", [])
    axes = step.listed(3, "axes", range(len(starts)))
    strides = step.numbers(4) if step.given(4) else [1] * len(starts)
    for start, end, axis, stride in zip(starts, ends, axes, strides, strict=True):
        size = x.shape[axis]
        if stride > 0:
            first, last, _ = slice(start, end).indices(size)  # torch warns of numbers far beyond an axis
            x = x[(slice(None),) * (axis % x.dim()) + (slice(first, max(first, last), stride),)]
        else:
            taken = range(size)[slice(start, None if end < -size else end, stride)]
            x = x.flip(axis) if len(taken) == size else x.index_select(axis, torch.tensor([*taken]).to(x.device))
    return x


def to_space(step: Step) -> Tensor:
    """Channels as blocks of pixels."""
    x, size = step.tensor(0), step.attribute("blocksize", 1)
    if step.attribute("mode", "DCR") == "DCR":
        x = x.reshape(x.shape[0], size**2, -1, *x.shape[2:]).transpose(1, 2).flatten(1, 2)
    return functional.pixel_shuffle(x, size)


def to_depth(step: Step) -> Tensor:
    """Blocks of pixels as channels."""
    size = step.attribute("blocksize", 1)
    x = functional.pixel_unshuffle(step.tensor(0), size)
    return x.reshape(x.shape[0], -1, size**2, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


def pad(step: Step) -> Tensor:
    """Put a constant, or a tensor's own values, around it."""
    x, pads = step.tensor(0), step.listed(1, "pads", [])
    axes = [axis % x.dim() for axis in step.numbers(3)] if step.given(3) else [*range(x.dim())]
    value = step.numbers(2)[0] if step.given(2) else step.attribute("value", 0.0)
    mode = step.attribute("mode", "constant")
    if mode != "constant" and mode not in _PADS:
        raise UnsupportedError(f"Pad of the mode {mode[:40]}")
    ends = {axis: (pads[i], pads[len(axes) + i]) for i, axis in enumerate(axes)}
    if mode == "constant":
        return functional.pad(
            x, [end for axis in reversed(range(x.dim())) for end in ends.get(axis, (0, 0))], value=value
        )
    for axis, both in ends.items():  # torch takes few axes
        if any(both):
            moved = x.movedim(axis, -1)
            alone = functional.pad(moved.flatten(0, -2)[None], both, mode=_PADS[mode])
            x = alone.reshape(*moved.shape[:-1], -1).movedim(-1, axis)
    return x


# -- picked or written by number ---------------------------------------------------------------------------------------


def gather(step: Step) -> Tensor:
    """Elements by their numbers along an axis."""
    data, indices = step.tensor(0), step.tensor(1)
    axis = step.attribute("axis", 0) % max(data.dim(), 1)
    if step.known(1) and not indices.dim():
        return data.select(axis, step.numbers(1)[0])
    if step.known(1) and indices.numel() == 1:
        at = step.numbers(1)[0] % data.shape[axis]
        return data.narrow(axis, at, 1).reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    if data.dim() == 2 and axis == 0:
        return functional.embedding(indices, data)
    return data[(slice(None),) * axis + (indices,)]


def gather_nd(step: Step) -> Tensor:
    """Elements by their numbers along several axes."""
    if step.attribute("batch_dims", 0):
        raise UnsupportedError("GatherND with batch_dims")
    return step.tensor(0)[tuple(step.tensor(1).long().unbind(-1))]


def scatter(step: Step) -> Tensor:
    """Write elements by their numbers along an axis, or add them to what is there."""
    x, indices, updates = step.tensor(0), step.tensor(1).long(), step.tensor(2)
    axis, how = step.attribute("axis", 0), step.attribute("reduction", "none")
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    if how == "none":
        return x.scatter(axis, indices, updates)
    if how not in _REDUCED:
        raise UnsupportedError(f"ScatterElements with reduction = {how[:40]}")
    return x.scatter_reduce(axis, indices, updates, _REDUCED[how])


def scatter_nd(step: Step) -> Tensor:
    """Write elements by their numbers along several axes, or add them to what is there."""
    x, indices, how = step.tensor(0), step.tensor(1).long(), step.attribute("reduction", "none")
    if how not in ("none", "add"):
        raise UnsupportedError(f"ScatterND with reduction = {how[:40]}")
    return x.index_put(tuple(indices.unbind(-1)), step.tensor(2), accumulate=how == "add")


def top_k(step: Step) -> Result:
    """The largest along an axis, and their numbers."""
    values, indices = step.tensor(0).topk(
        step.numbers(1)[0], step.attribute("axis", -1), bool(step.attribute("largest", 1))
    )
    return values, indices


def one_hot(step: Step) -> Tensor:
    """Numbers as rows of one value, and another at the number."""
    depth, axis = step.numbers(1)[0], step.attribute("axis", -1)
    rows = functional.one_hot(step.tensor(0).long() % depth, depth).to(step.tensor(2).dtype)
    rows = rows if axis == -1 else rows.movedim(-1, axis)
    off, on = step.numbers(2) if step.known(2) else (0, 1)
    return rows if (off, on) == (0, 1) else rows * (on - off) + off


def trilu(step: Step) -> Tensor:
    """A triangle of a matrix."""
    diagonal = step.numbers(1)[0] if step.given(1) else 0
    return step.tensor(0).triu(diagonal) if step.attribute("upper", 1) else step.tensor(0).tril(diagonal)


def cumsum(step: Step) -> Tensor:
    """Sum up along an axis, from either end."""
    x, axis = step.tensor(0), step.numbers(1)[0]
    made = x.flip(axis).cumsum(axis).flip(axis) if step.attribute("reverse", 0) else x.cumsum(axis)
    return (made - x if step.attribute("exclusive", 0) else made).to(x.dtype)
