"""beta = 1 / ((layer + 1) sqrt(d)): deeper layers get smaller logits, which half precision can hold.

GPT-2's `scale_attn_by_inverse_layer_idx` in transformers, as trained by Mistral (Stanford CRFM, 2021).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqrtdk.scales._numbers import whole
from sqrtdk.scales._rule import Sizes


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """See `layer_index`."""

    layer: int

    def beta(self, sizes: Sizes) -> float:
        """1 / ((layer + 1) sqrt(d))."""
        return 1.0 / ((self.layer + 1) * math.sqrt(sizes.head_dim))


def layer_index(layer: int) -> LayerIndex:
    """GPT-2's scale by depth, beta = 1 / ((layer + 1) sqrt(d)).

    Args:
        layer: index of the layer, from 0.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: the layer is no whole number.
        InvalidValueError: the layer is negative.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> layer_index(1).beta(sizes(64))
        0.0625

    Reference:
        Karamcheti et al. 2021, "Mistral: A Journey towards Reproducible Language Model Training", Stanford CRFM.
    """
    return LayerIndex(whole(layer, "the layer of layer_index", 0))
