"""score = g norm(q) . norm(k): the lengths of q and k no longer matter, the gain g sets the range of the logits.

- l2: Henry et al. 2020 ("Query-Key Normalization for Transformers", arXiv:2010.04245), and SwinV2 (arXiv:2111.09883).
- layer: Dehghani et al. 2023 (ViT-22B, arXiv:2302.05442).
- rms: OLMo 2 (arXiv:2501.00656), Qwen3 and Gemma 3, before the rotation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales import ScaleRule, none, sqrt_dk
from sqrtdk.scales._numbers import positive
from sqrtdk.scores._gain import checked_gain, gain_for
from sqrtdk.scores._norms import NORMS
from sqrtdk.scores._weights import keep, widened

if TYPE_CHECKING:
    from jaxtyping import Float


class Cosine(nn.Module):
    """See `cosine`."""

    gain: Float[Tensor, "..."] | nn.Module | float | None

    def __init__(self, norm: str, gain: object, eps: float | None) -> None:
        super().__init__()
        self._normed, usual = NORMS[norm]
        self.norm, self.eps = norm, usual if eps is None else positive(eps, "eps of a cosine score")
        kept = checked_gain(gain)
        if isinstance(kept, Tensor):
            keep(self, "gain", kept, "a gain", {kept.ndim: ""})
        else:
            self.gain = kept

    @property
    def default_scale(self) -> ScaleRule:
        """1 for l2, where the gain is the scale; 1 / sqrt(E) for rms and layer, whose vectors have length sqrt(E)."""
        return none() if self.norm == "l2" else sqrt_dk()

    def fold(
        self, query: Float[Tensor, "*BHq L E"], key: Float[Tensor, "*BH S E"]
    ) -> tuple[Float[Tensor, "*BHq L E"], Float[Tensor, "*BH S E"]]:
        """Both normalised, the query times the gain; computed in float32 for half types, and rounded once."""
        unit = self._normed(widened(query), self.eps)
        if self.gain is not None:
            unit = unit * gain_for(self.gain, query)
        return unit.to(query.dtype), self._normed(widened(key), self.eps).to(key.dtype)

    def extra_repr(self) -> str:
        """Norm, and the gain where it is a number."""
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
        The score, an nn.Module; it takes query (..., Hq, L, E) and key (..., H, S, E). Where no scale is given, l2
        has none, and rms and layer have 1 / sqrt(E).

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
        `torch.nn.functional.normalize`, which divides a vector shorter than eps by eps: here it gives 0, and a gradient
        of 0 in place of one of 1e12.
    """
    if norm not in NORMS:
        raise InvalidValueError(f"norm is one of {', '.join(NORMS)}; got {norm!r}", hint="Pass norm='l2'.")
    return Cosine(norm, gain, eps)
