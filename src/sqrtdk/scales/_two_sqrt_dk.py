"""beta = 1 / (2 sqrt(d)): half the textbook scale, logits of a quarter of its variance."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqrtdk.scales._rule import Sizes


@dataclass(frozen=True, slots=True)
class TwoSqrtDk:
    """See `two_sqrt_dk`."""

    def beta(self, sizes: Sizes) -> float:
        """1 / (2 sqrt(d))."""
        return 0.5 / math.sqrt(sizes.head_dim)


def two_sqrt_dk() -> TwoSqrtDk:
    """Half the textbook scale, beta = 1 / (2 sqrt(d)); the same as a temperature of 2.

    Returns:
        The rule.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> two_sqrt_dk().beta(sizes(64))
        0.0625

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762, for the scale that this halves.
    """
    return TwoSqrtDk()
