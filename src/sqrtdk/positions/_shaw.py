"""Relative keys (Shaw et al. 2018): a learned vector for each offset joins the key."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk.positions._term import INIT_STD, check_block, offsets, pick, wide_dtype
from sqrtdk.scales._numbers import whole

if TYPE_CHECKING:
    from jaxtyping import Float, Int


class Shaw(nn.Module):
    """Shaw's relative keys with their `table` (2k + 1, E) or (Hq, 2k + 1, E); made by `shaw`."""

    def __init__(
        self,
        head_dim: int,
        max_distance: int,
        heads: int | None,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.max_distance = max_distance
        shape = (2 * max_distance + 1, head_dim)
        self.table = nn.Parameter(torch.empty(shape if heads is None else (heads, *shape), device=device, dtype=dtype))
        nn.init.normal_(self.table, std=INIT_STD)

    @property
    def content(self) -> bool:
        """True: part of the score, which the scale multiplies."""
        return True

    def term(
        self,
        query: Float[Tensor, "*#BHq R E"],
        key: Float[Tensor, "... S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "*BHq R S"]:
        """The term (..., Hq, R, S), float32 (float64 for a float64 query); see `PositionTerm`."""
        check_block("Shaw's relative keys", query, key, rows, columns, heads=self.heads, head_dim=self.head_dim)
        dtype = wide_dtype(query)
        products = query.to(dtype) @ self.table.to(dtype).transpose(-1, -2)
        index = (-offsets(rows, columns)).clamp(-self.max_distance, self.max_distance) + self.max_distance
        return pick(products, index)


def shaw(
    head_dim: int,
    *,
    max_distance: int,
    heads: int | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Shaw:
    """Relative keys, q_i . r[clip(j - i, -k, k)] for row i and key j, with a learned table r.

    The products of a row with the whole table are computed and then picked from: 2k + 1 numbers a row.

    Args:
        head_dim: E of the query.
        max_distance: k, in tokens; all keys further away share a vector.
        heads: query heads where each has a table of its own; default None, one table for all, as in the paper.
        device: of the table.
        dtype: of the table.

    Returns:
        A module whose `table` (2k + 1, E) or (heads, 2k + 1, E), the row of offset -k first, starts normal with
        standard deviation 0.02. It is content: it joins the score before the scale.

    Raises:
        InvalidTypeError: a count that is no int.
        InvalidValueError: a count less than 1.

    Example:
        >>> q, at = torch.zeros(8, 3, 4), torch.arange(3)
        >>> shaw(4, max_distance=16).term(q, q, at, at).shape
        torch.Size([8, 3, 3])

    Reference:
        Shaw, Uszkoreit, Vaswani: Self-Attention with Relative Position Representations, 2018, equation 4.

    Differs from:
        the paper in that it leaves the values alone (the paper adds vectors to them too, and finds no gain).
    """
    whole(head_dim, "head_dim", 1)
    whole(max_distance, "max_distance", 1)
    if heads is not None:
        whole(heads, "heads", 1)
    return Shaw(head_dim, max_distance, heads, device, dtype)
