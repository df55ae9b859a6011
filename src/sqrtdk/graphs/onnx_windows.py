"""ONNX's operators on windows as torch's: convolutions and pools, with every way in which ONNX says a padding.

The padding of a side is written out before the window moves, so that what ONNX may say and torch's own arguments may
not (two ends that differ, `auto_pad`, a last window that is not full) are one case.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_step import Step

_MAX_PADS = 2**20
_CONVOLVE: Any = (functional.conv1d, functional.conv2d, functional.conv3d)
_SPREAD: Any = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)
_LARGEST: Any = (functional.max_pool1d, functional.max_pool2d, functional.max_pool3d)


@dataclass(frozen=True, slots=True)
class Window:
    """A window, and how it moves over the axes after batch and channels.

    Attributes:
        size: of it, an axis.
        strides: from one to the next.
        dilations: from one of its elements to the next.
        pads: before the axes, and behind them, as ONNX lists them.
        beyond: how far the last windows reach over the padding behind an axis; 0 unless `ceil_mode` rounds up.
    """

    size: tuple[int, ...]
    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[int, ...]
    beyond: tuple[int, ...]

    def padded(self, x: Tensor, value: float, *, beyond: bool = True) -> Tensor:
        """A tensor with its padding around it, and with what the last windows reach over."""
        rank, flat = len(self.size), []
        for axis in range(rank - 1, -1, -1):
            flat += [self.pads[axis], self.pads[rank + axis] + (self.beyond[axis] if beyond else 0)]
        return functional.pad(x, flat, value=value) if any(flat) else x


def _listed(step: Step, name: str, rank: int, default: int) -> tuple[int, ...]:
    found = tuple(int(number) for number in step.attribute(name, [default] * rank))
    if len(found) != rank:
        raise UnsupportedError(f"{step.node.op} with {name} of {len(found)} numbers on {rank} axes")
    return found


def _window(step: Step, x: Tensor, size: tuple[int, ...]) -> Window:
    """The window of an operator: its attributes, and `auto_pad` worked out for the sizes of `x`.

    Raises:
        UnsupportedError: it moves over no axis, or over more than three; an attribute does not fit.
    """
    rank = x.dim() - 2
    if not 1 <= rank <= 3 or len(size) != rank or min(size) < 1:
        raise UnsupportedError(f"{step.node.op} with a window {list(size)} on {rank} axes")
    strides, dilations = _listed(step, "strides", rank, 1), _listed(step, "dilations", rank, 1)
    spans = [dilation * (n - 1) + 1 for n, dilation in zip(size, dilations, strict=True)]
    auto, rounds_up = str(step.attribute("auto_pad", "NOTSET") or "NOTSET"), bool(step.attribute("ceil_mode", 0))
    pads, beyond = [0] * 2 * rank, [0] * rank
    if auto == "NOTSET":
        pads = [int(number) for number in step.attribute("pads", pads)]
    elif auto not in ("VALID", "SAME_UPPER", "SAME_LOWER"):
        raise UnsupportedError(f"{step.node.op} with auto_pad = {auto[:40]}")
    if len(pads) != 2 * rank or not all(0 <= pad <= _MAX_PADS for pad in pads):
        raise UnsupportedError(f"{step.node.op} with pads = {pads[:8]}")
    for axis in range(rank):
        length, stride, span = int(x.shape[2 + axis]), strides[axis], spans[axis]
        if auto.startswith("SAME"):
            total = max((-(-length // stride) - 1) * stride + span - length, 0)
            pads[axis] = total // 2 if auto == "SAME_UPPER" else -(-total // 2)
            pads[rank + axis] = total - pads[axis]
        elif rounds_up:
            whole = length + pads[axis] + pads[rank + axis]
            last = -(-(whole - span) // stride) * stride  # where the last window begins
            last -= stride if last >= length + pads[axis] else 0  # one in the padding alone is left out
            beyond[axis] = max(last + span - whole, 0)
    return Window(size, strides, dilations, tuple(pads), tuple(beyond))


def conv(step: Step) -> Tensor:
    """Convolve over one to three axes."""
    x, kernel = step.tensor(0), step.weight(1)
    window = _window(step, x, tuple(kernel.shape[2:]))
    bias, rank = step.tensor(2) if step.given(2) else None, len(window.size)
    made: Tensor = _CONVOLVE[rank - 1](
        window.padded(x, 0.0), kernel, bias, window.strides, 0, window.dilations, int(step.attribute("group", 1))
    )
    return made


def conv_transpose(step: Step) -> Tensor:
    """Spread a tensor by a kernel: what ONNX cuts off at the ends, or puts there, is worked out by its own rules."""
    x, kernel = step.tensor(0), step.weight(1)
    rank = x.dim() - 2
    if not 1 <= rank <= 3:
        raise UnsupportedError(f"ConvTranspose on {rank} axes")
    strides, dilations = _listed(step, "strides", rank, 1), _listed(step, "dilations", rank, 1)
    more, auto = _listed(step, "output_padding", rank, 0), str(step.attribute("auto_pad", "NOTSET") or "NOTSET")
    sizes = step.attribute("output_shape", None)
    made: Tensor = _SPREAD[rank - 1](x, kernel, None, strides, 0, 0, int(step.attribute("group", 1)), dilations)
    pads = [int(pad) for pad in step.attribute("pads", [0] * 2 * rank)] if auto == "NOTSET" else [0] * 2 * rank
    flat = []
    for axis in range(rank - 1, -1, -1):
        full = int(made.shape[2 + axis]) + more[axis]
        wanted = None if sizes is None else int([*sizes][-rank:][axis])
        if wanted is None and auto.startswith("SAME"):
            wanted = int(x.shape[2 + axis]) * strides[axis]
        before, behind = pads[axis], pads[rank + axis]
        if wanted is not None:
            total = max(full - wanted, 0)
            before = total // 2 if auto == "SAME_UPPER" else total - total // 2
            behind = full - wanted - before
        flat += [-before, more[axis] - behind]
    if any(abs(number) > _MAX_PADS for number in flat):
        raise UnsupportedError(f"ConvTranspose with pads = {flat[:8]}")
    made = functional.pad(made, flat) if any(flat) else made
    return made + step.tensor(2).reshape(-1, *[1] * rank) if step.given(2) else made


def max_pool(step: Step) -> Tensor:
    """Take the largest of a window."""
    x = step.tensor(0)
    if len([name for name in step.node.outputs if name]) > 1:
        raise UnsupportedError("MaxPool with indices as its output")
    window = _window(step, x, tuple(int(n) for n in step.attribute("kernel_shape", [])))
    lowest = -math.inf if x.is_floating_point() else float(torch.iinfo(x.dtype).min)
    padded, rank = window.padded(x, lowest), len(window.size)
    made: Tensor = _LARGEST[rank - 1](padded, window.size, window.strides, 0, window.dilations)
    return made


def _summed(x: Tensor, window: Window) -> Tensor:
    """The sum of each window of a tensor whose padding is written out."""
    rank = len(window.size)
    ones = torch.ones(1, 1, *window.size, dtype=x.dtype, device=x.device)
    alone = x.reshape(-1, 1, *x.shape[2:])
    made: Tensor = _CONVOLVE[rank - 1](alone, ones, None, window.strides, 0, window.dilations)
    return made.reshape(*x.shape[:2], *made.shape[2:])


def average_pool(step: Step) -> Tensor:
    """Average each window: over what lies in the tensor, or over its padding too (`count_include_pad`)."""
    x = step.tensor(0)
    window = _window(step, x, tuple(int(n) for n in step.attribute("kernel_shape", [])))
    inside = torch.ones_like(x[:1, :1])
    if step.attribute("count_include_pad", 0):
        inside = window.padded(inside, 1.0, beyond=False)
        bare = Window(window.size, window.strides, window.dilations, (0,) * 2 * len(window.size), window.beyond)
        inside = bare.padded(inside, 0.0)
    else:
        inside = window.padded(inside, 0.0)
    return _summed(window.padded(x, 0.0), window) / _summed(inside, window)


def lp_pool(step: Step) -> Tensor:
    """The p-norm of each window."""
    x, p = step.tensor(0), float(step.attribute("p", 2))
    window = _window(step, x, tuple(int(n) for n in step.attribute("kernel_shape", [])))
    return _summed(window.padded(x.abs() ** p, 0.0), window) ** (1 / p)


def global_average(step: Step) -> Tensor:
    """Average over all axes but batch and channels."""
    return step.tensor(0).mean((*range(2, step.tensor(0).dim()),), keepdim=True)


def global_max(step: Step) -> Tensor:
    """The largest over all axes but batch and channels."""
    return step.tensor(0).amax((*range(2, step.tensor(0).dim()),), keepdim=True)
