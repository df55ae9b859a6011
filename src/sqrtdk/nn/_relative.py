"""Attention with relative keys and values; Shaw, Uszkoreit & Vaswani 2018, arXiv:1803.02155."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError
from sqrtdk.nn._attend import Attended
from sqrtdk.nn._single import ScoreAttention
from sqrtdk.positions import shaw
from sqrtdk.positions._term import INIT_STD
from sqrtdk.scales._numbers import whole_number
from sqrtdk.stats.request import AuxRequest
from sqrtdk.theory.parameters import Terms

if TYPE_CHECKING:
    from jaxtyping import Float
    from typing_extensions import Never

    from sqrtdk._named import AnyScale
    from sqrtdk._shapes import AnyKey, Bias, Query, Value, Visible


class RelativeAttention(ScoreAttention):
    """softmax((q_i . k_j + q_i . a[j - i]) / sqrt(E)), weighing v_j, or v_j + b[j - i] with `relative_values`.

    Offsets j - i are clipped to -max_distance..max_distance. The parameters are `bias.table`, a, and
    `value_table`, b, each (2 max_distance + 1, channels).

    Args:
        d_k: E, head dimension of query and key.
        max_distance: in tokens; all keys further away share a vector.
        dropout: rate on the weights, in training only.
        relative_values: whether values have a table too, as in the paper, which requires weights (..., L, S) in memory.
            The paper's ablation sees no gain over a table for keys alone (table 3).
        value_dim: channels of the value, used with `relative_values`; None: `d_k`.
        heads: query heads, if each has its own table a; None: one table for all, as in the paper.
        scale: a number, a rule of `sqrtdk.scales` or a tensor instead of 1/sqrt(E).
        enable_gqa: fewer key and value heads than query heads.
        device: of the parameters.
        dtype: of the parameters.
        impl: as in `sqrtdk.attention`.

    Raises:
        InvalidTypeError: A size is not a whole number.
        InvalidValueError: A size is below 1, or, in a call, differs from the query's or the value's.

    Example:
        >>> attend = RelativeAttention(16, max_distance=4)
        >>> q = torch.randn(2, 8, 5, 16)
        >>> attend(q, q, q).shape, attend.parameter_formula, attend.parameter_count()
        (torch.Size([2, 8, 5, 16]), '(2 m + 1) d_k', 144)

    Reference:
        Shaw et al. 2018, arXiv:1803.02155, equations 3 and 4.
    """

    value_table: Float[Tensor, "offsets Ev"] | None

    def __init__(
        self,
        d_k: int,
        max_distance: int,
        dropout: float = 0.0,
        *,
        relative_values: bool = False,
        value_dim: int | None = None,
        heads: int | None = None,
        scale: AnyScale | None = None,
        enable_gqa: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        impl: str = "auto",
    ) -> None:
        table = shaw(d_k, max_distance=max_distance, heads=heads, device=device, dtype=dtype)
        super().__init__(None, dropout, scale=scale, bias=table, enable_gqa=enable_gqa, impl=impl)
        self.max_distance = max_distance
        rows, width = 2 * max_distance + 1, d_k if value_dim is None else whole_number(value_dim, "value_dim", 1)
        text = "(2 m + 1) d_k"
        self._terms = Terms((((text if heads is None else f"h {text}"), (heads or 1) * rows * d_k),))
        if relative_values:
            self.value_table = nn.Parameter(torch.empty(rows, width, device=device, dtype=dtype))
            nn.init.normal_(self.value_table, std=INIT_STD)
            self._terms = self._terms + Terms((("(2 m + 1) d_v", rows * width),))
        else:
            self.register_parameter("value_table", None)

    def forward(
        self,
        query: Query,
        key: AnyKey,
        value: Value,
        attn_mask: Visible | Bias | None = None,
        is_causal: bool = False,
        *,
        need_weights: bool = False,
        return_aux: AuxRequest | bool | None = None,
        **_unknown: Never,
    ) -> Any:
        """Return the attention of query, key and value, with relative positions.

        The arguments and results are those of `ScoreAttention.forward`.

        Raises:
            InvalidValueError: The value has another number of channels than the relative values; or as
                `ScoreAttention`.
        """
        if _unknown or self.value_table is None:
            return super().forward(
                query, key, value, attn_mask, is_causal, need_weights=need_weights, return_aux=return_aux, **_unknown
            )
        if value.shape[-1] != self.value_table.shape[-1]:
            raise InvalidValueError(
                f"the relative values have {self.value_table.shape[-1]} channels; got a value of {value.shape[-1]}",
                hint=f"Make the module with value_dim={value.shape[-1]}.",
            )
        # sum_j p_ij b[j - i] is a second product with the weights, which no fused kernel gives.
        found = super().forward(query, key, value, attn_mask, is_causal, need_weights=True, return_aux=return_aux)
        output, weights, aux = (*found, None)[:3]
        output = output + self._by_offset(weights) @ self.value_table.to(weights.dtype)
        return Attended(output, weights if need_weights else None, aux).asked()

    def _by_offset(self, weights: Float[Tensor, "*BHq L S"]) -> Float[Tensor, "*BHq L offsets"]:
        """Return the weights summed over the keys of each clipped offset, (..., L, 2 max_distance + 1)."""
        rows, columns = (torch.arange(n, device=weights.device) for n in weights.shape[-2:])
        offset = (columns[None, :] - rows[:, None]).clamp(-self.max_distance, self.max_distance) + self.max_distance
        summed = weights.new_zeros(*weights.shape[:-1], 2 * self.max_distance + 1)
        return summed.scatter_add(-1, offset.expand(weights.shape), weights)

    def bias_terms(self) -> Terms:
        """Return the terms of the position tables: (2 m + 1) d_k, and (2 m + 1) d_v with relative values."""
        return self._terms
