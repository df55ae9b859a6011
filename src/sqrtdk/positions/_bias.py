"""Biases on the logits, which the scale does not multiply: ALiBi and T5's buckets of distances.

- `alibi`, Press et al. 2021: a bias that falls linearly with the distance, one slope a head.
- `t5_bias`, Raffel et al. 2020: one learned number per head for each bucket of distances.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk._subclasses import check_class
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.positions._term import INIT_STD, check_block, offsets, wide_dtype
from sqrtdk.scales._numbers import whole_number

if TYPE_CHECKING:
    from jaxtyping import Float, Int


@dataclass(frozen=True, slots=True, eq=False)
class Alibi:
    """ALiBi's bias; made by `alibi`.

    Attributes:
        slopes: (Hq,), per token of distance.
        symmetric: whether keys ahead of the row are lowered as well.
        ahead: added to the position of every row.
    """

    slopes: Float[Tensor, " Hq"]
    symmetric: bool
    ahead: int = 0

    @property
    def content(self) -> bool:
        """False: the term is a bias, which the scale does not multiply."""
        return False

    def term(
        self,
        query: Float[Tensor, "*#B #Hq R E"],
        key: Float[Tensor, "*#B #Hq S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "Hq R S"]:
        """Return the bias, (Hq, R, S), in float32, or float64 for a float64 query.

        `PositionTerm.term` has the arguments.
        """
        check_block("ALiBi", query, key, rows, columns, heads=len(self.slopes))
        return self.of_distance(offsets(rows, columns), query)

    def of_distance(
        self, distance: Int[Tensor, "*distances"], query: Float[Tensor, "*#B #Hq R E"]
    ) -> Float[Tensor, "#Hq *distances"]:
        """Return the bias -slope (i - j) of distances, (Hq, ...); `DistanceTerm.of_distance` has the arguments."""
        distance = distance + self.ahead
        if self.symmetric:
            distance = distance.abs()
        slopes = self.slopes.to(device=query.device, dtype=wide_dtype(query))
        return -slopes.reshape(-1, *(1,) * distance.ndim) * distance


def alibi_slopes(heads: int) -> list[float]:
    """The slopes of the paper: 2^(-8 h / heads), h = 1..heads, for a power of two.

    Other head counts take the slopes of the power of two below, then every second slope of the power of two above.

    Args:
        heads: query heads, at least 1.

    Returns:
        One slope a head.

    Raises:
        InvalidTypeError: `heads` is not an int.
        InvalidValueError: `heads` is less than 1.

    Example:
        >>> alibi_slopes(4)
        [0.25, 0.0625, 0.015625, 0.00390625]
        >>> len(alibi_slopes(12))
        12

    Reference:
        Press, Smith, Lewis: Train Short, Test Long, 2021, and the code published with it.
    """
    whole_number(heads, "heads", 1)
    # 12 heads: the slopes of 8, then the 1st, 3rd, 5th and 7th of those of 16.
    below = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / below) for h in range(1, below + 1)]
    return slopes + [2.0 ** (-4.0 * h / below) for h in range(1, 2 * (heads - below), 2)]


def alibi(
    heads: int | None = None, *, slopes: Sequence[float] | Float[Tensor, " Hq"] | None = None, symmetric: bool = False
) -> Alibi:
    """ALiBi's bias, -m_h (i - j) for row i and key j of head h.

    It is for causal attention: a visible key ahead of the row would be raised. `symmetric=True` gives
    -m_h |i - j|, for attention in both directions. `attention(..., bias="alibi")` chooses between the two.

    Args:
        heads: query heads; the slopes are those of `alibi_slopes`.
        slopes: in place of `heads`: one slope a head, numbers or a tensor (Hq,), which may carry a gradient.
        symmetric: whether the distance counts in both directions; default False.

    Returns:
        A term that is not content: the scale does not multiply it.

    Raises:
        InvalidTypeError: `heads` is not an int, or a slope is not a real number.
        InvalidValueError: both or neither of `heads` and `slopes`; slopes not finite, or not of shape (Hq,).

    Example:
        >>> q, at = torch.zeros(2, 3, 4), torch.arange(3)
        >>> alibi(2).term(q, q, at, at)[0].tolist()[2]
        [-0.125, -0.0625, -0.0]

    Reference:
        Press, Smith, Lewis: Train Short, Test Long, 2021.
    """
    if (heads is None) == (slopes is None):
        raise InvalidValueError(
            f"ALiBi takes either heads or slopes; got heads={heads} and slopes={slopes}", hint="Pass one of them."
        )
    if heads is not None:
        return Alibi(torch.tensor(alibi_slopes(heads), dtype=torch.float64), symmetric)
    if not isinstance(slopes, Tensor):
        given = list(slopes or ())
        if not all(isinstance(m, (int, float)) and not isinstance(m, bool) for m in given):
            raise InvalidTypeError(f"slopes are numbers; got {given}", hint="Pass one number a head.")
        if not all(math.isfinite(m) for m in given):
            raise InvalidValueError(f"slopes are finite; got {given}", hint="Leave out what is not finite.")
        slopes = torch.tensor(given, dtype=torch.float64)
    check_class("slopes", slopes)
    if not slopes.is_floating_point():
        raise InvalidTypeError(f"slopes are a floating point tensor; got {slopes.dtype}", hint="Convert the slopes.")
    if slopes.dim() != 1 or len(slopes) == 0:
        raise InvalidValueError(
            f"slopes have shape (H,), at least one head; got {tuple(slopes.shape)}", hint="Pass one slope a head."
        )
    return Alibi(slopes, symmetric)


def t5_bucket(
    offset: Int[Tensor, "*offsets"], *, bidirectional: bool = True, num_buckets: int = 32, max_distance: int = 128
) -> Int[Tensor, "*offsets"]:
    """The bucket of each offset j - i: exact while small, logarithmic up to `max_distance`, one bucket beyond.

    With N buckets a direction and e = N // 2, a distance n < e has the bucket n, a larger one
    min(N - 1, e + floor((N - e) log(n / e) / log(max_distance / e))). In both directions each has half of the
    buckets, keys ahead the upper half; in one direction all keys ahead are in bucket 0.

    Args:
        offset: integers, the key's position less the row's.
        bidirectional: whether keys ahead have buckets of their own.
        num_buckets: at least 4 in both directions, at least 2 in one.
        max_distance: in tokens, above e.

    Returns:
        int64 of the shape of `offset`, in [0, num_buckets).

    Raises:
        InvalidTypeError: a count that is not an int.
        InvalidValueError: too few buckets, or a `max_distance` that leaves none to the logarithm.

    Example:
        >>> t5_bucket(torch.tensor([-200, -3, 0, 3, 200])).tolist()
        [15, 3, 0, 19, 31]

    Reference:
        Raffel et al.: Exploring the Limits of Transfer Learning, 2020, section 2.1. The logarithm is taken in
        float32, as in the code that trained the published weights: it decides what falls on a bucket's border.
    """
    _check_buckets(bidirectional, num_buckets, max_distance)
    count = num_buckets // 2 if bidirectional else num_buckets
    exact = count // 2
    distance = offset.abs() if bidirectional else (-offset).clamp(min=0)
    ratio = distance.clamp(min=exact).float() / exact
    steps = torch.log(ratio) / math.log(max_distance / exact) * (count - exact)
    bucket = torch.where(distance < exact, distance, (exact + steps.long()).clamp(max=count - 1))
    return bucket + (offset > 0) * count if bidirectional else bucket


def _check_buckets(bidirectional: bool, num_buckets: int, max_distance: int) -> None:
    whole_number(num_buckets, "num_buckets", 4 if bidirectional else 2)
    whole_number(max_distance, "max_distance", 1)
    exact = num_buckets // (4 if bidirectional else 2)
    if max_distance <= exact:
        raise InvalidValueError(
            f"max_distance is above the {exact} distances that have a bucket each; got {max_distance}",
            hint="Choose a larger max_distance or fewer buckets.",
        )


class T5Bias(nn.Module):
    """T5's bias with its table `embedding.weight`, (num_buckets, H); made by `t5_bias`."""

    def __init__(
        self,
        heads: int,
        bidirectional: bool,
        num_buckets: int,
        max_distance: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.heads = heads
        self.bidirectional = bidirectional
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self.embedding = nn.Embedding(num_buckets, heads, device=device, dtype=dtype)
        nn.init.normal_(self.embedding.weight, std=INIT_STD)

    @property
    def content(self) -> bool:
        """False: the term is a bias, which the scale does not multiply."""
        return False

    def term(
        self,
        query: Float[Tensor, "*#B #Hq R E"],
        key: Float[Tensor, "*#B #Hq S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "Hq R S"]:
        """Return the bias, (Hq, R, S), in float32, or float64 for a float64 query.

        `PositionTerm.term` has the arguments.
        """
        check_block("T5's bias", query, key, rows, columns, heads=self.heads)
        return self.of_distance(offsets(rows, columns), query)

    def of_distance(
        self, distance: Int[Tensor, "*distances"], query: Float[Tensor, "*#B #Hq R E"]
    ) -> Float[Tensor, "#Hq *distances"]:
        """Return the table's entries for the buckets of distances, (Hq, ...).

        `DistanceTerm.of_distance` has the arguments.
        """
        bucket = t5_bucket(
            -distance,
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        table = self.embedding.weight.to(wide_dtype(query))
        return nn.functional.embedding(bucket, table).movedim(-1, 0)


def t5_bias(
    heads: int,
    *,
    bidirectional: bool = True,
    num_buckets: int = 32,
    max_distance: int = 128,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> T5Bias:
    """T5's bias, b[bucket(j - i), h] for row i and key j of head h, with a learned table b.

    Args:
        heads: query heads.
        bidirectional: True in an encoder, False in a decoder; default True.
        num_buckets: default 32.
        max_distance: in tokens; all keys at it or further share a bucket; default 128.
        device: of the table.
        dtype: of the table.

    Returns:
        A module whose `embedding.weight` (num_buckets, heads) starts normal with standard deviation 0.02. It is not
        content: the scale does not multiply it. T5 itself uses the scale 1.

    Raises:
        InvalidTypeError: a count that is not an int.
        InvalidValueError: a count out of range, as in `t5_bucket`.

    Example:
        >>> q, at = torch.zeros(8, 3, 4), torch.arange(3)
        >>> t5_bias(8).term(q, q, at, at).shape
        torch.Size([8, 3, 3])

    Reference:
        Raffel et al.: Exploring the Limits of Transfer Learning, 2020, section 2.1.
    """
    whole_number(heads, "heads", 1)
    _check_buckets(bidirectional, num_buckets, max_distance)
    return T5Bias(heads, bidirectional, num_buckets, max_distance, device, dtype)
