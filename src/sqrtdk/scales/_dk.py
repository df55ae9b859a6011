"""beta = alpha / d, muP's rule: after training q and k are correlated, so their product grows like d, not sqrt(d).

Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, definition 4.1.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.scales._numbers import finite
from sqrtdk.scales._rule import Sizes


@dataclass(frozen=True, slots=True)
class Dk:
    """See `dk`."""

    alpha: float

    def beta(self, sizes: Sizes) -> float:
        """Alpha over d."""
        return self.alpha / sizes.head_dim


def dk(alpha: float = 1.0) -> Dk:
    """The scale of muP, beta = alpha / d.

    Args:
        alpha: a finite number; sqrt(d) of the base model gives the textbook scale there.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: alpha is no number.
        InvalidValueError: alpha is NaN or infinite.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> dk(alpha=8.0).beta(sizes(64))
        0.125

    Reference:
        Yang et al. 2022, arXiv:2203.03466.
    """
    return Dk(finite(alpha, "alpha of dk"))
