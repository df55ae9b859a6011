"""ONNX's layers in torch: products, norms, convolutions, pools, resizing, and quantised numbers.

Padding is applied with `functional.pad` before a window moves. torch's own arguments can't express everything that ONNX
allows: different padding at the two ends, `auto_pad`, or a last window that is not full.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_step import OnnxStep, Operation, of_torch
from sqrtdk.tracing.tape.recorder import unseen

_MAX_PADS = 2**20
_CONVOLVE: Any = (functional.conv1d, functional.conv2d, functional.conv3d)
_SPREAD: Any = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_MAX_POOLS: Any = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)
_RESIZED = {("linear", 3): "linear", ("linear", 4): "bilinear", ("linear", 5): "trilinear", ("cubic", 4): "bicubic"}
# Coordinates in the input axis of length n for the elements `at` of the output axis of length m = n factor.
_RESIZE_COORDINATES: dict[str, Callable[[Tensor, float, int, int], Tensor]] = {
    "half_pixel": lambda at, factor, n, m: (at + 0.5) / factor - 0.5,
    "half_pixel_symmetric": lambda at, factor, n, m: n / 2 * (1 - m / (n * factor)) + (at + 0.5) / factor - 0.5,
    "pytorch_half_pixel": lambda at, factor, n, m: (at + 0.5) / factor - 0.5 if m > 1 else 0 * at,
    "align_corners": lambda at, factor, n, m: at * (n - 1) / (m - 1) if m > 1 else 0 * at,
    "asymmetric": lambda at, factor, n, m: at / factor,
}
_NEAREST: dict[str, Callable[[Tensor], Tensor]] = {
    "round_prefer_floor": lambda at: (at - 0.5).ceil(),
    "round_prefer_ceil": lambda at: (at + 0.5).floor(),
    "floor": torch.floor,
    "ceil": torch.ceil,
}


def product(step: OnnxStep) -> Tensor:
    """Return alpha A B + beta C, with A and B transposed if the node says so.

    It serves MatMul, Gemm, and onnxruntime's fused variants of both.
    """
    sides = []
    for index, side in enumerate("AB"):
        x = step.tensor(index)
        x = x.movedim(-2, 0) if x.dim() > 2 and step.attribute(f"transBatch{side}", 0) else x
        sides.append(x.mT if step.attribute(f"trans{side}", 0) else x)
    alpha, beta, bias = step.attribute("alpha", 1.0), step.attribute("beta", 1.0), step.optional(2)
    made = sides[0] @ sides[1]
    made = made if alpha == 1.0 else made * alpha
    return made if bias is None else made + (bias if beta == 1.0 else bias * beta)


def _group_norm(x: Tensor, gain: Tensor, shift: Tensor, groups: int, epsilon: float) -> Tensor:
    """Return the group norm. Before opset 21 there is one gain per group, which is repeated for its channels."""
    gain, shift = (part.repeat_interleave(x.shape[1] // part.shape[0]) for part in (gain, shift))
    return functional.group_norm(x, groups, gain, shift, epsilon)


# -- windows -----------------------------------------------------------------------------------------------------------


def _listed(step: OnnxStep, name: str, rank: int, default: int) -> tuple[int, ...]:
    found = tuple(step.attribute(name, [default] * rank))
    if len(found) != rank:
        raise UnsupportedError(f"{step.node.op} with {name} of {len(found)} numbers on {rank} axes")
    return found


def _pads(step: OnnxStep, rank: int) -> tuple[str, list[int]]:
    """Return the mode `auto_pad` and the explicit padding, which is all zeros in the automatic modes."""
    auto, pads = step.attribute("auto_pad", "NOTSET") or "NOTSET", [*step.attribute("pads", [0] * 2 * rank)]
    if auto not in ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"):
        raise UnsupportedError(f"{step.node.op} with auto_pad = {auto[:40]}")
    return auto, pads if auto == "NOTSET" else [0] * 2 * rank


def _padded(
    step: OnnxStep, x: Tensor, size: tuple[int, ...], value: float, beyond: float | None = None
) -> tuple[Tensor, dict[str, tuple[int, ...]]]:
    """Return the padded tensor, with `auto_pad` resolved, and the stride and dilation of the window.

    Padding has the value `value`. With `ceil_mode` the last window may reach beyond it, over elements of the value
    `beyond`, or `value` if that is None.
    """
    rank = x.dim() - 2
    if not 1 <= rank <= 3 or len(size) != rank or min(size) < 1:
        raise UnsupportedError(f"{step.node.op} with a window {[*size]} on {rank} axes")
    strides, dilations = _listed(step, "strides", rank, 1), _listed(step, "dilations", rank, 1)
    (auto, pads), rounds_up = _pads(step, rank), step.attribute("ceil_mode", 0)
    if len(pads) != 2 * rank or not all(0 <= pad <= _MAX_PADS for pad in pads):
        raise UnsupportedError(f"{step.node.op} with pads = {pads[:8]}")
    around: list[int] = []
    further: list[int] = []
    for axis in reversed(range(rank)):
        length, stride, span = x.shape[2 + axis], strides[axis], dilations[axis] * (size[axis] - 1) + 1
        before, behind, reach = pads[axis], pads[rank + axis], 0
        if auto.startswith("SAME"):
            total = max((-(-length // stride) - 1) * stride + span - length, 0)
            before = total // 2 if auto == "SAME_UPPER" else -(-total // 2)
            behind = total - before
        elif rounds_up:
            whole = length + before + behind
            last = -(-(whole - span) // stride) * stride  # start of the last window
            last -= stride if last >= length + before else 0  # a window that covers only padding is dropped
            reach = max(last + span - whole, 0)
        around, further = [*around, before, behind], [*further, 0, reach]
    x = functional.pad(x, around, value=value) if any(around) else x
    x = functional.pad(x, further, value=value if beyond is None else beyond) if any(further) else x
    return x, {"stride": strides, "dilation": dilations}


def conv(step: OnnxStep) -> Tensor:
    """Return a convolution over one to three axes, plus the fourth input of onnxruntime's FusedConv if there is one."""
    kernel = step.tensor(1)
    x, moves = _padded(step, step.tensor(0), tuple(kernel.shape[2:]), 0.0)
    made: Tensor = _CONVOLVE[x.dim() - 3](x, kernel, step.optional(2), groups=step.attribute("group", 1), **moves)
    return made + step.tensor(3) if step.given(3) else made


