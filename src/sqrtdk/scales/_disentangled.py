"""beta = 1 / sqrt(d terms): the score is a sum of `terms` products, and its variance grows with their number.

He et al. 2021, "DeBERTa", arXiv:2006.03654, section 3.1: three terms, content to content, to position, and back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqrtdk.scales._numbers import whole
from sqrtdk.scales._rule import Sizes


@dataclass(frozen=True, slots=True)
class Disentangled:
    """See `disentangled`."""

    terms: int

    def beta(self, sizes: Sizes) -> float:
        """1 / sqrt(d terms)."""
        return 1.0 / math.sqrt(sizes.head_dim * self.terms)


def disentangled(terms: int) -> Disentangled:
    """DeBERTa's scale, beta = 1 / sqrt(d terms).

    Args:
        terms: products in the score, at least 1: 3 with content-to-position and position-to-content.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: terms is no whole number.
        InvalidValueError: terms is below 1.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> disentangled(4).beta(sizes(64))
        0.0625

    Reference:
        He et al. 2021, arXiv:2006.03654.
    """
    return Disentangled(whole(terms, "terms of disentangled", 1))
