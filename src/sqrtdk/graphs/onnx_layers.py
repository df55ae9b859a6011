"""ONNX's layers as torch's: norms, convolutions, weights of few bits, and what scatters, pads and sorts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_step import Step

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


def skip_norm(rms: bool) -> Operation:
    """A sum of two tensors, normalised: by its root mean square, or as a layer's."""

    def run(step: Step) -> Result:
        """The normalised sum; the sum itself is the fourth output."""
        total = step.tensor(0) + step.tensor(1)
        place = 3 if rms else 4
        total = total + step.tensor(place) if step.given(place) else total
        epsilon, shape = float(step.attribute("epsilon", 1e-5)), total.shape[-1:]
        bias = step.tensor(3) if not rms and step.given(3) else None
        made = (
            functional.rms_norm(total, shape, step.weight(2), epsilon)
            if rms
            else functional.layer_norm(total, shape, step.weight(2), bias, epsilon)
        )
        return made, total[..., 0], total[..., 0], total

    return run


def conv(step: Step) -> Tensor:
    """Convolve over one to three axes."""
    x, kernel = step.tensor(0), step.weight(1)
    spatial = x.dim() - 2
    if not 1 <= spatial <= 3:
        raise UnsupportedError("Conv of another rank")
    pads = [int(pad) for pad in step.attribute("pads", [0] * 2 * spatial)]
    if step.attribute("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        raise UnsupportedError("Conv with auto_pad")
    if pads[:spatial] != pads[spatial:]:
        flat = [pad for i in range(spatial - 1, -1, -1) for pad in (pads[i], pads[spatial + i])]
        x, pads = functional.pad(x, flat), [0] * spatial
    convolve: Any = (functional.conv1d, functional.conv2d, functional.conv3d)[spatial - 1]
    made: Tensor = convolve(
        x,
        kernel,
        step.tensor(2) if step.given(2) else None,
        tuple(step.attribute("strides", [1] * spatial)),
        tuple(pads[:spatial]),
        tuple(step.attribute("dilations", [1] * spatial)),
        int(step.attribute("group", 1)),
    )
    return made


def max_pool(step: Step) -> Tensor:
    """Take the largest of a window of two axes."""
    x, size = step.tensor(0), tuple(step.attribute("kernel_shape", []))
    pads = step.attribute("pads", [0] * 2 * len(size))
    if len(size) != 2 or [*pads[:2]] != [*pads[2:]]:
        raise UnsupportedError("MaxPool of another rank, or with pads that differ")
    strides = tuple(step.attribute("strides", [1, 1]))
    return functional.max_pool2d(x, size, strides, tuple(pads[:2]), ceil_mode=bool(step.attribute("ceil_mode", 0)))


def average(step: Step) -> Tensor:
    """Average over all axes but batch and channels."""
    return step.tensor(0).mean((*range(2, step.tensor(0).dim()),), keepdim=True)


def pad(step: Step) -> Tensor:
    """Put a constant around a tensor."""
    x = step.tensor(0)
    pads = step.numbers(1) if step.given(1) else [int(pad) for pad in step.attribute("pads", [])]
    axes = [axis % x.dim() for axis in step.numbers(3)] if step.given(3) else [*range(x.dim())]
    value = step.number(2) if step.given(2) else 0.0
    flat = [0] * 2 * x.dim()
    for i, axis in enumerate(axes):
        flat[2 * (x.dim() - 1 - axis) : 2 * (x.dim() - axis)] = [pads[i], pads[len(axes) + i]]
    if step.attribute("mode", "constant") != "constant":
        raise UnsupportedError("Pad that is not constant")
    return functional.pad(x, flat, value=value)


def resize(step: Step) -> Tensor:
    """Bring a tensor to other sizes: where its values go does not matter."""
    x = step.tensor(0)
    if step.given(3):
        sizes = step.numbers(3)
    elif step.given(2):
        factors = step.floats(2)
        sizes = [int(size * factor) for size, factor in zip(x.shape, factors, strict=True)]
    else:
        raise UnsupportedError("Resize without sizes")
    return torch.empty(sizes, dtype=x.dtype, device=x.device) * x.mean()  # where it lies does not matter


def batch_norm(step: Step) -> Tensor:
    """Normalise by the mean and variance that the file holds."""
    x, gain, shift, mean, variance = (step.tensor(i) for i in range(5))
    epsilon = float(step.attribute("epsilon", 1e-5))
    return functional.batch_norm(x, mean, variance, gain, shift, False, 0.0, epsilon)


def quantised_matmul(step: Step) -> Tensor:
    """A product with a weight of few bits, whose shape alone is told."""
    x = step.tensor(0)
    rows, columns = int(step.attribute("K", x.shape[-1])), int(step.attribute("N", 0))
    if rows != x.shape[-1] or columns < 1:
        raise UnsupportedError("MatMulNBits of sizes that do not fit")
    return x @ nn.Parameter(torch.empty(rows, columns, dtype=x.dtype, device=x.device), requires_grad=False)


def dequantised(step: Step) -> Tensor:
    """A weight of few bits as what it stands for: of its values nothing is told."""
    return nn.Parameter(torch.empty(step.shape(0), dtype=step.dtype(1), device=step.device), requires_grad=False)


def lp(step: Step) -> Tensor:
    """Divide by the length along an axis."""
    x, axis = step.tensor(0), int(step.attribute("axis", -1))
    return functional.normalize(x, float(step.attribute("p", 2)), axis)


def gather_elements(step: Step) -> Tensor:
    """Take elements by their numbers along an axis."""
    return step.tensor(0).gather(int(step.attribute("axis", 0)), step.tensor(1).long())


def scatter(step: Step) -> Tensor:
    """Write elements by their numbers along an axis."""
    axis = int(step.attribute("axis", 0))
    return step.tensor(0).scatter(axis, step.tensor(1).long(), step.tensor(2))


def scatter_nd(step: Step) -> Tensor:
    """Write elements by their numbers along several axes."""
    x, indices = step.tensor(0), step.tensor(1).long()
    return x.index_put(tuple(indices.unbind(-1)), step.tensor(2))


def top_k(step: Step) -> Result:
    """The largest along an axis, and their numbers."""
    axis, largest = int(step.attribute("axis", -1)), bool(step.attribute("largest", 1))
    values, indices = step.tensor(0).topk(step.numbers(1)[0], axis, largest)
    return values, indices


def one_hot(step: Step) -> Tensor:
    """Numbers as rows of zeros and a one."""
    return functional.one_hot(step.tensor(0).long(), step.numbers(1)[0]).to(step.dtype(2))


def trilu(step: Step) -> Tensor:
    """A triangle of a matrix."""
    diagonal = step.numbers(1)[0] if step.given(1) else 0
    return step.tensor(0).triu(diagonal) if step.attribute("upper", 1) else step.tensor(0).tril(diagonal)


def cumsum(step: Step) -> Tensor:
    """Sum up along an axis."""
    x, axis = step.tensor(0), step.numbers(1)[0]
    if step.attribute("reverse", 0):
        raise UnsupportedError("CumSum in reverse")
    made = x.cumsum(axis)
    return (made - x if step.attribute("exclusive", 0) else made).to(x.dtype)