def _conv_transpose(step: OnnxStep) -> Tensor:
    """Return a transposed convolution, cropped or padded at the ends by ONNX's rules."""
    x, kernel = step.tensor(0), step.tensor(1)
    rank = x.dim() - 2
    if not 1 <= rank <= 3:
        raise UnsupportedError(f"ConvTranspose on {rank} axes")
    strides, dilations = _listed(step, "strides", rank, 1), _listed(step, "dilations", rank, 1)
    more, sizes = _listed(step, "output_padding", rank, 0), step.attribute("output_shape", None)
    auto, pads = _pads(step, rank)
    made: Tensor = _SPREAD[rank - 1](x, kernel, None, strides, groups=step.attribute("group", 1), dilation=dilations)
    flat: list[int] = []
    for axis in reversed(range(rank)):
        full, before, behind = made.shape[2 + axis] + more[axis], pads[axis], pads[rank + axis]
        wanted = x.shape[2 + axis] * strides[axis] if auto.startswith("SAME") else None
        wanted = wanted if sizes is None else sizes[axis - rank]
        if wanted is not None:
            # The surplus is cut at both ends, its odd element at the end for SAME_UPPER and else at the start.
            total = max(full - wanted, 0)
            before = total // 2 if auto == "SAME_UPPER" else total - total // 2
            behind = full - wanted - before
        flat += [-before, more[axis] - behind]
    if any(abs(number) > _MAX_PADS for number in flat):
        raise UnsupportedError(f"ConvTranspose with pads = {flat[:8]}")
    made = functional.pad(made, flat) if any(flat) else made
    return made + step.tensor(2).reshape(-1, *[1] * rank) if step.given(2) else made


def _max_pool(step: OnnxStep) -> Tensor:
    x, size = step.tensor(0), tuple(step.attribute("kernel_shape", []))
    x, moves = _padded(step, x, size, -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min)
    made: Tensor = _MAX_POOLS[x.dim() - 3](x, size, **moves)
    return made


