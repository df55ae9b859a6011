"""beta = 1 / (t sqrt(d)): a softmax of temperature t over textbook logits.

Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531, section 2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqrtdk.scales._numbers import positive
from sqrtdk.scales._rule import Sizes


@dataclass(frozen=True, slots=True)
class Temperature:
    """See `temperature`."""

    t: float

    def beta(self, sizes: Sizes) -> float:
        """1 / (t sqrt(d))."""
        return 1.0 / (self.t * math.sqrt(sizes.head_dim))


def temperature(t: float) -> Temperature:
    """The textbook scale at a temperature, beta = 1 / (t sqrt(d)).

    Args:
        t: above 0; below 1 sharpens the weights, above 1 flattens them.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: t is no number.
        InvalidValueError: t is NaN, infinite, zero or negative.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> temperature(0.5).beta(sizes(64))
        0.25

    Reference:
        Hinton et al. 2015, arXiv:1503.02531.
    """
    return Temperature(positive(t, "a temperature"))
