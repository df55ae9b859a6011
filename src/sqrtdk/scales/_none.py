"""beta = 1: the score is the logit. T5 trains so (its initialisation holds the factor), and GPT-Neo."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.scales._rule import Sizes


@dataclass(frozen=True, slots=True)
class Unscaled:
    """See `none`."""

    def beta(self, sizes: Sizes) -> float:
        """1."""
        return 1.0


def none() -> Unscaled:
    """No scale, beta = 1.

    Returns:
        The rule.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> none().beta(sizes(64))
        1.0

    Reference:
        Raffel et al. 2020 (T5), arXiv:1910.10683. The initialisation is in the published code (tensorflow/mesh,
        mesh_tensorflow/transformer/attention.py): entries of W_q have the deviation (d_model d)^-1/2.
    """
    return Unscaled()
