"""beta = 1 / sqrt(d): the variance of a dot product of d independent terms grows with d, its root is divided out.

Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.2.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqrtdk.scales._rule import Sizes


@dataclass(frozen=True, slots=True)
class SqrtDk:
    """See `sqrt_dk`."""

    def beta(self, sizes: Sizes) -> float:
        """1 / sqrt(d)."""
        return 1.0 / math.sqrt(sizes.head_dim)


def sqrt_dk() -> SqrtDk:
    """The textbook scale, beta = 1 / sqrt(d), d the head dimension of the query.

    Returns:
        The rule.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> sqrt_dk().beta(sizes(64))
        0.125

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762.
    """
    return SqrtDk()