def _summed(step: OnnxStep, x: Tensor, value: float = 0.0) -> Tensor:
    """Return the sum of each window of a tensor whose padding has the value `value`."""
    size = tuple(step.attribute("kernel_shape", []))
    padded, moves = _padded(step, x, size, value, beyond=0.0)
    # A convolution of each channel with a kernel of ones.
    ones = torch.ones(1, 1, *size, dtype=x.dtype, device=x.device)
    made: Tensor = _CONVOLVE[len(size) - 1](padded.reshape(-1, 1, *padded.shape[2:]), ones, **moves)
    return made.reshape(*x.shape[:2], *made.shape[2:])


def _average_pool(step: OnnxStep) -> Tensor:
    """Return the average of each window, over the tensor alone or with its padding (`count_include_pad`)."""
    x = step.tensor(0)
    # The denominator counts elements: the same sum over a tensor of ones, whose padding is 1 if it counts.
    return _summed(step, x) / _summed(step, torch.ones_like(x[:1, :1]), float(step.attribute("count_include_pad", 0)))


def _lp_pool(step: OnnxStep) -> Tensor:
    p = step.attribute("p", 2)
    made: Tensor = _summed(step, step.tensor(0).abs() ** p) ** (1 / p)
    return made


def _resize(step: OnnxStep) -> Tensor:
    """Return a resized tensor: nearest in all of ONNX's modes, interpolation in the modes that torch has."""
    x, sizes, old = step.tensor(0), [*step.tensor(0).shape], step.graph.opset < 11 or step.node.op == "Upsample"
    mode, rounding = step.attribute("mode", "nearest"), step.attribute("nearest_mode", "round_prefer_floor")
    place = step.attribute("coordinate_transformation_mode", "asymmetric" if old else "half_pixel")
    usual = {"antialias": 0, "exclude_outside": 0, "cubic_coeff_a": -0.75, "extrapolation_value": 0.0}
    odd = [name for name, value in usual.items() if step.attribute(name, value) != value]
    axes = [axis % x.dim() for axis in step.attribute("axes", range(x.dim()))]
    factors, _ = step.listed(1 if old else 2, "scales"), step.optional(1)  # the region matters only to refused modes
    if step.given(3):
        wanted = step.numbers(3)
        factors = [size / x.shape[axis] for axis, size in zip(axes, wanted, strict=True)]
    elif factors is not None:
        wanted = [int(x.shape[axis] * factor) for axis, factor in zip(axes, factors, strict=True)]
    else:
        raise UnsupportedError(f"{step.node.op} without sizes")
    for axis, size in zip(axes, wanted, strict=True):
        sizes[axis] = size
    if step.device == "meta":  # a shape does not depend on the mode
        return torch.empty(sizes, dtype=x.dtype, device=x.device) * x.mean()
    if mode == "nearest" and place in _RESIZE_COORDINATES and rounding in _NEAREST and not odd:
        for axis, factor in zip(axes, factors, strict=True):
            n, m = x.shape[axis], sizes[axis]
            at = _RESIZE_COORDINATES[place](torch.arange(m, dtype=torch.float32), factor, n, m)
            at = _NEAREST["floor" if old else rounding](at).clamp(0, n - 1)
            x = x.index_select(axis, at.long()) if factor != 1 else x
        return x
    whole = all(abs(x.shape[axis] * factor - sizes[axis]) < 1e-3 for axis, factor in zip(axes, factors, strict=True))
    fits = place in ("align_corners", "half_pixel", "half_pixel_symmetric")
    fits = fits or (place == "pytorch_half_pixel" and min(sizes[2:]) > 1)
    how = _RESIZED.get((mode, x.dim()))
    if odd or how is None or not fits or not whole or sizes[:2] != [*x.shape[:2]]:
        odd += [f"nearest_mode = {rounding[:20]}"] * (mode == "nearest" and rounding not in _NEAREST)
        more = "".join(f", {name}" for name in odd) + ("" if whole else ", scales that give no whole size")
        raise UnsupportedError(
            f"{step.node.op} {step.node.site[:60]!r} of the mode {mode[:20]}, {place[:30]}{more}, on {x.dim() - 2} "
            "axes: nearest is computed, and on 1 to 3 axes linear, on 2 cubic, with half_pixel or align_corners"
        )
    return functional.interpolate(x, sizes[2:], mode=how, align_corners=place == "align_corners")


