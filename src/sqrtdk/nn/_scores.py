"""Modules without projections of q, k and v, one for each score.

- `ScaledDotProductAttention`: softmax(q k^T / sqrt(d_k)) v; Vaswani et al. 2017, arXiv:1706.03762, equation 1.
- `BilinearAttention`: "general" in Luong, Pham & Manning 2015, arXiv:1508.04025.
- `AdditiveAttention`: Bahdanau, Cho & Bengio 2015, arXiv:1409.0473.
- `CosineAttention`, with a learned gain: Henry et al. 2020, arXiv:2010.04245, and Swin V2, arXiv:2111.09883.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch

from sqrtdk.errors import InvalidValueError
from sqrtdk.nn._single import ScoreAttention
from sqrtdk.positions import PositionTerm
from sqrtdk.scales._numbers import whole_number
from sqrtdk.scores import LearnedGain, cosine, fresh_additive, fresh_bilinear
from sqrtdk.theory.parameters import Terms, additive_terms, bilinear_terms

if TYPE_CHECKING:
    from sqrtdk._named import AnyScale, AnyWindow
    from sqrtdk._shapes import Query


class ScaledDotProductAttention(ScoreAttention):
    """The textbook module, softmax(q k^T / sqrt(d_k)) v, without parameters of its own.

    Args:
        d_k: head dimension; a query of another dimension is refused, so that the scale is the paper's.
        dropout: rate on the weights, in training only.
        scale: a number, a rule of `sqrtdk.scales` or a tensor instead of 1/sqrt(d_k).
        bias: a term of `sqrtdk.positions`.
        softcap: c of c tanh(z / c).
        window: (left, right): row i sees keys i - left to i + right; or in a causal call a number of keys.
        enable_gqa: fewer key and value heads than query heads.
        impl: as in `sqrtdk.attention`.

    Raises:
        InvalidTypeError: `d_k` is not a whole number.
        InvalidValueError: `d_k` is below 1, or, in a call, differs from the query's.

    Example:
        >>> import torch
        >>> attend = ScaledDotProductAttention(64)
        >>> q = k = v = torch.randn(2, 8, 10, 64)
        >>> output, weights = attend(q, k, v, need_weights=True)
        >>> output.shape, weights.shape, attend.parameter_count()
        (torch.Size([2, 8, 10, 64]), torch.Size([2, 8, 10, 10]), 0)

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1.
    """

    def __init__(
        self,
        d_k: int,
        dropout: float = 0.0,
        *,
        scale: AnyScale | None = None,
        bias: PositionTerm | str | None = None,
        softcap: float | None = None,
        window: AnyWindow | None = None,
        enable_gqa: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__(
            None, dropout, scale=scale, bias=bias, softcap=softcap, window=window, enable_gqa=enable_gqa, impl=impl
        )
        self.d_k = whole_number(d_k, "d_k", 1)

    def forward(self, query: Query, *args: Any, **kwargs: Any) -> Any:
        """Return the attention of query, key and value.

        The arguments and results are those of `ScoreAttention.forward`.

        Raises:
            InvalidValueError: The last dimension of the query is not d_k; or as `ScoreAttention`.
        """
        if query.shape[-1] != self.d_k:
            raise InvalidValueError(
                f"this module scales for d_k = {self.d_k}; got a query of shape {tuple(query.shape)}",
                hint=f"Make it with d_k={query.shape[-1]}, the last dimension of the query.",
            )
        return super().forward(query, *args, **kwargs)

    def extra_repr(self) -> str:
        """Return the text that `print(module)` shows in parentheses, d_k first."""
        return f"d_k={self.d_k}, {super().extra_repr()}"


class BilinearAttention(ScoreAttention):
    """softmax(q^T W k / sqrt(E)) v, E channels of the query; `scale=1.0` is Luong's unscaled form.

    The parameter is `score.weight`.

    Args:
        query_dim: channels of the query.
        key_dim: channels of the key; None: `query_dim`.
        dropout: rate on the weights, in training only.
        heads: query heads, if each has its own form; None: one form for all.
        scale: a number, a rule of `sqrtdk.scales` or a tensor instead of 1/sqrt(E).
        device: of the parameter.
        dtype: of the parameter.
        impl: as in `sqrtdk.attention`.

    Raises:
        InvalidTypeError: A size is not a whole number.
        InvalidValueError: A size is below 1, or, in a call, differs from the query's or the key's.

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
        scale: AnyScale | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ) -> None:
        key_dim = query_dim if key_dim is None else key_dim
        score = fresh_bilinear(query_dim, key_dim, heads=heads, device=device, dtype=dtype)
        super().__init__(score, dropout, scale=scale, impl=impl)
        self._terms = bilinear_terms(query_dim, key_dim, heads=heads)

    def score_terms(self) -> Terms:
        """Return the terms of the score's parameters: d_q d_key, times h if each head has its own form."""
        return self._terms


