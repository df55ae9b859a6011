"""Additive attention; Bahdanau, Cho & Bengio 2015, arXiv:1409.0473."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sqrtdk.nn._single import ScoreAttention
from sqrtdk.scales import ScaleRule
from sqrtdk.scores import fresh_additive
from sqrtdk.theory.parameters import Terms, additive_terms

if TYPE_CHECKING:
    from sqrtdk._shapes import Factor


class AdditiveAttention(ScoreAttention):
    """softmax(v . tanh(q Wq + k Wk + b)) value, not scaled where no scale is given.

    The parameters are `score.v`, `score.query_weight`, `score.key_weight` and `score.bias`, shared by all heads.

    Args:
        query_dim: channels of the query.
        key_dim: channels of the key; None: `query_dim`.
        hidden: A, width of the hidden layer; None: `query_dim`.
        dropout: rate on the weights, in training only.
        bias: whether the hidden layer has one.
        scale: a number, a rule of `sqrtdk.scales` or a tensor.
        device: of the parameters.
        dtype: of the parameters.
        impl: as in `sqrtdk.attention`.

    Raises:
        InvalidTypeError: a size is no whole number.
        InvalidValueError: a size is below 1, or, in a call, not that of query or key.

    Example:
        >>> attend = AdditiveAttention(4, 6, hidden=8)
        >>> attend(torch.randn(2, 3, 4), torch.randn(2, 5, 6), torch.randn(2, 5, 7)).shape
        torch.Size([2, 3, 7])
        >>> attend.parameter_formula, attend.parameter_count()
        ('d_q A + d_key A + A', 88)

    Reference:
        Bahdanau et al. 2015, arXiv:1409.0473.

    Differs from:
        Keras's layer of this name, which has no projections: it is this one with the identity for both.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        hidden: int | None = None,
        dropout: float = 0.0,
        *,
        bias: bool = False,
        scale: float | Factor | ScaleRule | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ) -> None:
        key_dim = query_dim if key_dim is None else key_dim
        hidden = query_dim if hidden is None else hidden
        score = fresh_additive(query_dim, key_dim, hidden, bias=bias, device=device, dtype=dtype)
        super().__init__(score, dropout, scale=scale, impl=impl)
        self._terms = additive_terms(query_dim, key_dim, hidden, bias=bias)

    def score_terms(self) -> Terms:
        """d_q A + d_key A + A, and A for the bias."""
        return self._terms
