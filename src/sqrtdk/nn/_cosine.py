"""Cosine attention with a learned gain; Henry et al. 2020 (arXiv:2010.04245), Swin V2 (arXiv:2111.09883)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from sqrtdk.nn._single import ScoreAttention
from sqrtdk.positions import PositionTerm
from sqrtdk.scales import ScaleRule
from sqrtdk.scales._numbers import whole
from sqrtdk.scores import LearnedGain, cosine
from sqrtdk.theory.parameters import Terms

if TYPE_CHECKING:
    from sqrtdk._shapes import Factor

_USUAL = {"l2": 10.0, "rms": 1.0, "layer": 1.0}


class CosineAttention(ScoreAttention):
    """softmax(g norm(q) . norm(k)) v with a gain g for each head, exp(min(theta, log(maximum))).

    The parameter is `score.gain.logit_scale`, (heads, 1, 1), theta.

    Args:
        heads: query heads, or 1 for one gain that all share.
        dropout: rate on the weights, in training only.
        norm: "l2", "rms" or "layer", see `sqrtdk.scores.cosine`; the last two also scale by 1/sqrt(E).
        gain: g at the start, above 0; None: 10 for l2, 1 for the others.
        maximum: of g.
        learned: False: g stays `gain`, and there is no parameter.
        scale: a number, a rule of `sqrtdk.scales` or a tensor in place of the norm's own.
        bias: a term of `sqrtdk.positions`.
        enable_gqa: fewer key and value heads than query heads.
        device: of the parameter.
        dtype: of the parameter.
        impl: as in `sqrtdk.attention`.

    Raises:
        InvalidTypeError: an argument is no number.
        InvalidValueError: an unknown norm, heads below 1, a gain not between 0 and its maximum.

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
        scale: float | Factor | ScaleRule | None = None,
        bias: PositionTerm | None = None,
        enable_gqa: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ) -> None:
        start = _USUAL.get(norm, 1.0) if gain is None else gain
        whole(heads, "heads", 1)
        found = LearnedGain(heads, start, maximum, device=device, dtype=dtype) if learned else start
        super().__init__(cosine(norm, found), dropout, scale=scale, bias=bias, enable_gqa=enable_gqa, impl=impl)
        self._terms = Terms((("h", heads),)) if learned else Terms()

    def score_terms(self) -> Terms:
        """One gain a head."""
        return self._terms