# -- integers that stand for numbers -----------------------------------------------------------------------------------


def _dequantised(step: OnnxStep) -> Tensor:
    """Return dequantised inputs of the caller. Weights are dequantised before the walk."""
    x, scale, axis = step.tensor(0), step.tensor(1), step.attribute("axis", 1)
    zero = step.tensor(2) if step.given(2) else torch.zeros_like(scale)
    if scale.dim() == 1 and scale.numel() > 1:
        shape = [-1 if i == axis % x.dim() else 1 for i in range(x.dim())]
        scale, zero = scale.reshape(shape), zero.reshape(shape)
    return (x.to(scale.dtype) - zero.to(scale.dtype)) * scale


def fake_quantised(x: Tensor, scale: Any, zero: Any, fixed: bool) -> Tensor:
    """Return an activation as it is after quantising and dequantising it; the rounding is hidden from a trace.

    Args:
        x: The activation.
        scale: A number, or None if it is not known.
        zero: The zero point, or None if it is not known.
        fixed: Whether scale and zero point are constants of the file. Otherwise they are those of
            `DynamicQuantizeLinear`: 255 steps from the smallest to the largest value, in a range that includes zero.
    """
    if x.is_meta:
        return x
    if fixed and (scale is None or zero is None or scale.size > 1):
        raise UnsupportedError("QuantizeLinear by scales that are computed, or one a channel")
    made = x.clone()
    with unseen():
        exact = x.detach().double()
        if fixed:
            size, shift, least, most = float(scale), float(zero), np.iinfo(zero.dtype).min, np.iinfo(zero.dtype).max
        else:
            low, high = min(0.0, float(exact.min())), max(0.0, float(exact.max()))
            size, least, most = float(np.float32(high - low) / np.float32(255)), 0, 255
            shift = min(255.0, max(0.0, float(np.rint(-low / size)))) if size else 0.0
        if size:
            exact = ((exact / size).round() + shift).clamp(least, most).sub(shift).mul(size)
        # Written through numpy, so that the tape holds the activation itself and no rounding.
        made.detach().numpy()[...] = exact.to(x.dtype).numpy()
    return made


_EPSILON_DEFAULT = {"epsilon": 1e-5}
_RMS = of_torch(
    lambda x, gain, axis, eps: functional.rms_norm(x, x.shape[axis:], gain, eps), 2, axis=-1, **_EPSILON_DEFAULT
)
LAYER_OPERATIONS: dict[str, Operation] = {
    "AveragePool": _average_pool,
    "BatchNormalization": of_torch(
        lambda x, gain, shift, mean, var, eps: functional.batch_norm(x, mean, var, gain, shift, eps=eps),
        5,
        **_EPSILON_DEFAULT,
    ),
    "Conv": conv,
    "ConvTranspose": _conv_transpose,
    "DequantizeLinear": _dequantised,
    "Gemm": product,
    "GlobalAveragePool": of_torch(lambda x: x.mean((*range(2, x.dim()),), keepdim=True)),
    "GlobalMaxPool": of_torch(lambda x: x.amax((*range(2, x.dim()),), keepdim=True)),
    "GroupNormalization": of_torch(_group_norm, 3, num_groups=1, **_EPSILON_DEFAULT),
    "InstanceNormalization": of_torch(
        lambda x, gain, shift, eps: functional.instance_norm(x, weight=gain, bias=shift, eps=eps), 3, **_EPSILON_DEFAULT
    ),
    "LayerNormalization": of_torch(
        lambda x, gain, shift, axis, eps: functional.layer_norm(x, x.shape[axis:], gain, shift, eps),
        3,
        axis=-1,
        **_EPSILON_DEFAULT,
    ),
    "LpNormalization": of_torch(functional.normalize, p=2, axis=-1),
    "LpPool": _lp_pool,
    "MatMul": product,
    "MaxPool": _max_pool,
    "Resize": _resize,
    "RMSNormalization": _RMS,
    "SimplifiedLayerNormalization": _RMS,
    "Upsample": _resize,
}
