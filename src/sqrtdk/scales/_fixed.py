"""beta = x, whatever the sizes: Granite's attention_multiplier, Gemma 2's query_pre_attn_scalar to the power -1/2."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.scales._numbers import finite
from sqrtdk.scales._rule import Sizes


@dataclass(frozen=True, slots=True)
class Fixed:
    """See `fixed`."""

    value: float

    def beta(self, sizes: Sizes) -> float:
        """The number."""
        return self.value


def fixed(value: float) -> Fixed:
    """One number, beta = value.

    Args:
        value: a finite number; zero gives every visible key the same weight, a negative one turns the order round.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: the value is no number.
        InvalidValueError: the value is NaN or infinite.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> fixed(256**-0.5).beta(sizes(128))
        0.0625

    Reference:
        Gemma Team 2024 (Gemma 2), arXiv:2408.00118. That its 27B model scales by (model dim / heads)^-1/2 is in the
        published code (google/gemma_pytorch, gemma/config.py).
    """
    return Fixed(finite(value, "a fixed scale"))
