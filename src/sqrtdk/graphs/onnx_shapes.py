"""ONNX's shape operators in torch: reshaping, slicing and joining, and reading or writing elements by index."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_step import OnnxStep, Operation, Result, of_torch, torch_dtype

_PADS = {"reflect": "reflect", "edge": "replicate", "wrap": "circular"}
_SCATTER_REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def _reshape(step: OnnxStep) -> Tensor:
    x, sizes = step.tensor(0), step.listed(1, "shape", [])
    if not step.attribute("allowzero", 0):  # a size of 0 then keeps the input's size
        sizes = [x.shape[i] if size == 0 and i < x.dim() else size for i, size in enumerate(sizes)]
    return x.reshape(sizes)


def _squeeze(step: OnnxStep) -> Tensor:
    axes = step.listed(1, "axes")
    return step.tensor(0).squeeze() if axes is None else step.tensor(0).squeeze(tuple(axes))


def _unsqueeze(step: OnnxStep) -> Tensor:
    x, axes = step.tensor(0), step.listed(1, "axes", [])
    rank = x.dim() + len(axes)
    for axis in sorted(axis % rank for axis in axes):  # ascending, because axes count in the result
        x = x.unsqueeze(axis)
    return x


def _concat(step: OnnxStep) -> Tensor:
    axis, parts = step.attribute("axis", 0), step.tensors()
    full = [part for part in parts if part.shape[axis]]  # an empty cache is left out: cat([past, k]) is then k itself
    return torch.cat(full, axis) if len(full) > 1 else (full or parts)[0]


def _split(step: OnnxStep) -> Result:
    x, axis, count = step.tensor(0), step.attribute("axis", 0), len(step.node.outputs)
    most = -(-x.shape[axis] // count)  # without sizes the pieces are equal, and the last may be smaller
    equal = [min(most, x.shape[axis] - most * i) for i in range(count)]
    return torch.split(x, step.listed(1, "split", equal), axis)


def _slice(step: OnnxStep) -> Tensor:
    x, starts, ends = step.tensor(0), step.listed(1, "starts", []), step.listed(2, "ends", [])
    axes = step.listed(3, "axes", range(len(starts)))
    strides = step.numbers(4) if step.given(4) else [1] * len(starts)
    for start, end, axis, stride in zip(starts, ends, axes, strides, strict=True):
        size = x.shape[axis]
        if stride > 0:
            first, last, _ = slice(start, end).indices(size)  # clipped: torch warns of bounds far beyond an axis
            x = x[(slice(None),) * (axis % x.dim()) + (slice(first, max(first, last), stride),)]
        else:  # torch has no negative strides: x[::-1] is a flip
            taken = range(size)[slice(start, None if end < -size else end, stride)]
            x = x.flip(axis) if len(taken) == size else x.index_select(axis, torch.tensor([*taken]).to(x.device))
    return x


def _to_space(x: Tensor, size: int, mode: str) -> Tensor:
    return functional.pixel_shuffle(_swapped(x, size**2, -1) if _depth_first(mode) else x, size)


def _to_depth(x: Tensor, size: int, mode: str) -> Tensor:
    x = functional.pixel_unshuffle(x, size)
    return _swapped(x, -1, size**2) if _depth_first(mode) else x


def _depth_first(mode: str) -> bool:
    """Return whether the position in a block comes before the channels, unlike in torch's pixel_shuffle."""
    if mode not in ("DCR", "CRD"):
        raise UnsupportedError(f"blocks of pixels of the mode {mode[:40]}")
    return mode == "DCR"


def _swapped(x: Tensor, first: int, second: int) -> Tensor:
    return x.reshape(x.shape[0], first, second, *x.shape[2:]).transpose(1, 2).flatten(1, 2)


def _pad(step: OnnxStep) -> Tensor:
    """Return the result of ONNX's Pad."""
    x, pads = step.tensor(0), step.listed(1, "pads", [])
    axes = [axis % x.dim() for axis in step.numbers(3)] if step.given(3) else [*range(x.dim())]
    value = step.numbers(2)[0] if step.given(2) else step.attribute("value", 0.0)
    mode = step.attribute("mode", "constant")
    ends = {axis: (pads[i], pads[len(axes) + i]) for i, axis in enumerate(axes)}
    if mode == "constant":
        flat = [end for axis in reversed(range(x.dim())) for end in ends.get(axis, (0, 0))]
        return functional.pad(x, flat, value=value)
    if mode not in _PADS:
        raise UnsupportedError(f"Pad of the mode {mode[:40]}")
    for axis, both in ends.items():  # one axis at a time: torch pads few axes in these modes
        if any(both):
            moved = x.movedim(axis, -1)
            alone = functional.pad(moved.flatten(0, -2)[None], both, mode=_PADS[mode])
            x = alone.reshape(*moved.shape[:-1], -1).movedim(-1, axis)
    return x


# -- picked or written by number ---------------------------------------------------------------------------------------


def _gather(step: OnnxStep) -> Tensor:
    data, indices = step.tensor(0), step.tensor(1)
    axis = step.attribute("axis", 0) % max(data.dim(), 1)
    # A known index becomes a view (x[:, 3]), which a trace follows; a lookup of computed indices is opaque.
    if step.known(1) and not indices.dim():
        return data.select(axis, step.numbers(1)[0])
    if step.known(1) and indices.numel() == 1:
        at = step.numbers(1)[0] % data.shape[axis]
        return data.narrow(axis, at, 1).reshape(*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :])
    if data.dim() == 2 and axis == 0:
        return functional.embedding(indices, data)
    return data[(slice(None),) * axis + (indices,)]