class AdditiveAttention(ScoreAttention):
    """softmax(v . tanh(q Wq + k Wk + b)) value, unscaled unless a scale is given.

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
        InvalidTypeError: A size is not a whole number.
        InvalidValueError: A size is below 1, or, in a call, differs from the query's or the key's.

    Example:
        >>> attend = AdditiveAttention(4, 6, hidden=8)
        >>> attend(torch.randn(2, 3, 4), torch.randn(2, 5, 6), torch.randn(2, 5, 7)).shape
        torch.Size([2, 3, 7])
        >>> attend.parameter_formula, attend.parameter_count()
        ('d_q A + d_key A + A', 88)

    Reference:
        Bahdanau et al. 2015, arXiv:1409.0473.

    Differs from:
        Keras's layer of this name, which has no projections: it equals this one with the identity for both.
    """

    def __init__(
        self,
        query_dim: int,
        key_dim: int | None = None,
        hidden: int | None = None,
        dropout: float = 0.0,
        *,
        bias: bool = False,
        scale: AnyScale | None = None,
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
        """Return the terms of the score's parameters: d_q A + d_key A + A, and A for the bias."""
        return self._terms


# 10: the start in Swin V2's code, as q.k of unit vectors stays within -1 and 1. RMS norm and LayerNorm leave vectors of
# length sqrt(E), whose products 1/sqrt(E) brings to the size of the textbook's logits.
_COSINE_GAINS = {"l2": 10.0, "rms": 1.0, "layer": 1.0}


class CosineAttention(ScoreAttention):
    """softmax(g norm(q) . norm(k)) v with a gain g for each head, exp(min(theta, log(maximum))).

    The parameter is `score.gain.logit_scale`, (heads, 1, 1), theta.

    Args:
        heads: query heads, or 1 for one gain that all share.
        dropout: rate on the weights, in training only.
        norm: "l2", "rms" or "layer", see `sqrtdk.scores.cosine`; the last two also scale by 1/sqrt(E).
        gain: g at the start, above 0; None: 10 for l2, 1 for the others.
        maximum: of g.
        learned: False: g stays at `gain`, and there is no parameter.
        scale: a number, a rule of `sqrtdk.scales` or a tensor instead of the norm's own.
        bias: a term of `sqrtdk.positions`.
        enable_gqa: fewer key and value heads than query heads.
        device: of the parameter.
        dtype: of the parameter.
        impl: as in `sqrtdk.attention`.

    Raises:
        InvalidTypeError: An argument is not a number.
        InvalidValueError: The norm is unknown, heads is below 1, or the gain is not between 0 and its maximum.

    Example:
        >>> attend = CosineAttention(8)
        >>> q = torch.randn(2, 8, 5, 16)
        >>> attend(q, q, q).shape, attend.parameter_count()
        (torch.Size([2, 8, 5, 16]), 8)

    Reference:
        Liu et al. 2022, arXiv:2111.09883, section 3.2.
    """

    def __init__(
        self,
        heads: int = 1,
        dropout: float = 0.0,
        *,
        norm: Literal["l2", "rms", "layer"] = "l2",
        gain: float | None = None,
        maximum: float = 100.0,
        learned: bool = True,
        scale: AnyScale | None = None,
        bias: PositionTerm | str | None = None,
        enable_gqa: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ) -> None:
        start = _COSINE_GAINS.get(norm, 1.0) if gain is None else gain
        whole_number(heads, "heads", 1)
        found = LearnedGain(heads, start, maximum, device=device, dtype=dtype) if learned else start
        super().__init__(cosine(norm, found), dropout, scale=scale, bias=bias, enable_gqa=enable_gqa, impl=impl)
        self._terms = Terms((("h", heads),)) if learned else Terms()

    def score_terms(self) -> Terms:
        """Return the terms of the score's parameters: one gain per head if it is learned."""
        return self._terms
