"""Row statistics of logits as partial sums that merge: one type for tiles, split keys, devices and ranks.

For the logits z of a row over its n visible keys, with m = max z, the sums leave out one key that holds the maximum
(its term is exactly 1, 0, 1, 1). The remainder decides the statistics of a row that is almost one-hot, and a sum that
starts at 1 would round it away.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk._guesses import near_statistic
from sqrtdk._shown import Drawn

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, slots=True, eq=False)
class RowStats(Drawn):
    """Partial sums of rows of logits; every field is a float32 or float64 tensor of one shape, one entry per row.

    The properties are the statistics, under the names that `AuxOutput` gives them.

    A row of 0 visible keys is the neutral element of `merge`: max_logit -inf, min_logit +inf, every sum 0. A row with
    a NaN or +inf logit is NaN in every field except `keys`. A row whose visible logits are all -inf has max_logit -inf
    and NaN weights.
    """

    keys: Float[Tensor, "*rows"]  # visible keys n, including -inf logits
    max_logit: Float[Tensor, "*rows"]  # m; natural-log units, as are min_logit and mean
    min_logit: Float[Tensor, "*rows"]
    rest: Float[Tensor, "*rows"]  # sum of e^{z-m} over all visible keys except one that holds the maximum
    # the same for e^{2(z-m)}, over rest^2: squares leave the dtype's range long before rest does
    share2: Float[Tensor, "*rows"]
    share3: Float[Tensor, "*rows"]  # for e^{3(z-m)}, over rest^3
    a: Float[Tensor, "*rows"]  # sum of e^{z-m} (z-m), at most 0
    mean: Float[Tensor, "*rows"]
    m2: Float[Tensor, "*rows"]  # sum of (z - mean)^2; +inf if it overflows the dtype, and then so is the variance

    @classmethod
    def empty(
        cls,
        shape: tuple[int, ...],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> RowStats:
        """Return the neutral element: rows of the given shape that see no key.

        Example:
            >>> RowStats.empty((2,)).lse
            tensor([-inf, -inf])
        """
        low, high = -math.inf, math.inf
        start = {"max_logit": low, "min_logit": high}
        return cls(
            **{f.name: torch.full(shape, start.get(f.name, 0.0), dtype=dtype, device=device) for f in fields(cls)}
        )

    def __repr__(self) -> str:
        kind = str(self.keys.dtype).removeprefix("torch.")
        return f"RowStats({', '.join(STATISTIC_NAMES)}: each {tuple(self.keys.shape)} {kind})"

    if not TYPE_CHECKING:  # a type checker shall still refuse an unknown name

        def __getattr__(self, name: str) -> Any:
            raise AttributeError(f"RowStats has no {name!r}{near_statistic(name, STATISTIC_NAMES)}")

    def map(self, function: Callable[[Float[Tensor, "..."]], Float[Tensor, "..."]]) -> RowStats:
        """Return the same statistics with a function applied to every field, such as a reshape, a move or a cast."""
        return RowStats(**{f.name: function(getattr(self, f.name)) for f in fields(self)})

    def merge(self, other: RowStats) -> RowStats:
        """Return the statistics of the rows over both blocks of keys; associative and commutative up to rounding.

        The sums shift to the larger maximum; mean and m2 follow Chan, Golub and LeVeque (1979).

        Args:
            other: statistics of the same rows over a disjoint block of keys.

        Returns:
            RowStats of the broadcast shape.

        Example:
            >>> from sqrtdk.stats import row_stats
            >>> z = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
            >>> both = row_stats(z[:, :3]).merge(row_stats(z[:, 3:]))
            >>> torch.allclose(both.entropy_nats, row_stats(z).entropy_nats)
            True
        """
        shape = torch.broadcast_shapes(self.keys.shape, other.keys.shape)  # type: ignore[no-untyped-call]
        both = (
            torch.stack([getattr(part, field.name).expand(shape) for part in (self, other)]) for field in fields(self)
        )
        return RowStats(*both).merged(0)

    def merged(self, dim: int) -> RowStats:
        """Return the statistics of rows whose keys lie in blocks along a dimension: `merge` of all of them at once.

        Args:
            dim: dimension of the blocks; the result lacks it.

        Example:
            >>> from sqrtdk.stats import row_stats
            >>> z = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
            >>> halves = row_stats(z.view(2, 1, 2))
            >>> torch.allclose(halves.merged(0).variance, row_stats(z).variance)
            True
        """
        top, low = self.max_logit.amax(dim, keepdim=True), self.min_logit.amin(dim, keepdim=True)
        lowest = -torch.finfo(top.dtype).max
        gap = (self.max_logit - top.masked_fill(top == -math.inf, 0.0)).clamp(min=lowest)
        weight = gap.exp()  # factor on a block's sums: 1 if it holds the maximum, 0 if it has no key
        others = weight.frac()  # the weight of each block's own maximum, if it is not the row's
        ties = ((weight == 1.0).sum(dim, keepdim=True) - 1.0).clamp(min=0.0)
        n = self.keys.sum(dim, keepdim=True)
        blind = self.keys == 0
        # a mean relative to which nothing cancels
        start = self.mean.masked_fill(blind, -math.inf).amax(dim, keepdim=True)
        start = start.masked_fill(start == -math.inf, 0.0)
        step = (0.5 * self.mean - 0.5 * start).masked_fill(blind, 0.0)  # halves stay within the range of the dtype
        offset = (step * (self.keys / n.clamp(min=1.0))).sum(dim, keepdim=True)
        spread = self.m2 + self.keys * ((step - offset) * 2.0) ** 2
        mean = torch.maximum((0.5 * start + offset) * 2.0, low).masked_fill(n == 0, 0.0)
        overflowed = ((low == -math.inf) | (mean == -math.inf)) & (top < math.inf)

        def total(value: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
            return value.sum(dim, keepdim=True)

        part = weight * self.rest
        rest = total(part + others) + ties
        whole = rest.masked_fill(rest == 0, 1.0)
        part, others, ties = part / whole, others / whole, ties / whole

        joined = {
            "keys": n,
            "max_logit": top,
            "min_logit": low,
            "rest": rest,
            "share2": total(part**2 * self.share2 + others**2) + ties / whole,
            "share3": total(part**3 * self.share3 + others**3) + ties / whole / whole,
            "a": total(weight * self.a + weight * gap * (1.0 + self.rest)),
            "mean": mean.masked_fill(overflowed, -math.inf),
            "m2": total(spread.masked_fill(blind, 0.0)).masked_fill(overflowed, math.inf),
        }
        return RowStats(**{name: value.squeeze(dim) for name, value in joined.items()})

    def _weights_exist(self, value: Float[Tensor, "*rows"]) -> Float[Tensor, "*rows"]:
        return value.masked_fill(self.max_logit == -math.inf, math.nan)

    @property
    def l(self) -> Float[Tensor, "*rows"]:  # noqa: E743 - the name of the design and of every flash-attention paper
        """L = sum_j e^{z_j - m} over the visible keys, with m the row's maximum."""
        return self.rest + (self.keys > 0)

    @property
    def c2(self) -> Float[Tensor, "*rows"]:
        """c2 = sum_j e^{2 (z_j - m)} over the visible keys, with m the row's maximum."""
        return self.share2 * self.rest**2 + (self.keys > 0)

    @property
    def c3(self) -> Float[Tensor, "*rows"]:
        """c3 = sum_j e^{3 (z_j - m)} over the visible keys, with m the row's maximum."""
        return self.share3 * self.rest**3 + (self.keys > 0)

    @property
    def lse(self) -> Float[Tensor, "*rows"]:
        """Lse = log sum_j e^{z_j} over the visible keys, in natural-log units; -inf for a row that sees no key."""
        return self.max_logit + torch.log1p(self.rest)

    @property
    def peak(self) -> Float[Tensor, "*rows"]:
        """Largest weight, 1 / l; NaN, as every statistic of the weights, for a row that sees no key."""
        return self._weights_exist(1.0 / (1.0 + self.rest))

    @property
    def off_peak(self) -> Float[Tensor, "*rows"]:
        """1 - peak, computed without cancellation: the weight on all keys except one that has the maximum."""
        return self._weights_exist(self.rest / (1.0 + self.rest))

    @property
    def entropy_nats(self) -> Float[Tensor, "*rows"]:
        """Entropy of the weights in nats, log l - a / l.

        As a <= 0, both terms are positive and nothing cancels. NaN for a row that sees no key.
        """
        return self._weights_exist(torch.log1p(self.rest) - self.a / (1.0 + self.rest))

    @property
    def collision(self) -> Float[Tensor, "*rows"]:
        """sum_j p_j^2, the probability that two keys drawn by the weights are one; NaN for a row that sees no key."""
        return self._weights_exist(self.c2 / (1.0 + self.rest) ** 2)

    @property
    def effective_keys(self) -> Float[Tensor, "*rows"]:
        """1 / sum_j p_j^2, from 1 (one-hot) to the number of visible keys (uniform); NaN for a row that sees no key."""
        return self._weights_exist((1.0 + self.rest) ** 2 / self.c2)

    @property
    def jacobian_norm(self) -> Float[Tensor, "*rows"]:
        r"""Frobenius norm of the softmax Jacobian diag(p) - p p^T.

        With p the peak, q = 1 - p, and s2, s3 the sums of squares and cubes of the other weights,
        `|J|^2 = p^2 q^2 + s2 (1 + 2 p^2) + s2^2 - 2 s3`, which does not cancel near one-hot as
        `sum p^2 - 2 sum p^3 + (sum p^2)^2` does (the two are equal). q is taken out of the root, because its square
        leaves the range of float32 long before q does.
        """
        p, q = self.peak, self.off_peak
        share, cubes = self.share2, self.share3 * q  # s2 / q^2, s3 / q^2
        return q * (p**2 + share * (1.0 + 2.0 * p**2) + (share * q) ** 2 - 2.0 * cubes).clamp(min=0.0).sqrt()

    @property
    def variance(self) -> Float[Tensor, "*rows"]:
        """Variance of the visible logits, divided by n and not by n - 1; NaN for a row that sees no key."""
        return (self.m2 / self.keys.clamp(min=1.0)).masked_fill(self.keys == 0, math.nan)


def within_range(keys: int) -> float:
    """Return a power of two u such that u (z - m), over this many keys, sums to a finite number for any finite z and m.

    Example:
        >>> within_range(4)
        0.0625
    """
    return 0.5 ** (1 + keys.bit_length())


# What a reader asks a row for; the other fields are sums that `merge` needs.
STATISTIC_NAMES = (
    "keys", "max_logit", "min_logit", "mean", "variance", "lse", "entropy_nats", "collision", "effective_keys", "peak",
    "off_peak", "jacobian_norm",
)  # fmt: skip
ROW_STATS_FIELDS = tuple(field.name for field in fields(RowStats))
