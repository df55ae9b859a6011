"""score = g norm(q) . norm(k): the lengths of q and k no longer matter, the gain g sets the range of the logits.

- l2: Henry et al. 2020 ("Query-Key Normalization for Transformers", arXiv:2010.04245), and SwinV2 (arXiv:2111.09883).
- layer: Dehghani et al. 2023 (ViT-22B, arXiv:2302.05442).
- rms: OLMo 2 (arXiv:2501.00656), Qwen3 and Gemma 3, before the rotation.

Half types are normalised in float32: squares of float16 overflow, and its eps would be 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk._subclasses import check_class
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.scales import ScaleRule, none, sqrt_dk
from sqrtdk.scales._numbers import finite, positive, whole_number
from sqrtdk.scores._score import store_weight, widened

if TYPE_CHECKING:
    from jaxtyping import Float


def l2(x: Float[Tensor, "*x"], eps: float) -> Float[Tensor, "*x"]:
    """Return x / |x| over the last dimension, of length 1; 0, with gradient 0, if |x| is at most eps.

    Example:
        >>> l2(torch.tensor([3.0, 4.0]), 1e-6)
        tensor([0.6000, 0.8000])
    """
    square = x.square().sum(-1, keepdim=True)
    # A comparison with NaN is False, so that NaN takes the safe branch, and x * 0 is still NaN. The inner `where` keeps
    # the derivative of rsqrt finite at 0.
    long = square > eps * eps
    inverse = torch.where(long, torch.where(long, square, 1.0).rsqrt(), 0.0)
    return x * inverse


def rms(x: Float[Tensor, "*x"], eps: float) -> Float[Tensor, "*x"]:
    """Return x / sqrt(mean(x^2) + eps) over the last dimension, of length sqrt(E).

    Example:
        >>> rms(torch.tensor([3.0, 4.0]), 0.0).norm()
        tensor(1.4142)
    """
    return functional.rms_norm(x, x.shape[-1:], eps=eps)


def layer(x: Float[Tensor, "*x"], eps: float) -> Float[Tensor, "*x"]:
    """Return (x - mean(x)) / sqrt(variance(x) + eps) over the last dimension, of length sqrt(E) and sum 0.

    Example:
        >>> layer(torch.tensor([3.0, 4.0]), 0.0)
        tensor([-1.,  1.])
    """
    return functional.layer_norm(x, x.shape[-1:], eps=eps)


# name -> function, and the eps that users expect: that of torch's normalize, of Llama's and Qwen's RMSNorm, and of
# torch's LayerNorm
VECTOR_NORMS: dict[str, tuple[Callable[[Tensor, float], Tensor], float]] = {
    "l2": (l2, 1e-12),
    "rms": (rms, 1e-6),
    "layer": (layer, 1e-5),
}


_GAIN_HINT = "A gain is one number, (Hq,) for each query head, or broadcastable to (Hq, L, E)."


class LearnedGain(nn.Module):
    """A learned gain for each head, as in Swin Transformer V2: exp(min(logit_scale, log(maximum))).

    Above the maximum the gradient is 0, so that only weight decay brings the parameter back.

    Args:
        heads: query heads, or 1 for one gain that all share.
        init: the gain at the start, above 0.
        maximum: the largest gain, at least `init`.
        dtype: of the parameter; None: torch's default.
        device: of the parameter.

    Attributes:
        logit_scale: (heads, 1, 1) parameter, the logarithm of the gain; name and shape are SwinV2's.

    Raises:
        InvalidTypeError: an argument is not a number.
        InvalidValueError: heads below 1, or not 0 < init <= maximum, both finite.

    Example:
        >>> LearnedGain(2)().flatten().tolist()
        [10.0, 10.0]

    Reference:
        Liu et al. 2022, "Swin Transformer V2", arXiv:2111.09883, section 3.2.
    """

    def __init__(
        self,
        heads: int,
        init: float = 10.0,
        maximum: float = 100.0,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        start, self.maximum = positive(init, "init of a gain"), positive(maximum, "the maximum of a gain")
        if start > self.maximum:
            raise InvalidValueError(
                f"a gain starts at its maximum or below; got {start} and a maximum of {self.maximum}",
                hint="Raise the maximum: above it there is no gradient.",
            )
        shape = (whole_number(heads, "heads of a gain", 1), 1, 1)
        self.logit_scale = nn.Parameter(torch.full(shape, math.log(start), dtype=dtype, device=device))

    def forward(self) -> Float[Tensor, "heads 1 1"]:
        """Return the gain of each head, exp(min(logit_scale, log(maximum))), as (heads, 1, 1)."""
        return self.logit_scale.clamp(max=math.log(self.maximum)).exp()

    def extra_repr(self) -> str:
        """Return the number of heads and the maximum, which `print(module)` shows."""
        return f"heads={self.logit_scale.shape[0]}, maximum={self.maximum}"


def checked_gain(gain: object) -> Float[Tensor, "..."] | nn.Module | float | None:
    """Return the gain if it is of a kind that `gain_for` accepts."""
    if gain is None or isinstance(gain, (Tensor, nn.Module)):
        if isinstance(gain, Tensor):
            check_class("a gain", gain)
        # (Hq, 1) of heads and (L, 1) of rows would look the same.
        if isinstance(gain, Tensor) and gain.ndim == 2:
            raise InvalidValueError(f"a gain of two dimensions is ambiguous; got {tuple(gain.shape)}", hint=_GAIN_HINT)
        return gain
    return finite(gain, "a gain")


def gain_for(
    gain: Float[Tensor, "..."] | nn.Module | float, query: Float[Tensor, "*BHqLE"]
) -> Float[Tensor, "*#BHqLE"] | float:
    """Return the gain of a cosine score in a shape that broadcasts to a query.

    Args:
        gain: A number, a tensor with one entry or one per head, or a module that returns such a tensor.
        query: (..., Hq, L, E).

    Raises:
        InvalidTypeError: A module returns no floating tensor.
        InvalidValueError: The gain does not broadcast to the query.

    Example:
        >>> gain_for(torch.ones(4), torch.zeros(2, 4, 5, 8)).shape
        torch.Size([4, 1, 1])
    """
    found = gain() if isinstance(gain, nn.Module) else gain
    if isinstance(found, float):
        return found
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise InvalidTypeError(f"a gain module gives a floating tensor; got {type(found).__name__}", hint=_GAIN_HINT)
    if found.numel() == 1:
        return found.reshape(())
    shaped = found[:, None, None] if found.ndim == 1 else found
    pairs = zip(reversed(shaped.shape), reversed(query.shape), strict=False)
    if shaped.ndim > query.ndim or any(have != 1 and have != wanted for have, wanted in pairs):
        raise InvalidValueError(
            f"a gain of shape {tuple(found.shape)} does not fit a query of shape {tuple(query.shape)}", hint=_GAIN_HINT
        )
    return shaped


class Cosine(nn.Module):
    """See `cosine`."""

    gain: Float[Tensor, "..."] | nn.Module | float | None

    def __init__(self, norm: str, gain: object, eps: float | None) -> None:
        super().__init__()
        self._normed, usual = VECTOR_NORMS[norm]
        self.norm, self.eps = norm, usual if eps is None else positive(eps, "eps of a cosine score")
        checked = checked_gain(gain)
        if isinstance(checked, Tensor):
            store_weight(self, "gain", checked, "a gain", {checked.ndim: ""})
        else:
            self.gain = checked

    @property
    def default_scale(self) -> ScaleRule:
        """Return 1 for l2 (its gain is the scale), 1 / sqrt(E) for rms and layer (of length sqrt(E))."""
        return none() if self.norm == "l2" else sqrt_dk()

    def fold(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"]
    ) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
        """Return both normalised, the query times the gain; half types are computed in float32 and rounded once."""
        unit = self._normed(widened(query), self.eps)
        if self.gain is not None:
            unit = unit * gain_for(self.gain, query)
        return unit.to(query.dtype), self._normed(widened(key), self.eps).to(key.dtype)

    def extra_repr(self) -> str:
        """Return the norm, and the gain if it is a number, which `print(module)` shows."""
        return f"norm={self.norm!r}" + (f", gain={self.gain}" if isinstance(self.gain, float) else "")


def cosine(
    norm: Literal["l2", "rms", "layer"] = "l2",
    gain: Float[Tensor, "..."] | nn.Module | float | None = None,
    *,
    eps: float | None = None,
) -> Cosine:
    """The product of normalised vectors, score = g norm(q) . norm(k).

    Args:
        norm: "l2" (length 1: the score is g times the cosine), "rms" (length sqrt(E)), "layer" (the same, mean 0).
        gain: g, folded into q: a number; a tensor or Parameter, of one element, (Hq,), or broadcastable to
            (Hq, L, E); a module that gives such a tensor when called without arguments, as `LearnedGain`. None: 1,
            which with l2 keeps every logit within [-1, 1], so that the weights are nearly uniform.
        eps: bound on the length (l2) or term under the root; None: 1e-12 for l2, 1e-6 for rms, 1e-5 for layer.

    Returns:
        The score, an nn.Module; it takes query (..., Hq, L, E) and key (..., H, S, E). If no scale is given, l2 is not
        scaled, and rms and layer are scaled by 1 / sqrt(E).

    Raises:
        InvalidValueError: an unknown norm; a number that is NaN or infinite; a gain that fits no query.
        InvalidTypeError: a gain or eps that is none of these.

    Example:
        >>> import torch
        >>> query, key = cosine(gain=10.0).fold(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]]))
        >>> query @ key.mT
        tensor([[8.]])

    Reference:
        Henry et al. 2020, arXiv:2010.04245; Liu et al. 2022, arXiv:2111.09883.

    Differs from:
        `torch.nn.functional.normalize`, which divides a vector shorter than eps by eps: here the result is 0, with
        gradient 0 instead of 1e12.
    """
    if norm not in VECTOR_NORMS:
        raise InvalidValueError(f"norm is one of {', '.join(VECTOR_NORMS)}; got {norm!r}", hint="Pass norm='l2'.")
    return Cosine(norm, gain, eps)
