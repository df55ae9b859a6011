"""Ranges of floating dtypes: largest number, spacing, margin, and a forecast for products of Gaussians."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from sqrtdk.errors import InvalidTypeError
from sqrtdk.theory._numeric import extended, falling_roots, finite, whole_count
from sqrtdk.theory.products import LogitDistribution, logit_distribution

RANGE_DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
SURE = math.log(40.0)  # of the expected number of pairs: with 40, the chance of none is e^-40
NODES, NODE_STEP = 40, 0.08  # of the double exponential rule, to either side


def _info(dtype: torch.dtype | str) -> torch.finfo:
    found = RANGE_DTYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise InvalidTypeError(
            f"dtype is a floating dtype or one of {', '.join(RANGE_DTYPES)}; got {dtype}",
            hint="Pass e.g. torch.bfloat16.",
        )
    return torch.finfo(found)


def largest_finite(dtype: torch.dtype | str) -> float:
    """Largest finite number of a floating dtype: (2 - 2^-m) 2^E with m bits of mantissa and the largest exponent E.

    This formula is for formats with infinities. float8_e4m3fn has none: it uses the top exponent for numbers as well,
    except for one pattern (NaN), and ends at 448. The value is exact.

    Args:
        dtype: a floating torch.dtype, or its name with or without "torch.".

    Returns:
        The number, without unit.

    Raises:
        InvalidTypeError: dtype is not a floating dtype.

    Example:
        >>> largest_finite("float16"), largest_finite("float8_e4m3fn")
        (65504.0, 448.0)

    Reference:
        IEEE 754-2019; for fp8 P. Micikevicius et al. 2022, arXiv:2209.05433; torch.finfo.
    """
    return float(_info(dtype).max)


def overflow_margin(max_product: float, dtype: torch.dtype | str) -> float:
    """largest_finite(dtype) / |max_product|: below 1 the product overflows.

    It is accurate to within half a spacing: a product less than that above the largest finite number rounds down to it.
    It concerns the product alone: partial sums of a dot product may be larger, if the dtype holds those too.

    Args:
        max_product: largest |q . k| as the dtype stores it; infinity if it overflowed.
        dtype: the dtype that stores it.

    Returns:
        The margin, without unit; infinity for 0, 0 for infinity.

    Raises:
        InvalidTypeError: dtype is not a floating dtype, or max_product no real number.
        InvalidValueError: max_product is NaN.

    Example:
        >>> overflow_margin(131008.0, torch.float16)
        0.5

    Reference:
        IEEE 754-2019, section 4.3.1 (rounding and overflow).
    """
    product = abs(extended(max_product, "max_product"))
    largest = largest_finite(dtype)
    if math.isinf(product):
        return 0.0
    return largest / product if product != 0.0 else math.inf


def spacing(value: float, dtype: torch.dtype | str) -> float:
    """Distance from |value| to the next larger number of the dtype: eps 2^floor(log2 |value|), eps = 2^-m.

    A stored logit errs by up to half of it, and its weight by up to the factor e^(spacing / 2): at an offset of 50
    bfloat16 steps by 0.25, so that weights err by up to 13%. Below the smallest normal number the spacing is that of
    the subnormal numbers; hardware that flushes them to 0 has none there.

    Args:
        value: a magnitude within the dtype's range; beyond the largest finite number the result is infinity.
        dtype: a floating dtype.

    Returns:
        The distance, in the unit of the value.

    Raises:
        InvalidTypeError: dtype is not a floating dtype, or value no real number.
        InvalidValueError: value is NaN.

    Example:
        >>> spacing(50.0, "bfloat16"), spacing(1.0, "float32") == 2.0**-23
        (0.25, True)

    Reference:
        IEEE 754-2019, section 3.3; for fp8 P. Micikevicius et al. 2022, arXiv:2209.05433.
    """
    info = _info(dtype)
    magnitude = abs(extended(value, "value"))
    if magnitude > info.max:
        return math.inf
    exponent = math.frexp(max(magnitude, info.tiny))[1] - 1
    return float(info.eps) * 2.0**exponent


@dataclass(frozen=True, slots=True)
class RangeForecast:
    """The effect of a dtype on the products of Gaussian queries and keys; see `range_forecast`.

    Attributes:
        dtype: name of the dtype that stores the products.
        std: standard deviation of the stored products.
        expected_max: expected largest magnitude of all pairs.
        largest_finite: largest finite number of the dtype.
        margin: largest_finite over expected_max; below 1 an overflow must be expected.
        overflow_probability: probability that at least one pair is beyond the range, after rounding.
        spacing_at_max: distance of neighbouring numbers at expected_max; infinity beyond the range.
    """

    dtype: str
    std: float
    expected_max: float
    largest_finite: float
    margin: float
    overflow_probability: float
    spacing_at_max: float


def range_forecast(
    dim: int,
    pairs: int,
    dtype: torch.dtype | str,
    *,
    scale_before: float = 1.0,
    query_mean: float = 0.0,
    query_variance: float = 1.0,
    key_mean: float = 0.0,
    key_variance: float = 1.0,
) -> RangeForecast:
    """Predict the effect of a dtype on `pairs` products scale_before q . k of independent Gaussian components.

    With T(x) = P(|scale_before q . k| > x), the exact tail of `logit_distribution`, and N pairs:

        E max = int_0^inf 1 - (1 - T(x))^N dx,    P(overflow) = 1 - (1 - T(limit))^N

    where the limit is half a spacing above the largest finite number: everything below rounds to it. Overflow then
    gives infinity; in float8_e4m3fn, which has none, NaN or the largest number, depending on the hardware or library.

    The N pairs are treated as independent. The products of L queries and S keys are not: those of one query share its
    length, so that large products come together. The probability of an overflow is then an upper bound. The expected
    maximum hardly changes (256 queries and 256 keys of dimension 64: 37.6 measured, against 37.7). The forecast is not
    valid for the effects of training on q and k: few large channels, correlated projections, outliers.

    Args:
        dim: components d of q and k.
        pairs: N, at least 1: batch x heads x L x S.
        dtype: of the stored products, which are assumed to be accumulated exactly and rounded once.
        scale_before: factor on q or k, before the product is stored; 1 if the scale comes afterwards.
        query_mean: mean of a component of the query.
        query_variance: its variance.
        key_mean: mean of a component of the key.
        key_variance: its variance.

    Returns:
        RangeForecast.

    Raises:
        InvalidTypeError: dtype is not a floating dtype, or an argument is not a number.
        InvalidValueError: dim or pairs is below 1, a variance negative, a number not finite, or moments overflow a
            float.

    Example:
        >>> forecast = range_forecast(128, 2**24, "float16", query_variance=900.0, key_variance=900.0)
        >>> round(forecast.expected_max), round(forecast.margin, 2), round(forecast.overflow_probability, 3)
        (58963, 1.11, 0.021)

    Reference:
        The tail: J. Gil-Pelaez 1951, Biometrika 38, 481 (see `logit_distribution`); the largest of N: H. A. David and
        H. N. Nagaraja 2003, Order Statistics, chapter 2.
    """
    info = _info(dtype)
    logits = logit_distribution(
        dim,
        finite(scale_before, "scale_before"),
        query_mean=query_mean,
        query_variance=query_variance,
        key_mean=key_mean,
        key_variance=key_variance,
    )
    number = whole_count(pairs, "pairs")
    largest = largest_finite(dtype)
    expected = _expected_max(logits, number)
    return RangeForecast(
        dtype=str(info.dtype),
        std=logits.std,
        expected_max=expected,
        largest_finite=largest,
        margin=overflow_margin(expected, dtype),
        overflow_probability=_any_beyond(logits, number, largest + spacing(largest, dtype) / 2.0),
        spacing_at_max=spacing(expected, dtype),
    )


def _log_beyond(logits: LogitDistribution, x: float) -> float:
    """Return the natural logarithm of P(|z| > x)."""
    # Added as logarithms: far tails are below the smallest float.
    larger, smaller = sorted((logits.log_above(x), logits.log_below(-x)), reverse=True)
    return larger if smaller == -math.inf else larger + math.log1p(math.exp(smaller - larger))


def _any_beyond(logits: LogitDistribution, pairs: int, x: float) -> float:
    share = min(1.0, math.exp(_log_beyond(logits, x)))
    # 1 - (1 - share)^N would be 0 for shares below 1e-16, however many the pairs.
    return 1.0 if share == 1.0 else -math.expm1(pairs * math.log1p(-share))


def _expected_max(logits: LogitDistribution, pairs: int) -> float:
    if logits.std == 0.0:
        return abs(logits.mean)

    def expect(log_number: float) -> float:
        """Return the magnitude that this many pairs are expected to exceed."""

        def over(x: float) -> float:
            return math.log(pairs) + _log_beyond(logits, x) - log_number

        if over(0.0) <= 0.0:
            return 0.0
        high = abs(logits.mean) + logits.std
        while over(high) > 0.0:
            high *= 2.0
        return falling_roots(lambda xs: [over(xs[0])], [0.0], [high], relative=1e-4)[0]

    low, high = expect(SURE), expect(-SURE * 10.0)
    total = 0.0
    for k in range(-NODES, NODES + 1):  # x = middle + half tanh(pi/2 sinh t)
        t = k * NODE_STEP
        inner = math.pi / 2.0 * math.sinh(t)
        x = (low + high) / 2.0 + (high - low) / 2.0 * math.tanh(inner)
        total += _any_beyond(logits, pairs, x) * math.cosh(t) / math.cosh(inner) ** 2
    return low + total * NODE_STEP * math.pi / 4.0 * (high - low)
