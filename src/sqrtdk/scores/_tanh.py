"""v . tanh(q + k) for every pair: what additive scores have in common."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sqrtdk.scores._weights import check_heads

if TYPE_CHECKING:
    from jaxtyping import Float


def tanh_pairs(
    query: Float[Tensor, "*#BHq R A"],
    key: Float[Tensor, "*#BHq S A"],
    v: Float[Tensor, " A"] | Float[Tensor, "Hq A"] | None,
) -> Float[Tensor, "*BHq R S"]:
    """Scores of queries and keys.

    Args:
        query: projected, bias included.
        key: projected.
        v: (A,), or (Hq, A) for each head; None: all ones.
    """
    # In place: the sum is needed by no derivative, and a block is the largest tensor of the call.
    bent = (query.unsqueeze(-2) + key.unsqueeze(-3)).tanh_()
    if v is None:
        return bent.sum(-1)
    if v.ndim == 2 and query.ndim == 2:
        v = v[0]
    product = bent.flatten(-3, -2) @ v.to(bent.dtype).unsqueeze(-1)
    return product.reshape(bent.shape[:-1])


def check_v(v: Float[Tensor, " A"] | Float[Tensor, "Hq A"], query: Float[Tensor, "... L E"], what: str) -> None:
    """Refuse a v that does not fit the heads of a query."""
    check_heads(v, 2, query, what, "query")
