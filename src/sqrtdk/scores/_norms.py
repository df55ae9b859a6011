"""Vectors brought to one length, in float32 for half types: squares of float16 overflow, and its eps would be 0."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from jaxtyping import Float


def l2(x: Float[Tensor, "*x"], eps: float) -> Float[Tensor, "*x"]:
    """Length 1, x / |x| over the last dimension; 0, with gradient 0, where |x| is at most eps."""
    square = x.square().sum(-1, keepdim=True)
    # NaN compares False: both branches are safe for every derivative, and NaN * 0 is still NaN.
    long = square > eps * eps
    inverse = torch.where(long, torch.where(long, square, 1.0).rsqrt(), 0.0)
    return x * inverse


def rms(x: Float[Tensor, "*x"], eps: float) -> Float[Tensor, "*x"]:
    """Length sqrt(E), x / sqrt(mean x^2 + eps) over the last dimension."""
    return functional.rms_norm(x, x.shape[-1:], eps=eps)


def layer(x: Float[Tensor, "*x"], eps: float) -> Float[Tensor, "*x"]:
    """Length sqrt(E) and sum 0, (x - mean) / sqrt(variance + eps) over the last dimension."""
    return functional.layer_norm(x, x.shape[-1:], eps=eps)


# name -> function, and the eps that its users know: torch's normalize, Llama's and Qwen's RMSNorm, torch's LayerNorm
NORMS: dict[str, tuple[Callable[[Tensor, float], Tensor], float]] = {
    "l2": (l2, 1e-12),
    "rms": (rms, 1e-6),
    "layer": (layer, 1e-5),
}
