"""DeBERTa's disentangled terms (He et al. 2020): content to position, and position to content."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.positions._term import INIT_STD, check_block, offsets, pick, wide_dtype
from sqrtdk.scales._numbers import whole_number

if TYPE_CHECKING:
    from jaxtyping import Float, Int

DISENTANGLED_TERMS = ("c2p", "p2c")


def deberta_bucket(offset: Int[Tensor, "*offsets"], *, buckets: int, max_distance: int) -> Int[Tensor, "*offsets"]:
    """The bucket of each offset i - j in DeBERTa-v2: odd in the offset, exact up to m = buckets // 2.

    A larger distance n has the bucket m + ceil((m - 1) log(n / m) / log((max_distance - 1) / m)), which reaches
    2m - 1 at n = max_distance - 1.

    Args:
        offset: integers, the row's position less the key's.
        buckets: at least 2.
        max_distance: in tokens, above m + 1.

    Returns:
        int64 of the shape of `offset`, not clipped.

    Raises:
        InvalidTypeError: a count that is not an int.
        InvalidValueError: a count out of range.

    Example:
        >>> deberta_bucket(torch.tensor([-60, -4, 3, 9, 63]), buckets=16, max_distance=64).tolist()
        [-15, -4, 3, 9, 15]

    Reference:
        The code of DeBERTa-v2 (He, Liu, Gao, Chen); the logarithm is taken in float32 as there.
    """
    _check_span(max_distance, buckets)
    middle = buckets // 2
    distance = offset.abs()
    # Both logarithms by torch in float32, as in the published code: another one would move offsets at a bucket's
    # border.
    whole = torch.log(torch.tensor((max_distance - 1) / middle, dtype=torch.float32))
    steps = torch.ceil(torch.log(distance.clamp(min=middle).float() / middle) / whole * (middle - 1))
    return torch.where(distance <= middle, offset, offset.sign() * (steps.long() + middle))


def _check_span(max_distance: int, buckets: int | None) -> None:
    whole_number(max_distance, "max_distance", 1)
    if buckets is None:
        return
    whole_number(buckets, "buckets", 2)
    if max_distance <= buckets // 2 + 1:
        raise InvalidValueError(
            f"max_distance is above buckets // 2 + 1 = {buckets // 2 + 1}; got {max_distance}",
            hint="Choose a larger max_distance, fewer buckets, or buckets=None.",
        )


class Deberta(nn.Module):
    """DeBERTa's terms; made by `deberta`.

    Attributes:
        embedding: (2 * span, model_dim), the row of offset -span first.
        key_proj: gives the position keys of c2p, or None.
        query_proj: gives the position queries of p2c, or None.
        factor: 1 + number of terms, for the scale 1/sqrt(E * factor).
    """

    key_proj: nn.Module | None
    query_proj: nn.Module | None

    def __init__(
        self,
        heads: int,
        head_dim: int,
        embedding: nn.Parameter,
        key_proj: nn.Module | None,
        query_proj: nn.Module | None,
        max_distance: int,
        buckets: int | None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.head_dim = head_dim
        self.max_distance = max_distance
        self.buckets = buckets
        self.embedding = embedding
        self.key_proj = key_proj
        self.query_proj = query_proj
        # Number of summed products, by which DeBERTa's scale 1 / sqrt(d terms) grows.
        self.factor = 1 + (key_proj is not None) + (query_proj is not None)

    @property
    def content(self) -> bool:
        """True: the term is part of the score, which the scale multiplies."""
        return True

    def term(
        self,
        query: Float[Tensor, "*#B #Hq R E"],
        key: Float[Tensor, "*#B #Hq S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "*B Hq R S"]:
        """Return the terms of content and position, summed, (..., Hq, R, S); float64 for a float64 query, else float32.

        `PositionTerm.term` has the arguments.
        """
        check_block("DeBERTa", query, key, rows, columns, heads=self.heads, head_dim=self.head_dim)
        index, dtype = self._index(rows, columns), wide_dtype(query)
        parts = []
        if self.key_proj is not None:
            parts.append(pick(query.to(dtype) @ self._table(self.key_proj, dtype).transpose(-1, -2), index))
        if self.query_proj is not None:
            # p2c: positions as queries, content as keys; picked by the key's column, so along dimension -2.
            by_key = self._table(self.query_proj, dtype) @ key.to(dtype).transpose(-1, -2)
            parts.append(pick(by_key, index, -2))
        return parts[0] if len(parts) == 1 else parts[0] + parts[1]

    def _index(self, rows: Int[Tensor, " R"], columns: Int[Tensor, " S"]) -> Int[Tensor, "R S"]:
        offset = offsets(rows, columns)
        if self.buckets is not None:
            offset = deberta_bucket(offset, buckets=self.buckets, max_distance=self.max_distance)
        last = len(self.embedding) - 1
        # Offsets beyond the table share its ends, as in the published code.
        return (offset + len(self.embedding) // 2).clamp(0, last)

    def _table(self, projection: nn.Module, dtype: torch.dtype) -> Float[Tensor, "Hq offsets E"]:
        """Return the projected embedding, (Hq, 2 * span, E)."""
        table: Tensor = projection(self.embedding).reshape(-1, self.heads, self.head_dim)
        return table.transpose(0, 1).to(dtype)


def deberta(
    heads: int,
    head_dim: int,
    *,
    max_distance: int = 512,
    buckets: int | None = None,
    terms: Sequence[str] = DISENTANGLED_TERMS,
    model_dim: int | None = None,
    key_proj: nn.Module | None = None,
    query_proj: nn.Module | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Deberta:
    """DeBERTa's terms: c2p q_i . (W_k P[d(i, j)]) and p2c k_j . (W_q P[d(i, j)]), with a learned embedding P.

    d(i, j) = clip(i - j + span, 0, 2 * span - 1); with buckets, `deberta_bucket(i - j)` in place of i - j. The span
    is `buckets`, or `max_distance` where there are none. To be used with the scale 1/sqrt(E * factor):
    `sqrtdk.scales.disentangled(terms=term.factor)`, factor = 1 + number of terms.

    Each block of rows projects the embedding anew and, for p2c, holds 2 * span numbers for each key: larger blocks
    are cheaper.

    Args:
        heads: query heads.
        head_dim: E of the query.
        max_distance: in tokens; the model's `max_relative_positions`; default 512.
        buckets: the `position_buckets` of v2 and v3 (256 in the published models); default None, as in v1.
        terms: "c2p", "p2c" or both, the default.
        model_dim: width of the embedding; default heads * head_dim.
        key_proj: module from model_dim to heads * E for c2p, such as the attention's own key projection
            (`share_att_key` of v2 and v3); default: a new Linear.
        query_proj: the same for p2c.
        device: of the new parameters.
        dtype: of the new parameters.

    Returns:
        A module with `embedding` (2 * span, model_dim) and the projections. New parameters are normal with standard
        deviation 0.02, biases 0. It is content: it joins the score before the scale.

    Raises:
        InvalidTypeError: a count that is not an int, a projection that is not a module.
        InvalidValueError: a count out of range, unknown, doubled or no terms, a projection for a term left out.

    Example:
        >>> q, at = torch.zeros(8, 3, 4), torch.arange(3)
        >>> term = deberta(8, 4, buckets=32, max_distance=128)
        >>> term.term(q, q, at, at).shape, term.factor
        (torch.Size([8, 3, 3]), 3)

    Reference:
        He, Liu, Gao, Chen: DeBERTa, 2020, section 3.1.

    Differs from:
        the paper's equation, which takes d(j, i) for p2c: the code that trained the published weights takes d(i, j),
        and so does this. Dropout or a LayerNorm on the embedding is left to the caller.
    """
    whole_number(heads, "heads", 1)
    whole_number(head_dim, "head_dim", 1)
    width = heads * head_dim if model_dim is None else model_dim
    whole_number(width, "model_dim", 1)
    _check_span(max_distance, buckets)
    if not terms or len(set(terms)) != len(terms) or not set(terms) <= set(DISENTANGLED_TERMS):
        raise InvalidValueError(f"terms are c2p, p2c or both; got {list(terms)}", hint="Name each term once.")
    sizes = (width, heads * head_dim)
    key_proj = _projection("c2p", key_proj, terms, sizes, device, dtype)
    query_proj = _projection("p2c", query_proj, terms, sizes, device, dtype)
    span = max_distance if buckets is None else buckets
    embedding = nn.Parameter(torch.empty(2 * span, width, device=device, dtype=dtype))
    nn.init.normal_(embedding, std=INIT_STD)
    return Deberta(heads, head_dim, embedding, key_proj, query_proj, max_distance, buckets)


def _projection(
    name: str,
    given: nn.Module | None,
    terms: Sequence[str],
    sizes: tuple[int, int],
    device: torch.device | str | None,
    dtype: torch.dtype | None,
) -> nn.Module | None:
    """Return the projection of one term: given, new, or None if the term is left out."""
    if given is None and name in terms:
        made = nn.Linear(*sizes, device=device, dtype=dtype)
        nn.init.normal_(made.weight, std=INIT_STD)
        nn.init.zeros_(made.bias)
        return made
    if given is not None and not isinstance(given, nn.Module):
        raise InvalidTypeError(
            f"the projection of {name} is an nn.Module; got {type(given).__name__}", hint="Pass the module."
        )
    if given is not None and name not in terms:
        raise InvalidValueError(
            f"a projection for {name} needs that term; terms are {list(terms)}", hint="Leave out the projection."
        )
    return given
