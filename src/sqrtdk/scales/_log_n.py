"""beta_i = s log(n_i) / (log(base) sqrt(d)), n_i the keys that row i sees: weights keep their sharpness as n grows.

Two sources, one formula:

- base = e: Chiang & Cholak 2022 ("Overcoming a Theoretical Limitation of Self-Attention", arXiv:2202.12172) with
  s = 1, and Nakanishi 2025 (SSMax, arXiv:2501.19399), which learns s for every head.
- base = m, the length at which the rule is the textbook scale: Su Jianlin 2021 (kexue.fm/archives/8823), log_m n.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales._numbers import finite
from sqrtdk.scales._rule import Sizes

if TYPE_CHECKING:
    from sqrtdk._shapes import Factor


@dataclass(frozen=True, slots=True)
class LogN:
    """See `log_n`."""

    s: float
    base: float

    def beta(self, sizes: Sizes) -> Factor:
        """Broadcastable to (..., Hq, L, 1): s log_base(n) / sqrt(d)."""
        # A row without keys has no logits: any finite factor will do, and log 0 would turn them into NaN.
        keys = sizes.visible_keys().clamp(min=1.0)
        return keys.log() * (self.s / (math.log(self.base) * math.sqrt(sizes.head_dim)))


def log_n(s: float = 1.0, base: float = math.e) -> LogN:
    """A scale that grows with the logarithm of the visible keys, beta_i = s log_base(n_i) / sqrt(d).

    A row that sees one key gets 0: its only weight is 1 at any scale. For a learned s of every head (SSMax) pass the
    rule to `learned`.

    Args:
        s: a finite number without unit.
        base: above 1; e for Chiang & Cholak and SSMax, the training length in keys for Su's log_m n.

    Returns:
        The rule; its beta is a tensor, since n differs from row to row under a mask.

    Raises:
        InvalidTypeError: an argument is no number.
        InvalidValueError: an argument is NaN or infinite, or the base is not above 1.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> log_n(base=512).beta(sizes(64, key_len=512))
        tensor([[0.1250]])

    Reference:
        Chiang & Cholak 2022, arXiv:2202.12172; Su 2021, kexue.fm/archives/8823; Nakanishi 2025, arXiv:2501.19399.

    Differs from:
        The papers, where n is the length of the sequence: here a row under a causal mask has its own n, as in SSMax's
        use in a decoder, and padding is not counted.
    """
    number = finite(base, "the base of log_n")
    if number <= 1.0:
        raise InvalidValueError(
            f"the base of log_n is above 1; got {number}", hint="Pass math.e, or the training length in keys."
        )
    return LogN(finite(s, "s of log_n"), number)
