"""ONNX's layers as torch's: norms, convolutions, weights of few bits, and what scatters, pads and sorts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_step import Step
from sqrtdk.tracing.watch.recorder import unseen

Result = Tensor | tuple[Tensor, ...]
Operation = Callable[[Step], Result]


def layer_norm(step: Step) -> Tensor:
    """Normalise over the last axes, with gain and shift."""
    x, axis = step.tensor(0), int(step.attribute("axis", -1))
    bias = step.tensor(2) if step.given(2) else None
    return functional.layer_norm(x, x.shape[axis:], step.weight(1), bias, float(step.attribute("epsilon", 1e-5)))


def rms_norm(step: Step) -> Tensor:
    """Divide by the root of the mean square over the last axes."""
    x, axis = step.tensor(0), int(step.attribute("axis", -1))
    return functional.rms_norm(x, x.shape[axis:], step.weight(1), float(step.attribute("epsilon", 1e-5)))


_PADS = {"constant": "constant", "reflect": "reflect", "edge": "replicate", "wrap": "circular"}


def pad(step: Step) -> Tensor:
    """Put a constant, or a tensor's own values, around it."""
    x = step.tensor(0)
    pads = step.numbers(1) if step.given(1) else [int(pad) for pad in step.attribute("pads", [])]
    axes = [axis % x.dim() for axis in step.numbers(3)] if step.given(3) else [*range(x.dim())]
    value = step.number(2) if step.given(2) else float(step.attribute("value", 0.0))
    mode = str(step.attribute("mode", "constant"))
    if mode not in _PADS:
        raise UnsupportedError(f"Pad of the mode {mode[:40]}")
    flat = [0] * 2 * x.dim()
    for i, axis in enumerate(axes):
        flat[2 * (x.dim() - 1 - axis) : 2 * (x.dim() - axis)] = [pads[i], pads[len(axes) + i]]
    if mode == "constant":
        return functional.pad(x, flat, value=value)
    for axis, (before, behind) in enumerate(zip(flat[-2::-2], flat[-1::-2], strict=True)):  # torch takes few axes
        if before or behind:
            alone = functional.pad(x.movedim(axis, -1).flatten(0, -2)[None], (before, behind), mode=_PADS[mode])
            moved = x.movedim(axis, -1)
            x = alone.reshape(*moved.shape[:-1], -1).movedim(-1, axis)
    return x


def resize(step: Step) -> Tensor:
    """Bring a tensor to other sizes."""
    x = step.tensor(0)
    sizes, axes = [*x.shape], [int(axis) % x.dim() for axis in step.attribute("axes", range(x.dim()))]
    policy = str(step.attribute("keep_aspect_ratio_policy", "stretch"))
    at = 1 if step.opset < 11 or step.node.op == "Upsample" else 2
    if policy != "stretch":
        raise UnsupportedError(f"Resize with keep_aspect_ratio_policy = {policy[:40]}")
    if step.given(3):
        wanted = step.numbers(3)
    elif step.given(at) or step.attribute("scales", None) is not None:
        factors = step.floats(at) if step.given(at) else step.attribute("scales", [])
        wanted = [int(x.shape[axis] * factor) for axis, factor in zip(axes, factors, strict=True)]
    else:
        raise UnsupportedError(f"{step.node.op} without sizes")
    for axis, size in zip(axes, wanted, strict=True):
        sizes[axis] = size
    how = _interpolation(step, x.dim() - 2)
    if step.device == "meta" or how is None or sizes[:2] != [*x.shape[:2]]:
        return torch.empty(sizes, dtype=x.dtype, device=x.device) * x.mean()  # where it lies does not matter to a shape
    mode, corners = how
    return functional.interpolate(x, sizes[2:], mode=mode, align_corners=corners)


