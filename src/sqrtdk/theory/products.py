"""The dot product of independent random vectors: its moments, and the distribution of the logits under a scale.

With q_i of mean mq and variance vq, k_i of mean mk and variance vk, all independent, one component contributes mq mk
to the mean and vq vk + mq^2 vk + mk^2 vq to the variance, whatever the distributions. For Gaussian components

    K(t) = log E e^{t q_i k_i} = -1/2 log(1 - a t^2) + (b t + c t^2) / (1 - a t^2),    |t| < 1 / sqrt(a),
    a = vq vk,   b = mq mk,   c = (mq^2 vk + mk^2 vq) / 2,

and a sum of d components has d times these cumulants. Reference: C. C. Craig 1936, Annals of Mathematical Statistics
7, 1 (the product of two normal variables).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales import ScaleRule, sizes, sqrt_dk
from sqrtdk.scales._numbers import finite
from sqrtdk.theory._inversion import PairSum, log_normal_above
from sqrtdk.theory._numeric import at_least, extended, falling_roots, unit_interval, whole_count, whole_number


@dataclass(frozen=True, slots=True)
class Moments:
    """First four moments of a distribution.

    Attributes:
        mean: expectation.
        variance: mean square deviation.
        skewness: third central moment over variance^1.5; 0 where the variance is 0.
        excess_kurtosis: fourth central moment over variance^2, less the 3 of a normal; 0 where the variance is 0.
    """

    mean: float
    variance: float
    skewness: float
    excess_kurtosis: float

    @property
    def std(self) -> float:
        """Square root of the variance."""
        return math.sqrt(self.variance)


def dot_product_moments(
    dim: int,
    *,
    query_mean: float = 0.0,
    query_variance: float = 1.0,
    key_mean: float = 0.0,
    key_variance: float = 1.0,
) -> Moments:
    """Moments of q . k = sum of q_i k_i over `dim` independent components.

    mean = d b, variance = d (a + 2 c), third cumulant 6 a b d, fourth 6 a (a + 4 c) d, where for means mq, mk and
    variances vq, vk of the components a = vq vk, b = mq mk, c = (mq^2 vk + mk^2 vq) / 2. With means 0 and variances 1:
    mean 0, variance d, excess kurtosis 6 / d.

    Mean and variance hold for components of any distribution with these means and variances. Skewness and excess
    kurtosis hold for Gaussian components. None of the four is valid if components depend on one another: trained
    projections correlate them, and then |q|^2 and |k|^2 carry the variance in few directions.

    Args:
        dim: components, at least 1; d_k for the product of a query and a key.
        query_mean: mean of a component of the query.
        query_variance: its variance, at least 0.
        key_mean: mean of a component of the key.
        key_variance: its variance, at least 0.

    Returns:
        Moments, in units of query times key.

    Raises:
        InvalidTypeError: an argument is not a number, or dim is not a whole number.
        InvalidValueError: dim below 1, a negative variance, a number that is not finite, or moments that overflow.

    Example:
        >>> dot_product_moments(64)
        Moments(mean=0.0, variance=64.0, skewness=0.0, excess_kurtosis=0.09375)
        >>> dot_product_moments(4, query_mean=1.0, key_mean=2.0, key_variance=3.0).variance
        40.0

    Reference:
        Vaswani et al. 2017, arXiv:1706.03762, section 3.2.1, footnote 4, for means 0 and variances 1; C. C. Craig
        1936, Annals of Mathematical Statistics 7, 1, for the cumulants of a product of two normal variables.
    """
    return _moments(dim, *_abc(dim, query_mean, query_variance, key_mean, key_variance))


def _abc(dim: int, mq: float, vq: float, mk: float, vk: float) -> tuple[float, float, float]:
    size = float(whole_count(dim, "dim"))
    mq, mk = finite(mq, "query_mean"), finite(mk, "key_mean")
    vq, vk = at_least(vq, "query_variance"), at_least(vk, "key_variance")
    a, b, c = vq * vk, mq * mk, (mq * mq * vk + mk * mk * vq) / 2.0
    finite(size * b, "the mean of the product")
    finite(size * (a + 2.0 * c), "the variance of the product")
    return a, b, c


def _moments(dim: int, a: float, b: float, c: float) -> Moments:
    each = a + 2.0 * c
    if each == 0.0:
        return Moments(dim * b, 0.0, 0.0, 0.0)
    # The share of the variance from the product of both deviations; what a mean multiplies is Gaussian.
    share = a / each  # fraction of the variance
    skewness = 6.0 * share * (b / math.sqrt(each)) / math.sqrt(dim)
    return Moments(dim * b, dim * each, skewness, 6.0 * share * (2.0 - share) / dim)


@dataclass(frozen=True, slots=True)
class LogitDistribution:
    """Distribution of `scale` times the dot product of two independent Gaussian vectors; see `logit_distribution`.

    Attributes:
        dim: components.
        scale: factor on the product.
        moments: of the logits, in natural-log units.
        unit: |scale| sqrt(vq vk), the unit of `pairs`.
        pairs: the product; None if query or key does not vary, which makes the logits normal.
    """

    dim: int
    scale: float
    moments: Moments
    unit: float
    pairs: PairSum | None

    @property
    def mean(self) -> float:
        """Mean of the logits."""
        return self.moments.mean

    @property
    def std(self) -> float:
        """Standard deviation of the logits."""
        return self.moments.std

    @property
    def skewness(self) -> float:
        """Skewness of the logits."""
        return self.moments.skewness

    @property
    def excess_kurtosis(self) -> float:
        """Excess kurtosis of the logits."""
        return self.moments.excess_kurtosis

    def log_above(self, value: float) -> float:
        """Return the natural logarithm of P(z > value), accurate relative to itself even far out in the tail.

        Raises:
            InvalidTypeError: The value is not a real number.
            InvalidValueError: It is NaN.

        Example:
            >>> round(logit_distribution(512).log_above(40.0), 1)  # a normal would have -804.6
            -472.1
        """
        excess = extended(value, "value") - self.mean
        if self.std == 0.0:
            return 0.0 if excess < 0.0 else -math.inf
        return self._log_tail(excess, self.pairs)

    def log_below(self, value: float) -> float:
        """Return the natural logarithm of P(z <= value); errors as in `log_above`.

        Example:
            >>> round(math.exp(logit_distribution(64).log_below(0.0)), 12)
            0.5
        """
        excess = self.mean - extended(value, "value")
        if self.std == 0.0:
            return 0.0 if excess <= 0.0 else -math.inf
        return self._log_tail(excess, self.pairs.mirrored() if self.pairs else None)

    def _log_tail(self, excess: float, pairs: PairSum | None) -> float:
        return log_normal_above(excess / self.std) if pairs is None else pairs.log_above(excess / self.unit)

    def probability_within(self, low: float, high: float) -> float:
        """Return P(low <= z <= high), off by less than 1e-12; infinite ends are allowed.

        Raises:
            InvalidValueError: low is above high, or NaN.

        Example:
            >>> round(logit_distribution(8).probability_within(-3.0, 3.0), 4)  # 0.9973 for a normal
            0.9932
        """
        low, high = extended(low, "low"), extended(high, "high")
        if low > high:
            raise InvalidValueError(f"low is at most high; got {low} and {high}", hint="Swap them.")
        if self.std == 0.0:
            return 1.0 if low <= self.mean <= high else 0.0
        # From the nearer tail: 1 minus a probability near 1 would lose all digits of the other.
        if low >= self.mean:
            return math.exp(self.log_above(low)) - math.exp(self.log_above(high))
        if high <= self.mean:
            return math.exp(self.log_below(high)) - math.exp(self.log_below(low))
        return max(0.0, 1.0 - math.exp(self.log_below(low)) - math.exp(self.log_above(high)))

    def quantile(self, p: float) -> float:
        """Return the z below which a fraction p of the logits lies.

        Raises:
            InvalidValueError: p is outside 0 to 1.

        Example:
            >>> round(logit_distribution(64).quantile(0.999), 3)  # 3.090 for a normal
            3.166
        """
        p = unit_interval(p, "p")
        if self.std == 0.0:
            return self.mean
        if p in (0.0, 1.0):
            return math.inf if p else -math.inf
        mirrored = self.pairs.mirrored() if self.pairs else None
        # Solved on the side of the mean where the tail is small, in logarithms, so that p = 1e-300 has a quantile too.
        if p > math.exp(self._log_tail(0.0, mirrored)):
            return self.mean + self._excess(math.log1p(-p), self.pairs)
        return self.mean - self._excess(math.log(p), mirrored)

    def _excess(self, log_share: float, pairs: PairSum | None) -> float:
        """Return how far beyond the mean this fraction of the logits lies."""
        reach = self.std
        while self._log_tail(reach, pairs) > log_share:
            # The tail is exponential rather than Gaussian, so that no multiple of sigma bounds it in advance.
            reach *= 2.0

        def over(at: Sequence[float]) -> list[float]:
            return [self._log_tail(at[0], pairs) - log_share]

        return falling_roots(over, [0.0], [reach], relative=1e-14)[0]


def logit_distribution(
    dim: int,
    scale: float | ScaleRule | None = None,
    *,
    keys: int = 1,
    heads: int = 1,
    query_mean: float = 0.0,
    query_variance: float = 1.0,
    key_mean: float = 0.0,
    key_variance: float = 1.0,
) -> LogitDistribution:
    """Distribution of z = scale q . k, natural-log units, exact for independent Gaussian components.

        P(q . k > x) = 1 / (2 pi i) int e^{K(t) - t x} dt / t
        K(t) = d (-1/2 log(1 - a t^2) + (b t + c t^2) / (1 - a t^2))

    with a = vq vk, b = mq mk, c = (mq^2 vk + mk^2 vq) / 2 for means mq, mk and variances vq, vk. The integral is done
    numerically (P. Gil-Pelaez's formula on a bent path), accurate to 1e-12 and, in the tails, relative to itself. At
    d = 64, means 0, the tail beyond 2 standard deviations is 1.02 times that of the normal with the same variance,
    beyond 5 it is 4.8 times, and beyond 10 four million times.

    It is not valid if components are not Gaussian or depend on one another. Logits of one row share their query: given
    q they are normal with standard deviation scale |q| sqrt(vk), which has lighter tails.

    Args:
        dim: components d, the d_k of a head.
        scale: factor on the product: a number, a rule of `sqrtdk.scales`, or None for 1 / sqrt(d).
        keys: visible keys of the row, for rules that need them (log_n).
        heads: query heads, for rules with one factor per head; the factors must be equal.
        query_mean: mean of a component of the query.
        query_variance: its variance.
        key_mean: mean of a component of the key.
        key_variance: its variance.

    Returns:
        LogitDistribution.

    Raises:
        InvalidTypeError: An argument is not a number, or dim is not a whole number.
        InvalidValueError: A number is out of range, moments overflow, or a rule has unequal factors.

    Example:
        >>> scaled = logit_distribution(64)
        >>> scaled.std, scaled.excess_kurtosis
        (1.0, 0.09375)
        >>> from sqrtdk.scales import none
        >>> logit_distribution(64, none()).std
        8.0

    Reference:
        J. Gil-Pelaez 1951, Biometrika 38, 481.
    """
    dim = whole_count(dim, "dim")
    factor = _factor(
        dim, sqrt_dk() if scale is None else scale, whole_count(keys, "keys"), whole_number(heads, "heads", 1)
    )
    a, b, c = _abc(dim, query_mean, query_variance, key_mean, key_variance)
    product = _moments(dim, a, b, c)
    moments = Moments(
        finite(factor * product.mean, "the mean of the logits"),
        finite(factor * factor * product.variance, "the variance of the logits"),
        math.copysign(product.skewness, factor * product.skewness) if factor else 0.0,
        product.excess_kurtosis if factor else 0.0,
    )
    unit = abs(factor) * math.sqrt(a)
    pairs = None
    if unit > 0.0:
        of_query, of_key = float(query_mean) / math.sqrt(query_variance), float(key_mean) / math.sqrt(key_variance)
        plus, minus = (
            finite(share * share / 4.0, "the square of a mean over its standard deviation")
            for share in (of_query + of_key, of_query - of_key)
        )
        # q k = ((q + k)^2 - (q - k)^2) / 4: a difference of two chi-squares, which a negative scale exchanges.
        pairs = PairSum(dim, plus, minus) if factor > 0.0 else PairSum(dim, minus, plus)
    return LogitDistribution(dim, factor, moments, unit, pairs)


def _factor(dim: int, scale: float | ScaleRule, keys: int, heads: int) -> float:
    if not isinstance(scale, ScaleRule):
        return finite(scale, "the scale")
    beta = scale.beta(sizes(dim, heads, 1, keys, dtype=torch.float64))
    if not isinstance(beta, Tensor):
        return finite(beta, "the scale")
    factors = beta.detach().double().flatten()
    low, high = float(factors.min()), float(factors.max())
    if low != high:
        raise InvalidValueError(
            f"one distribution has one scale; got a rule with {factors.numel()} factors from {low:g} to {high:g}",
            hint="Make a distribution for each factor, and pass it as a number.",
        )
    return finite(low, "the scale")
