"""Bilinear attention, "general" in Luong, Pham & Manning 2015, arXiv:1508.04025."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sqrtdk.nn._single import ScoreAttention
from sqrtdk.scales import ScaleRule
from sqrtdk.scores import fresh_bilinear
from sqrtdk.theory.parameters import Terms, bilinear_terms

if TYPE_CHECKING:
    from sqrtdk._shapes import Factor


class BilinearAttention(ScoreAttention):
    """softmax(q^T W k / sqrt(E)) v, E channels of the query; `scale=1.0` is Luong's unscaled form.

    The parameter is `score.weight`.

    Args:
        query_dim: channels of the query.
        key_dim: channels of the key; None: `query_dim`.
        dropout: rate on the weights, in training only.
        heads: query heads where each has a form of its own; None: one for all.
        scale: a number, a rule of `sqrtdk.scales` or a tensor in place of 1/sqrt(E).
        device: of the parameter.
        dtype: of the parameter.
        impl: as in `sqrtdk.attention`.

    Raises:
        InvalidTypeError: a size is no whole number.
        InvalidValueError: a size is below 1, or, in a call, not that of query or key.

    Example:
        >>> attend = BilinearAttention(4, 6)
        >>> attend(torch.randn(2, 3, 4), torch.randn(2, 5, 6), torch.randn(2, 5, 7)).shape, attend.parameter_count()
        (torch.Size([2, 3, 7]), 24)

    Reference:
        Luong et al. 2015, arXiv:1508.04025, section 3.1.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        dropout: float = 0.0,
        *,
        heads: int | None = None,
        scale: float | Factor | ScaleRule | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ) -> None:
        key_dim = query_dim if key_dim is None else key_dim
        score = fresh_bilinear(query_dim, key_dim, heads=heads, device=device, dtype=dtype)
        super().__init__(score, dropout, scale=scale, impl=impl)
        self._terms = bilinear_terms(query_dim, key_dim, heads=heads)

    def score_terms(self) -> Terms:
        """d_q d_key, for each head that has its own."""
        return self._terms