def _interpolation(step: Step, axes: int) -> tuple[str, bool | None] | None:
    """The mode of resizing as torch names it, and whether corners are aligned; None if torch has no such mode."""
    old = step.opset < 11 or step.node.op == "Upsample"
    mode = str(step.attribute("mode", "nearest"))
    place = str(step.attribute("coordinate_transformation_mode", "asymmetric" if old else "half_pixel"))
    if mode == "nearest":
        return ("nearest" if place == "asymmetric" else "nearest-exact", None)
    name = {("linear", 1): "linear", ("linear", 2): "bilinear", ("linear", 3): "trilinear", ("cubic", 2): "bicubic"}
    if (mode, axes) not in name or place not in ("half_pixel", "pytorch_half_pixel", "align_corners"):
        return None
    return name[mode, axes], place == "align_corners"


def batch_norm(step: Step) -> Tensor:
    """Normalise by the mean and variance that the file holds."""
    x, gain, shift, mean, variance = (step.tensor(i) for i in range(5))
    epsilon = float(step.attribute("epsilon", 1e-5))
    return functional.batch_norm(x, mean, variance, gain, shift, False, 0.0, epsilon)


def dequantised(step: Step) -> Tensor:
    """Integers that the caller gives, as the numbers that they stand for; weights are worked out before the walk."""
    x, scale = step.tensor(0), step.tensor(1)
    zero = step.tensor(2) if step.given(2) else torch.zeros_like(scale)
    if step.attribute("block_size", 0):
        raise UnsupportedError("DequantizeLinear of computed integers in blocks")
    if scale.dim() == 1 and scale.numel() > 1:
        shape = [-1 if i == int(step.attribute("axis", 1)) % x.dim() else 1 for i in range(x.dim())]
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return (x.to(scale.dtype) - zero.to(scale.dtype)) * scale


def rounded(step: Step) -> Tensor:
    """What an activation is after it was quantised: on values rounded, out of a trace's sight.

    A scale that the file holds goes with its zero point; otherwise both are those of `DynamicQuantizeLinear`, whose
    range holds zero: 255 steps from the least to the largest.
    """
    x = step.tensor(0)
    if step.device == "meta":
        return x
    made = x.clone()
    with unseen():
        made.detach().numpy()[...] = _quantised(step, x.detach().double()).to(x.dtype).numpy()
    return made


def _quantised(step: Step, x: Tensor) -> Tensor:
    scale, zero = step.attribute("scale", None), step.attribute("zero", None)
    if step.attribute("fixed", False):
        if scale is None or scale.size > 1:
            raise UnsupportedError("QuantizeLinear by scales that are computed, or one a channel")
        kind = np.iinfo(np.uint8 if zero is None else zero.dtype)
        step_size, shift, least, most = float(scale), 0.0 if zero is None else float(zero), kind.min, kind.max
    else:
        low, high = min(0.0, float(x.min())), max(0.0, float(x.max()))
        step_size, least, most = float(np.float32(high - low) / np.float32(255)), 0, 255
        shift = min(255.0, max(0.0, float(np.rint(-low / step_size)))) if step_size else 0.0
    if not step_size:
        return x
    return ((x / step_size).round() + shift).clamp(least, most).sub(shift).mul(step_size)


def lp(step: Step) -> Tensor:
    """Divide by the length along an axis."""
    x, axis = step.tensor(0), int(step.attribute("axis", -1))
    return functional.normalize(x, float(step.attribute("p", 2)), axis)


def gather_elements(step: Step) -> Tensor:
    """Take elements by their numbers along an axis."""
    return step.tensor(0).gather(int(step.attribute("axis", 0)), step.tensor(1).long())


_REDUCED = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


def scatter(step: Step) -> Tensor:
    """Write elements by their numbers along an axis, or add them to what is there."""
    x, indices, updates = step.tensor(0), step.tensor(1).long(), step.tensor(2)
    axis, how = int(step.attribute("axis", 0)), str(step.attribute("reduction", "none"))
    indices = torch.where(indices < 0, indices + x.shape[axis], indices)
    return x.scatter(axis, indices, updates) if how == "none" else x.scatter_reduce(axis, indices, updates, _of(how))


