"""The interface of a position term, and the helpers that every term needs for a block of rows.

A term is added to the logits, and computed for a block of rows at a time. The helpers check the shapes of the block,
and give offsets i - j and the dtype to compute in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@runtime_checkable
class PositionTerm(Protocol):
    """A term of the logits that depends on the positions of row and key, and perhaps on q and k."""

    @property
    def content(self) -> bool:
        """Whether the term is part of the score, which the scale multiplies (Shaw), or a bias, which it does not."""

    def term(
        self,
        query: Float[Tensor, "*#BHq R E"],
        key: Float[Tensor, "*#BHq S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "*#BHq #R #S"]:
        """Return the term, broadcastable to (..., Hq, R, S).

        Args:
            query: (..., Hq, R, E), unscaled, the rows of the block.
            key: (..., Hq, S, E), key heads already repeated to the query's.
            rows: (R,) int64 positions of the rows.
            columns: (S,) int64 positions of the keys.
        """


@runtime_checkable
class DistanceTerm(PositionTerm, Protocol):
    """A bias that depends on the distance i - j alone; kernels read it from a table of L + S - 1 numbers per head."""

    def of_distance(
        self, distance: Int[Tensor, "*distances"], query: Float[Tensor, "*#BHq R E"]
    ) -> Float[Tensor, "#Hq *distances"]:
        """Return the bias of distances.

        Args:
            distance: int64 distances i - j, of any shape.
            query: (..., Hq, R, E), whose device and dtype count.

        Returns:
            (Hq or 1, *distances), in `wide_dtype(query)`.
        """


INIT_STD = 0.02  # for every learned table, as in DeBERTa's and Transformer-XL's code


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a term is computed: float64 for float64, else float32.

    In float16 an unscaled product overflows, and in both half types a long distance is rounded.
    """
    return torch.promote_types(x.dtype, torch.float32)


def offsets(rows: Int[Tensor, " R"], columns: Int[Tensor, " S"]) -> Int[Tensor, "R S"]:
    """Return the distance i - j of every row and key, (R, S) int64.

    Example:
        >>> offsets(torch.tensor([0, 1]), torch.tensor([0, 1, 2]))
        tensor([[ 0, -1, -2],
                [ 1,  0, -1]])
    """
    return rows[:, None] - columns[None, :]


def pick(products: Float[Tensor, "*BHq _ _"], index: Int[Tensor, "R S"], dim: int = -1) -> Float[Tensor, "*BHq R S"]:
    """Return one entry of the products for each row and key, (..., R, S).

    Args:
        products: (..., R, T) for dim -1, or (..., T, S) for dim -2.
        index: (R, S) int64 index into T.
        dim: Dimension of T.
    """
    return products.gather(dim, index.expand(*products.shape[:-2], *index.shape))


def check_block(
    name: str,
    query: Tensor,
    key: Tensor,
    rows: Tensor,
    columns: Tensor,
    *,
    heads: int | None = None,
    head_dim: int | None = None,
) -> None:
    """Check that the tensors of a block fit each other and the term.

    Args:
        name: Name of the term, for the error.
        query: (..., Hq, R, E).
        key: (..., Hq, S, E).
        rows: (R,) int64.
        columns: (S,) int64.
        heads: Number of heads that the term has; None: any.
        head_dim: Head dimension that the term has; None: any.

    Raises:
        InvalidTypeError: A tensor has another kind of dtype.
        InvalidValueError: The shapes don't fit.
    """
    for side, x, where in (("query", query, rows), ("key", key, columns)):
        if not x.is_floating_point():
            raise InvalidTypeError(
                f"{name}: the {side} is a floating point tensor; got {x.dtype}", hint=f"Convert the {side}."
            )
        if where.dtype != torch.int64:
            raise InvalidTypeError(
                f"{name}: positions are int64; those of the {side} are {where.dtype}", hint="Use torch.arange."
            )
        least = 2 if heads is None else 3
        if x.dim() < least:
            shape = "(..., length, E)" if heads is None else "(..., heads, length, E)"
            raise InvalidValueError(
                f"{name}: the {side} has shape {shape}; got {tuple(x.shape)}", hint=f"Add axes to the {side}."
            )
        if where.shape != x.shape[-2:-1]:
            raise InvalidValueError(
                f"{name}: the {side} has {x.shape[-2]} rows and positions of shape {tuple(where.shape)}",
                hint="Give one position for each row.",
            )
        if head_dim is not None and x.shape[-1] != head_dim:
            raise InvalidValueError(
                f"{name} is made for a head dimension of {head_dim}; the {side} {tuple(x.shape)} has {x.shape[-1]}",
                hint="Make the term for the head dimension of query and key.",
            )
    if heads is not None and (query.shape[-3], key.shape[-3]) not in ((heads, heads), (heads, 1), (1, heads)):
        raise InvalidValueError(
            f"{name} is made for {heads} heads; query {tuple(query.shape)} has {query.shape[-3]} and "
            f"key {tuple(key.shape)} {key.shape[-3]}",
            hint="Make the term for the heads of the query; repeat the key's heads to the query's.",
        )
