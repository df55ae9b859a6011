"""ONNX's operators on shapes as torch's: what moves, cuts and joins, and what is picked by its number."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_layers import Result
from sqrtdk.graphs.onnx_step import Step


def reshape(step: Step) -> Tensor:
    """Other axes for the same values."""
    x, sizes = step.tensor(0), step.numbers(1) if step.given(1) else [int(n) for n in step.attribute("shape", [])]
    if not step.attribute("allowzero", 0):
        sizes = [x.shape[i] if size == 0 and i < x.dim() else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def given_axes(step: Step) -> list[int] | None:
    """Axes of an operator, as an input or as an attribute; None where it has none."""
    found = step.numbers(1) if step.given(1) else step.attribute("axes", None)
    return None if found is None else [int(axis) for axis in found]


def squeeze(step: Step) -> Tensor:
    """Without axes of one."""
    axes = given_axes(step)
    return step.tensor(0).squeeze() if axes is None else step.tensor(0).squeeze(tuple(axes))


def unsqueeze(step: Step) -> Tensor:
    """With more axes of one."""
    x, axes = step.tensor(0), given_axes(step) or []
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def flatten(step: Step) -> Tensor:
    """Two axes."""
    x, axis = step.tensor(0), int(step.attribute("axis", 1))
    return x.reshape(math.prod(x.shape[:axis]), -1)


def transpose(step: Step) -> Tensor:
    """Axes in another order."""
    x = step.tensor(0)
    return x.permute(tuple(step.attribute("perm", [*range(x.dim())][::-1])))


def expand(step: Step) -> Tensor:
    """Broadcast to a shape."""
    x = step.tensor(0)
    return x.expand(torch.broadcast_shapes(x.shape, tuple(step.numbers(1))))  # type: ignore[no-untyped-call]


def concat(step: Step) -> Tensor:
    """Tensors after one another."""
    axis = int(step.attribute("axis", 0))
    parts = [step.tensor(i) for i in range(step.count)]
    full = [part for part in parts if part.shape[axis]]  # without a cache that is empty
    return torch.cat(full, axis) if len(full) > 1 else (full or parts)[0]


def split(step: Step) -> Result:
    """Parts along an axis."""
    x, axis, count = step.tensor(0), int(step.attribute("axis", 0)), len(step.node.outputs)
    given = step.numbers(1) if step.given(1) else step.attribute("split", None)
    if given is None:
        most = -(-x.shape[axis] // count)
        given = [min(most, x.shape[axis] - most * i) for i in range(count)]
    return torch.split(x, [int(size) for size in given], axis)


def cut(step: Step) -> Tensor:
    """A part of each axis, in steps."""
    x = step.tensor(0)
    if step.given(1):
        starts, ends = step.numbers(1), step.numbers(2)
        axes = step.numbers(3) if step.given(3) else [*range(len(starts))]
        steps = step.numbers(4) if step.given(4) else [1] * len(starts)
    else:
        starts, ends = list(step.attribute("starts", [])), list(step.attribute("ends", []))
        axes, steps = list(step.attribute("axes", [*range(len(starts))])), [1] * len(starts)
    for start, end, axis, stride in zip(starts, ends, axes, steps, strict=True):
        size = x.shape[axis]
        if stride > 0:
            first, last, _ = slice(start, end).indices(size)  # torch warns of numbers far beyond an axis
            x = x[(slice(None),) * (axis % x.dim()) + (slice(first, max(first, last), stride),)]
        else:
            taken = range(size)[slice(start, None if end < -size else end, stride)]
            x = x.flip(axis) if len(taken) == size else x.index_select(axis, torch.tensor([*taken]).to(x.device))
    return x


def gather(step: Step) -> Tensor:
    """Elements by their numbers along an axis."""
    data = step.weight(0) if not step.known(1) else step.tensor(0)
    axis = int(step.attribute("axis", 0)) % max(data.dim(), 1)
    if step.known(1):
        numbers = step.numbers(1)
        shape = step.shape(1)
        if not shape:
            return data.select(axis, numbers[0])
        if len(numbers) == 1:
            at = numbers[0] % data.shape[axis]
            return data.narrow(axis, at, 1).reshape(*data.shape[:axis], *shape, *data.shape[axis + 1 :])
    indices = step.tensor(1)
    if data.dim() == 2 and axis == 0:
        return functional.embedding(indices, data)
    return data[(slice(None),) * axis + (indices,)]


def gather_nd(step: Step) -> Tensor:
    """Elements by their numbers along several axes."""
    if step.attribute("batch_dims", 0):
        raise UnsupportedError("GatherND with batch_dims")
    return step.tensor(0)[tuple(step.tensor(1).long().unbind(-1))]


def shape(step: Step) -> Tensor:
    """Sizes, as a tensor."""
    x = step.tensor(0)
    first, last = step.attribute("start", 0), step.attribute("end", x.dim())
    return torch.tensor([*x.shape][first:last], dtype=torch.int64, device=step.device)
