"""Rounding as ggml's CPU code does it, hidden from a trace.

A product of ggml rounds its second operand to the dtype that the first one is multiplied in: activations go to 8 bits
in blocks of 32 or 256 in front of a quantised weight, to float16 in front of a float16 one. Sums are in float32.
A run in a wider dtype has none of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk.frontends.program import RunDtypes

# What the second operand of a product is ggml_rounded to, by the dtype of the first: `vec_dot_type` of ggml-cpu.c.
_IN_BLOCKS_OF_256 = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs",
                     "iq3_s", "iq4_xs", "tq1_0", "tq2_0")  # fmt: skip
_IN_BLOCKS_OF_32 = ("q1_0", "q2_0", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q8_1", "mxfp4", "nvfp4", "iq4_nl")
MULTIPLIED_IN: dict[str, str] = {
    "f32": "f32", "f16": "f16", "bf16": "bf16",
    **dict.fromkeys(_IN_BLOCKS_OF_32, "q8_0"), **dict.fromkeys(_IN_BLOCKS_OF_256, "q8_k"),
}  # fmt: skip
_HALVES = {"f16": torch.float16, "bf16": torch.bfloat16}


def ggml_rounded(numbers: RunDtypes, x: Tensor, kind: str) -> Tensor:
    """Return a tensor with the values that it has in one of ggml's dtypes; a trace sees a copy of `x`.

    Args:
        numbers: The dtypes of the run; if they are wider than the program's own, or the run is one without rounding,
            `x` itself is returned.
        x: Any tensor; whole numbers are returned as they are.
        kind: "f16", "bf16", "q8_0" or "q8_k"; any other changes nothing.

    Example:
        >>> ggml_rounded(RunDtypes(), torch.tensor([0.1, 1000.1]), "f16").tolist()
        [0.0999755859375, 1000.0]
        >>> ggml_rounded(RunDtypes(torch.float64), torch.tensor([0.1]), "f16").tolist()
        [0.10000000149011612]
    """
    if numbers.wide is not None or not numbers.rounds or x.is_meta or not x.is_floating_point():
        return x
    change: Callable[[Tensor], Tensor]
    if kind in _HALVES:
        change = lambda y: y.to(_HALVES[kind]).to(y.dtype)  # noqa: E731
    elif kind == "q8_0":
        change = _blocks_of_32
    elif kind == "q8_k":
        change = _blocks_of_256
    else:
        return x
    made = x.clone()
    with _disable_current_modes(), torch.no_grad():
        # `data` has no version of its own: the trace holds the tensor before rounding, and sees no change in place
        made.data.copy_(change(x.detach()))
    return made


def _blocks_of_32(x: Tensor) -> Tensor:
    """Return `round(x / d) d` with the float16 number `d = max(|x|) / 127` of each 32 elements."""
    blocks = x.reshape(-1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    whole = torch.where(step == 0, torch.zeros_like(blocks), blocks * (1 / step)).round()
    return (whole * step.to(torch.float16).to(x.dtype)).reshape(x.shape)


def _blocks_of_256(x: Tensor) -> Tensor:
    """Return `round(x / d) d` with `d = -m / 127`, where m is the element of largest size among 256."""
    blocks = x.reshape(-1, 256)
    most = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    step = -most / 127
    whole = torch.where(step == 0, torch.zeros_like(blocks), blocks * (1 / step)).round().clamp(max=127)
    return (whole * step).reshape(x.shape)