def _from_start(indices: Tensor, size: int) -> Tensor:
    """Return indices with the negative ones, which count from the end, made positive."""
    return torch.where(indices < 0, indices + size, indices).long()


def _scatter(x: Tensor, indices: Tensor, updates: Tensor, axis: int, how: str) -> Tensor:
    indices = _from_start(indices, x.shape[axis])
    if how == "none":
        return x.scatter(axis, indices, updates)
    if how not in _SCATTER_REDUCTIONS:
        raise UnsupportedError(f"ScatterElements with reduction = {how[:40]}")
    return x.scatter_reduce(axis, indices, updates, _SCATTER_REDUCTIONS[how])


def _scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, how: str) -> Tensor:
    if how not in ("none", "add"):
        raise UnsupportedError(f"ScatterND with reduction = {how[:40]}")
    return x.index_put(tuple(indices.long().unbind(-1)), updates, accumulate=how == "add")


def _top_k(step: OnnxStep) -> Result:
    axis, largest = step.attribute("axis", -1), bool(step.attribute("largest", 1))
    values, indices = step.tensor(0).topk(step.numbers(1)[0], axis, largest)
    return values, indices


def _one_hot(step: OnnxStep) -> Tensor:
    depth, axis, at = int(step.numbers(1)[0]), step.attribute("axis", -1), step.tensor(0)
    rows = _from_start(at, depth)[..., None] == torch.arange(depth, device=at.device)
    rows = (rows if axis == -1 else rows.movedim(-1, axis)).to(step.tensor(2).dtype)
    off, on = step.numbers(2) if step.known(2) or step.device != "meta" else (0, 1)
    return rows if (off, on) == (0, 1) else rows * (on - off) + off


def _trilu(step: OnnxStep) -> Tensor:
    diagonal = step.numbers(1)[0] if step.given(1) else 0
    return step.tensor(0).triu(diagonal) if step.attribute("upper", 1) else step.tensor(0).tril(diagonal)


def _cumsum(step: OnnxStep) -> Tensor:
    x, axis = step.tensor(0), step.numbers(1)[0]
    made = x.flip(axis).cumsum(axis).flip(axis) if step.attribute("reverse", 0) else x.cumsum(axis)
    return (made - x if step.attribute("exclusive", 0) else made).to(x.dtype)


def _shape(step: OnnxStep) -> Tensor:
    shape = step.tensor(0).shape[step.attribute("start", 0) : step.attribute("end", None)]
    return torch.tensor(shape, dtype=torch.int64, device=step.device)


def _random(step: OnnxStep) -> Tensor:
    """Return a tensor of the shape of random numbers; which numbers a run draws is not known."""
    if step.device != "meta":
        raise UnsupportedError(f"{step.node.op}, whose numbers every run draws anew")
    drawn = step.attribute("dtype", None)
    for name in ("mean", "scale", "low", "high", "seed"):
        step.attribute(name, None)
    if step.node.op == "Multinomial":
        shape, default = [step.tensor(0).shape[0], step.attribute("sample_size", 1)], torch.int32
    elif step.node.op in ("RandomNormal", "RandomUniform"):
        shape, default = step.attribute("shape", []), torch.float32
    else:
        shape, default = [*step.tensor(0).shape], step.tensor(0).dtype
    return torch.empty(shape, dtype=default if drawn is None else torch_dtype(drawn), device=step.device)


RANDOM_NODES = ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
SHAPES: dict[str, Operation] = {
    **dict.fromkeys(RANDOM_NODES, _random),
    "Concat": _concat,
    "CumSum": _cumsum,
    "DepthToSpace": of_torch(_to_space, blocksize=1, mode="DCR"),
    "Expand": lambda step: step.tensor(0).expand(torch.broadcast_shapes(step.tensor(0).shape, (*step.numbers(1),))),  # type: ignore[no-untyped-call]
    "Flatten": of_torch(lambda x, axis: x.reshape(math.prod(x.shape[:axis]), -1), axis=1),
    "Gather": _gather,
    "GatherElements": of_torch(lambda x, at, axis: x.gather(axis, _from_start(at, x.shape[axis])), 2, axis=0),
    "GatherND": of_torch(lambda x, at: x[tuple(at.long().unbind(-1))], 2),
    "OneHot": _one_hot,
    "Pad": _pad,
    "Reshape": _reshape,
    "ScatterElements": of_torch(_scatter, 3, axis=0, reduction="none"),
    "ScatterND": of_torch(_scatter_nd, 3, reduction="none"),
    "Shape": _shape,
    "Size": lambda step: torch.tensor(step.tensor(0).numel(), device=step.device),
    "Slice": _slice,
    "SpaceToDepth": of_torch(_to_depth, blocksize=1, mode="DCR"),
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": lambda step: step.tensor(0).repeat(step.numbers(1)),
    "TopK": _top_k,
    "Transpose": lambda step: step.tensor(0).permute(step.attribute("perm", [*range(step.tensor(0).dim())][::-1])),
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
}
