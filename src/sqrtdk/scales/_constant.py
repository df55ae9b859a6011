"""Rules that give every row the same factor: a function of the head dimension and of the caller's arguments.

The variance of a dot product of d independent terms grows with d, so the textbook divides by its root. The other rules
are used by published models; each names its paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sqrtdk.scales._numbers import finite, positive, whole_number
from sqrtdk.scales._rule import Sizes


@dataclass(frozen=True, slots=True)
class SqrtDk:
    """The rule 1 / sqrt(d); see `sqrt_dk`."""

    def beta(self, sizes: Sizes) -> float:
        """Return 1 / sqrt(d)."""
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
        Vaswani et al. 2017, "Attention Is All You Need", arXiv:1706.03762, section 3.2.1.
    """
    return SqrtDk()


@dataclass(frozen=True, slots=True)
class Unscaled:
    """The rule 1; see `none`."""

    def beta(self, sizes: Sizes) -> float:
        """Return 1, whatever the sizes."""
        return 1.0


def none() -> Unscaled:
    """No scale, beta = 1: the score is the logit.

    T5 is trained without a scale, because its initialisation contains the factor, and so is GPT-Neo.

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


@dataclass(frozen=True, slots=True)
class Dk:
    """The rule alpha / d; see `dk`."""

    alpha: float

    def beta(self, sizes: Sizes) -> float:
        """Return alpha / d."""
        return self.alpha / sizes.head_dim


def dk(alpha: float = 1.0) -> Dk:
    """The scale of muP, beta = alpha / d.

    After training q and k are correlated, so their product grows like d, not like sqrt(d).

    Args:
        alpha: a finite number; the sqrt(d) of a base model gives that model the textbook scale.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: alpha is not a number.
        InvalidValueError: alpha is NaN or infinite.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> dk(alpha=8.0).beta(sizes(64))
        0.125

    Reference:
        Yang et al. 2022, "Tensor Programs V", arXiv:2203.03466, definition 4.1.
    """
    return Dk(finite(alpha, "alpha of dk"))


@dataclass(frozen=True, slots=True)
class TwoSqrtDk:
    """The rule 1 / (2 sqrt(d)); see `two_sqrt_dk`."""

    def beta(self, sizes: Sizes) -> float:
        """Return 1 / (2 sqrt(d))."""
        return 0.5 / math.sqrt(sizes.head_dim)


def two_sqrt_dk() -> TwoSqrtDk:
    """Half the textbook scale, beta = 1 / (2 sqrt(d)); equal to a temperature of 2.

    The logits have a quarter of the textbook variance.

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


@dataclass(frozen=True, slots=True)
class Fixed:
    """A fixed number as the scale; see `fixed`."""

    value: float

    def beta(self, sizes: Sizes) -> float:
        """Return the number, whatever the sizes."""
        return self.value


def fixed(value: float) -> Fixed:
    """One number, beta = value, for all sizes.

    Granite's `attention_multiplier` is such a number, and Gemma 2's `query_pre_attn_scalar` to the power -1/2.

    Args:
        value: a finite number; zero gives every visible key the same weight, a negative one reverses the order of
            the keys.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: the value is not a number.
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


@dataclass(frozen=True, slots=True)
class Temperature:
    """The rule 1 / (t sqrt(d)); see `temperature`."""

    t: float

    def beta(self, sizes: Sizes) -> float:
        """Return 1 / (t sqrt(d))."""
        return 1.0 / (self.t * math.sqrt(sizes.head_dim))


def temperature(t: float) -> Temperature:
    """The textbook scale at a temperature, beta = 1 / (t sqrt(d)): a softmax of temperature t over textbook logits.

    Args:
        t: above 0; below 1 sharpens the weights, above 1 flattens them.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: t is not a number.
        InvalidValueError: t is NaN, infinite, zero or negative.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> temperature(0.5).beta(sizes(64))
        0.25

    Reference:
        Hinton et al. 2015, "Distilling the Knowledge in a Neural Network", arXiv:1503.02531, section 2.
    """
    return Temperature(positive(t, "a temperature"))


@dataclass(frozen=True, slots=True)
class Disentangled:
    """The rule 1 / sqrt(d terms); see `disentangled`."""

    terms: int

    def beta(self, sizes: Sizes) -> float:
        """Return 1 / sqrt(d terms)."""
        return 1.0 / math.sqrt(sizes.head_dim * self.terms)


def disentangled(terms: int) -> Disentangled:
    """DeBERTa's scale, beta = 1 / sqrt(d terms).

    The score is a sum of `terms` products, and its variance grows with their number.

    Args:
        terms: number of products in the score, at least 1: 3 with content-to-position and position-to-content.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: terms is not an integer.
        InvalidValueError: terms is below 1.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> disentangled(4).beta(sizes(64))
        0.0625

    Reference:
        He et al. 2021, "DeBERTa", arXiv:2006.03654, section 3.1.
    """
    return Disentangled(whole_number(terms, "terms of disentangled", 1))


@dataclass(frozen=True, slots=True)
class LayerIndex:
    """The rule 1 / ((layer + 1) sqrt(d)); see `layer_index`."""

    layer: int

    def beta(self, sizes: Sizes) -> float:
        """Return 1 / ((layer + 1) sqrt(d))."""
        return 1.0 / ((self.layer + 1) * math.sqrt(sizes.head_dim))


def layer_index(layer: int) -> LayerIndex:
    """GPT-2's scale by depth, beta = 1 / ((layer + 1) sqrt(d)).

    Deeper layers get smaller logits, which fit into half precision. transformers has the rule as GPT-2's
    `scale_attn_by_inverse_layer_idx`.

    Args:
        layer: index of the layer, from 0.

    Returns:
        The rule.

    Raises:
        InvalidTypeError: the layer is not an integer.
        InvalidValueError: the layer is negative.

    Example:
        >>> from sqrtdk.scales import sizes
        >>> layer_index(1).beta(sizes(64))
        0.0625

    Reference:
        Karamcheti et al. 2021, "Mistral: A Journey towards Reproducible Language Model Training", Stanford CRFM.
    """
    return LayerIndex(whole_number(layer, "the layer of layer_index", 0))
