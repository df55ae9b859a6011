"""onnxruntime's own operators as torch's: what its optimiser makes of several of ONNX's.

What holds an attention by itself is in `onnx_attention`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.onnx_layers import Operation, Result
from sqrtdk.graphs.onnx_step import Step
from sqrtdk.graphs.onnx_windows import conv

_MOST_AFTER = 40  # characters of an activation's name in a message


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


def embed_norm(step: Step) -> Result:
    """Tokens, positions and segments looked up, summed and normalised; and how many tokens each row has.

    Inputs: ids, segments, three tables, gain, shift, mask, positions.
    """
    ids = step.tensor(0).long()
    total = functional.embedding(ids, step.weight(2))
    places = step.tensor(8).long() if step.given(8) else torch.arange(ids.shape[1], device=ids.device)[None]
    total = total + functional.embedding(places, step.weight(3))
    if step.given(1) and step.given(4):
        total = total + functional.embedding(step.tensor(1).long(), step.weight(4))
    made = functional.layer_norm(
        total, total.shape[-1:], step.weight(5), step.weight(6), float(step.attribute("epsilon", 1e-12))
    )
    lengths = torch.zeros(ids.shape[0], dtype=torch.int32, device=ids.device)
    if step.given(7):
        lengths = step.tensor(7).sum(1).to(torch.int32)
    return made, lengths, total


def matmul(step: Step) -> Tensor:
    """A product of two tensors that may be transposed, times a number."""
    left, right = step.tensor(0), step.weight(1)
    if step.attribute("transBatchA", 0):
        left = left.movedim(-2, 0) if left.dim() > 2 else left
    if step.attribute("transBatchB", 0):
        right = right.movedim(-2, 0) if right.dim() > 2 else right
    left = left.mT if step.attribute("transA", 0) else left
    right = right.mT if step.attribute("transB", 0) else right
    alpha = float(step.attribute("alpha", 1.0))
    return left @ right if alpha == 1.0 else (left @ right) * alpha


def gemm(step: Step) -> Tensor:
    """`alpha A B + beta C`."""
    left, right = step.tensor(0), step.weight(1)
    left = left.mT if step.attribute("transA", 0) else left
    right = right.mT if step.attribute("transB", 0) else right
    alpha, beta = float(step.attribute("alpha", 1.0)), float(step.attribute("beta", 1.0))
    made = left @ right
    made = made if alpha == 1.0 else made * alpha
    if not step.given(2):
        return made
    bias = step.tensor(2)
    return made + (bias if beta == 1.0 else bias * beta)


_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "": lambda x: x,
    "Relu": lambda x: torch.relu(x),
    "Tanh": lambda x: torch.tanh(x),
    "Sigmoid": lambda x: torch.sigmoid(x),
    "LeakyRelu": lambda x, alpha=0.01: functional.leaky_relu(x, alpha),
    "Clip": lambda x, low, high: torch.clamp(x, low, high),
    "HardSigmoid": lambda x, alpha=0.2, beta=0.5: torch.clamp(x * alpha + beta, 0.0, 1.0),
}


def _activated(step: Step, made: Tensor, numbers: list[float]) -> Tensor:
    name = str(step.attribute("activation", ""))
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"{step.node.op} with the activation {name[:_MOST_AFTER]}")
    return _ACTIVATIONS[name](made, *numbers)


def fused_conv(step: Step) -> Tensor:
    """A convolution, to which another tensor is added, and an activation."""
    made = conv(step)
    made = made + step.tensor(3) if step.given(3) else made
    return _activated(step, made, [float(number) for number in step.attribute("activation_params", [])])


def fused_gemm(step: Step) -> Tensor:
    """A product with its activation."""
    names = ("activation_alpha", "activation_beta", "activation_gamma")
    numbers = [float(number) for name in names if (number := step.attribute(name, None)) is not None]
    return _activated(step, gemm(step), numbers)


def bias_softmax(step: Step) -> Tensor:
    """The softmax of logits and of what is added to them: a mask, as a rule."""
    logits = step.tensor(0) + step.tensor(1)
    axis = int(step.attribute("axis", 1)) % logits.dim()
    return logits.flatten(axis).softmax(-1).reshape(logits.shape) if axis < logits.dim() - 1 else logits.softmax(-1)


def quick_gelu(step: Step) -> Tensor:
    """`x sigmoid(alpha x)`."""
    x = step.tensor(0)
    return x * torch.sigmoid(x * float(step.attribute("alpha", 1.702)))


def _gelu(approximate: str) -> Operation:
    def run(step: Step) -> Tensor:
        """Of x, or of x and a bias."""
        x = step.tensor(0) + step.tensor(1) if step.given(1) else step.tensor(0)
        return functional.gelu(x, approximate=approximate)

    return run


FUSED: dict[tuple[str, str], Operation] = {
    ("com.microsoft", name): operation
    for name, operation in {
        "BiasGelu": _gelu("none"),
        "BiasSoftmax": bias_softmax,
        "EmbedLayerNormalization": embed_norm,
        "FastGelu": _gelu("tanh"),
        "FusedConv": fused_conv,
        "FusedGemm": fused_gemm,
        "FusedMatMul": matmul,
        "Gelu": _gelu("none"),
        "QuickGelu": quick_gelu,
        "SkipLayerNormalization": skip_norm(False),
        "SkipSimplifiedLayerNormalization": skip_norm(True),
        "TransposeMatMul": matmul,
    }.items()
}
