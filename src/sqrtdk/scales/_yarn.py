"""beta = mscale^2 / sqrt(d), mscale = 0.1 m ln(factor) + 1: longer contexts get a lower temperature.

Peng et al. 2023, "YaRN", arXiv:2309.00071v2, section 3.4: 1 / t = mscale^2. DeepSeek-V2 and V3 apply it to the scale.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqrtdk.scales._numbers import finite, positive
from sqrtdk.scales._rule import Sizes


@dataclass(frozen=True, slots=True)
class Yarn:
    """See `yarn`."""

    mscale: float

    def beta(self, sizes: Sizes) -> float:
        """mscale^2 / sqrt(d)."""
        return self.mscale * self.mscale / math.sqrt(sizes.head_dim)


def yarn(mscale: float) -> Yarn:
    """YaRN's scale, beta = mscale^2 / sqrt(d).

    Args:
        mscale: above 0; see `yarn_mscale`.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: mscale is no number.
        InvalidValueError: mscale is NaN, infinite, zero or negative.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> yarn(2.0).beta(sizes(64))
        0.5

    Reference:
        Peng et al. 2023, arXiv:2309.00071; DeepSeek-AI 2024 (DeepSeek-V2), arXiv:2405.04434.

    Differs from:
        Code that multiplies the cosines and sines of the rotation by mscale, which has the same effect: there the scale
        is `sqrt_dk`, or the factor would count twice.
    """
    return Yarn(positive(mscale, "mscale of yarn"))


def yarn_mscale(factor: float, m: float = 1.0) -> float:
    """0.1 m ln(factor) + 1, and 1 for a context that is not extended.

    Args:
        factor: new context length over the original one, above 0.
        m: DeepSeek's `mscale_all_dim`; 1 in the paper.

    Returns:
        The factor on q and on k each; `yarn` squares it.

    Raises:
        InvalidTypeError: an argument is no number.
        InvalidValueError: an argument is NaN or infinite, or the factor is not above 0.

    Example:
        >>> round(yarn_mscale(40.0), 4)
        1.3689

    Reference:
        Peng et al. 2023, arXiv:2309.00071v2, section 3.4.
    """
    ratio = positive(factor, "the factor of yarn_mscale")
    multiplier = finite(m, "m of yarn_mscale")
    return 1.0 if ratio <= 1.0 else 0.1 * multiplier * math.log(ratio) + 1.0
