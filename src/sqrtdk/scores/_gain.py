"""The gain of a cosine score: a factor on q, a number, a tensor or a module that gives one."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk._subclasses import check_class
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.scales._numbers import finite, positive, whole

if TYPE_CHECKING:
    from jaxtyping import Float

_HINT = "A gain is one number, (Hq,) for each query head, or broadcastable to (Hq, L, E)."


class LearnedGain(nn.Module):
    """A learned gain a head as in Swin Transformer V2: exp(min(logit_scale, log(maximum))).

    At the maximum the gradient is 0 above the bound; there only weight decay brings the parameter back.

    Args:
        heads: query heads, or 1 for one gain that all share.
        init: the gain at the start, above 0.
        maximum: the largest gain, at least `init`.
        dtype: of the parameter; None: torch's default.
        device: of the parameter.

    Attributes:
        logit_scale: (heads, 1, 1) parameter, the logarithm of the gain; name and shape are SwinV2's.

    Raises:
        InvalidTypeError: an argument is no number.
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
        shape = (whole(heads, "heads of a gain", 1), 1, 1)
        self.logit_scale = nn.Parameter(torch.full(shape, math.log(start), dtype=dtype, device=device))

    def forward(self) -> Float[Tensor, "heads 1 1"]:
        """The gains, (heads, 1, 1)."""
        return self.logit_scale.clamp(max=math.log(self.maximum)).exp()

    def extra_repr(self) -> str:
        """Heads and bound."""
        return f"heads={self.logit_scale.shape[0]}, maximum={self.maximum}"


def checked_gain(gain: object) -> Float[Tensor, "..."] | nn.Module | float | None:
    """The gain, if it is of a kind that `gain_for` knows."""
    if gain is None or isinstance(gain, Tensor | nn.Module):
        if isinstance(gain, Tensor):
            check_class("a gain", gain)
        if isinstance(gain, Tensor) and gain.ndim == 2:
            raise InvalidValueError(f"a gain of two dimensions is ambiguous; got {tuple(gain.shape)}", hint=_HINT)
        return gain
    return finite(gain, "a gain")


def gain_for(
    gain: Float[Tensor, "..."] | nn.Module | float, query: Float[Tensor, "*BHqLE"]
) -> Float[Tensor, "*#BHqLE"] | float:
    """The factor on a query (..., Hq, L, E), shaped for it.

    Raises:
        InvalidTypeError: a module that gives no floating tensor.
        InvalidValueError: a gain that does not broadcast to the query.
    """
    found = gain() if isinstance(gain, nn.Module) else gain
    if isinstance(found, float):
        return found
    if not isinstance(found, Tensor) or not found.is_floating_point():
        raise InvalidTypeError(f"a gain module gives a floating tensor; got {type(found).__name__}", hint=_HINT)
    if found.numel() == 1:
        return found.reshape(())
    shaped = found[:, None, None] if found.ndim == 1 else found
    pairs = zip(reversed(shaped.shape), reversed(query.shape), strict=False)
    if shaped.ndim > query.ndim or any(have != 1 and have != wanted for have, wanted in pairs):
        raise InvalidValueError(
            f"a gain of shape {tuple(found.shape)} does not fit a query of shape {tuple(query.shape)}", hint=_HINT
        )
    return shaped
