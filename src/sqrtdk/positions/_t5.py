"""T5's relative bias (Raffel et al. 2020): one learned number a head for each bucket of distances."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError
from sqrtdk.positions._term import INIT_STD, check_block, offsets, wide_dtype
from sqrtdk.scales._numbers import whole

if TYPE_CHECKING:
    from jaxtyping import Float, Int


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
        InvalidTypeError: a count that is no int.
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
    whole(num_buckets, "num_buckets", 4 if bidirectional else 2)
    whole(max_distance, "max_distance", 1)
    exact = num_buckets // (4 if bidirectional else 2)
    if max_distance <= exact:
        raise InvalidValueError(
            f"max_distance is above the {exact} distances that have a bucket each; got {max_distance}",
            hint="Choose a larger max_distance or fewer buckets.",
        )


class T5Bias(nn.Module):
    """T5's bias with its table `embedding.weight` (num_buckets, H); made by `t5_bias`."""

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
        """False: a bias, which the scale does not multiply."""
        return False

    def term(
        self,
        query: Float[Tensor, "*#B #Hq R E"],
        key: Float[Tensor, "*#B #Hq S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "Hq R S"]:
        """The bias (Hq, R, S), float32 (float64 for a float64 query); see `PositionTerm`."""
        check_block("T5's bias", query, key, rows, columns, heads=self.heads)
        bucket = t5_bucket(
            -offsets(rows, columns),
            bidirectional=self.bidirectional,
            num_buckets=self.num_buckets,
            max_distance=self.max_distance,
        )
        table = self.embedding.weight.to(wide_dtype(query))
        return nn.functional.embedding(bucket, table).permute(2, 0, 1)


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
        InvalidTypeError: a count that is no int.
        InvalidValueError: a count out of range, as in `t5_bucket`.

    Example:
        >>> q, at = torch.zeros(8, 3, 4), torch.arange(3)
        >>> t5_bias(8).term(q, q, at, at).shape
        torch.Size([8, 3, 3])

    Reference:
        Raffel et al.: Exploring the Limits of Transfer Learning, 2020, section 2.1.
    """
    whole(heads, "heads", 1)
    _check_buckets(bidirectional, num_buckets, max_distance)
    return T5Bias(heads, bidirectional, num_buckets, max_distance, device, dtype)
