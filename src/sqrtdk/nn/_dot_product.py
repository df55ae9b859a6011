"""softmax(q k^T / sqrt(d_k)) v as a module; Vaswani et al. 2017, arXiv:1706.03762, equation 1."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqrtdk.errors import InvalidValueError
from sqrtdk.nn._single import ScoreAttention
from sqrtdk.positions import PositionTerm
from sqrtdk.scales import ScaleRule
from sqrtdk.scales._numbers import whole

if TYPE_CHECKING:
    from sqrtdk._shapes import Factor, Query


class ScaledDotProductAttention(ScoreAttention):
    """The textbook module, softmax(q k^T / sqrt(d_k)) v, without parameters of its own.

    Args:
        d_k: head dimension; a query of another is refused, so that the scale is that of the paper.
        dropout: rate on the weights, in training only.
        scale: a number, a rule of `sqrtdk.scales` or a tensor in place of 1/sqrt(d_k).
        bias: a term of `sqrtdk.positions`.
        softcap: c of c tanh(z / c).
        window: (left, right): row i sees keys i - left to i + right.
        enable_gqa: fewer key and value heads than query heads.
        impl: as in `sqrtdk.attention`.

    Raises:
        InvalidTypeError: `d_k` is no whole number.
        InvalidValueError: `d_k` is below 1, or, in a call, not the query's.

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
        scale: float | Factor | ScaleRule | None = None,
        bias: PositionTerm | None = None,
        softcap: float | None = None,
        window: tuple[int | None, int | None] | None = None,
        enable_gqa: bool = False,
        impl: str = "auto",
    ) -> None:
        super().__init__(
            None, dropout, scale=scale, bias=bias, softcap=softcap, window=window, enable_gqa=enable_gqa, impl=impl
        )
        self.d_k = whole(d_k, "d_k", 1)

    def forward(self, query: Query, *args: Any, **kwargs: Any) -> Any:
        """Attend; arguments and results are those of `ScoreAttention.forward`."""
        if query.shape[-1] != self.d_k:
            raise InvalidValueError(
                f"this module scales for d_k = {self.d_k}; got a query of shape {tuple(query.shape)}",
                hint=f"Make it with d_k={query.shape[-1]}, the last dimension of the query.",
            )
        return super().forward(query, *args, **kwargs)

    def extra_repr(self) -> str:
        """d_k first."""
        return f"d_k={self.d_k}, {super().extra_repr()}"