def scatter_nd(step: Step) -> Tensor:
    """Write elements by their numbers along several axes, or add them to what is there."""
    x, indices, how = step.tensor(0), step.tensor(1).long(), str(step.attribute("reduction", "none"))
    if how not in ("none", "add"):
        raise UnsupportedError(f"ScatterND with reduction = {how[:40]}")
    return x.index_put(tuple(indices.unbind(-1)), step.tensor(2), accumulate=how == "add")


def _of(reduction: str) -> str:
    if reduction not in _REDUCED:
        raise UnsupportedError(f"ScatterElements with reduction = {reduction[:40]}")
    return _REDUCED[reduction]


def top_k(step: Step) -> Result:
    """The largest along an axis, and their numbers."""
    axis, largest = int(step.attribute("axis", -1)), bool(step.attribute("largest", 1))
    values, indices = step.tensor(0).topk(step.numbers(1)[0], axis, largest)
    return values, indices


def one_hot(step: Step) -> Tensor:
    """Numbers as rows of one value, and another at the number."""
    depth, axis = step.numbers(1)[0], int(step.attribute("axis", -1))
    rows = functional.one_hot(step.tensor(0).long() % depth, depth).to(step.dtype(2))
    rows = rows if axis == -1 else rows.movedim(-1, axis)
    if not step.known(2):
        return rows
    off, on = (step.numbers_of[step.node.inputs[2]].flatten()[i].item() for i in (0, 1))
    return rows if (off, on) == (0, 1) else rows * (on - off) + off


def trilu(step: Step) -> Tensor:
    """A triangle of a matrix."""
    diagonal = step.numbers(1)[0] if step.given(1) else 0
    return step.tensor(0).triu(diagonal) if step.attribute("upper", 1) else step.tensor(0).tril(diagonal)


def cumsum(step: Step) -> Tensor:
    """Sum up along an axis, from either end."""
    x, axis, back = step.tensor(0), step.numbers(1)[0], bool(step.attribute("reverse", 0))
    made = x.flip(axis).cumsum(axis).flip(axis) if back else x.cumsum(axis)
    return (made - x if step.attribute("exclusive", 0) else made).to(x.dtype)


def instance_norm(step: Step) -> Tensor:
    """Normalise each channel of each sample."""
    return functional.instance_norm(
        step.tensor(0), weight=step.weight(1), bias=step.tensor(2), eps=float(step.attribute("epsilon", 1e-5))
    )


def group_norm(step: Step) -> Tensor:
    """Normalise groups of channels of each sample; until opset 21 with one gain a group."""
    x, gain, shift = step.tensor(0), step.weight(1), step.tensor(2)
    groups, epsilon = int(step.attribute("num_groups", 1)), float(step.attribute("epsilon", 1e-5))
    if gain.shape[0] == x.shape[1]:
        return functional.group_norm(x, groups, gain, shift, epsilon)
    made = functional.group_norm(x, groups, None, None, epsilon)
    each = [part.repeat_interleave(x.shape[1] // groups).reshape(-1, *[1] * (x.dim() - 2)) for part in (gain, shift)]
    return made * each[0] + each[1]


def to_space(step: Step) -> Tensor:
    """Channels as blocks of pixels."""
    x, size = step.tensor(0), int(step.attribute("blocksize", 1))
    batch, channels, height, width = x.shape
    if str(step.attribute("mode", "DCR")) == "CRD":
        parts = x.reshape(batch, -1, size, size, height, width).permute(0, 1, 4, 2, 5, 3)
    else:
        parts = x.reshape(batch, size, size, -1, height, width).permute(0, 3, 4, 1, 5, 2)
    return parts.reshape(batch, channels // size**2, height * size, width * size)


def to_depth(step: Step) -> Tensor:
    """Blocks of pixels as channels."""
    x, size = step.tensor(0), int(step.attribute("blocksize", 1))
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // size, size, width // size, size).permute(0, 3, 5, 1, 2, 4)
    return parts.reshape(batch, channels * size**2, height // size, width // size)
