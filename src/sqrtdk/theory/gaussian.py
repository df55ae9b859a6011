"""Softmax of n iid Gaussian logits: expected entropy, peak and effective keys at finite n, and the way back.

In the limit (the random energy model of Derrida, 1981) the entropy is log n - sigma^2 / 2 up to
sigma_c = sqrt(2 log n) and frozen beyond; at finite n that is off by up to 2.6 nats around sigma_c. The table shipped
here is computed by quadrature (scripts/make_gaussian_table.py), its interpolation errs by less than 0.5% of log n.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

from sqrtdk.errors import InvalidValueError
from sqrtdk.theory._table import value

LARGEST_N = 2**24
_Numbers = Sequence[float]


def _checked(n: float, sigma: float) -> None:
    if not 1 <= n <= LARGEST_N:
        raise InvalidValueError(
            f"n is a number of keys from 1 to {LARGEST_N}; got {n}", hint="Leave out rows that see no key."
        )
    if not sigma >= 0:
        raise InvalidValueError(f"sigma is a standard deviation, at least 0; got {sigma}", hint="Pass its magnitude.")


def _each(quantity: str, n: float | _Numbers, sigma: float | _Numbers) -> list[float]:
    counts = [n] if isinstance(n, int | float) else list(n)
    sigmas = [sigma] if isinstance(sigma, int | float) else list(sigma)
    size = max(len(counts), len(sigmas)) if counts and sigmas else 0
    if size and any(len(values) not in (1, size) for values in (counts, sigmas)):
        raise InvalidValueError(
            f"n and sigma are numbers or lists of one length; got {len(counts)} and {len(sigmas)}",
            hint="Repeat the shorter one.",
        )
    pairs = [(counts[i % len(counts)], sigmas[i % len(sigmas)]) for i in range(size)]
    for pair in pairs:
        _checked(*pair)
    return [value(quantity, *pair) for pair in pairs]


def _shaped(values: list[float], n: float | _Numbers, sigma: float | _Numbers) -> float | list[float]:
    return values[0] if isinstance(n, int | float) and isinstance(sigma, int | float) else values


@overload
def expected_entropy_nats(n: float, sigma: float) -> float: ...
@overload
def expected_entropy_nats(n: _Numbers, sigma: float | _Numbers) -> list[float]: ...
@overload
def expected_entropy_nats(n: float, sigma: _Numbers) -> list[float]: ...
def expected_entropy_nats(n: float | _Numbers, sigma: float | _Numbers) -> float | list[float]:
    """Expected entropy of softmax(z), z of n iid N(0, sigma^2) logits, in nats.

    Args:
        n: keys, 1 to 2^24, not necessarily whole; a number or a list.
        sigma: standard deviation of the logits, at least 0; a number or a list.

    Returns:
        A number for two numbers, else a list; lists go element by element.

    Raises:
        InvalidValueError: n or sigma out of range, or lists of different lengths.

    Example:
        >>> round(expected_entropy_nats(512, 1.0), 2)
        5.74
        >>> expected_entropy_nats([1, 8], 0.0) == [0.0, math.log(8)]
        True
    """
    return _shaped(_each("entropy", n, sigma), n, sigma)


@overload
def expected_peak(n: float, sigma: float) -> float: ...
@overload
def expected_peak(n: _Numbers, sigma: float | _Numbers) -> list[float]: ...
@overload
def expected_peak(n: float, sigma: _Numbers) -> list[float]: ...
def expected_peak(n: float | _Numbers, sigma: float | _Numbers) -> float | list[float]:
    """Expected largest weight of softmax(z); arguments and errors as in `expected_entropy_nats`.

    Example:
        >>> expected_peak(1, 3.0)
        1.0
    """
    return _shaped([math.exp(-x) for x in _each("peak", n, sigma)], n, sigma)


@overload
def expected_effective_keys(n: float, sigma: float) -> float: ...
@overload
def expected_effective_keys(n: _Numbers, sigma: float | _Numbers) -> list[float]: ...
@overload
def expected_effective_keys(n: float, sigma: _Numbers) -> list[float]: ...
def expected_effective_keys(n: float | _Numbers, sigma: float | _Numbers) -> float | list[float]:
    """Expected 1 / sum of squared weights of softmax(z); arguments and errors as in `expected_entropy_nats`.

    Example:
        >>> round(expected_effective_keys(64, 0.0), 6)
        64.0
    """
    return _shaped([math.exp(x) for x in _each("effective", n, sigma)], n, sigma)


def critical_sigma(n: float) -> float:
    """sqrt(2 log n): where the random energy model freezes.

    Example:
        >>> round(critical_sigma(1024), 3)
        3.723
    """
    _checked(n, 0.0)
    return math.sqrt(2.0 * math.log(n))


def asymptotic_entropy_nats(n: float, sigma: float) -> float:
    """max(0, log n - sigma^2 / 2): the leading order for large n, for comparison; verdicts use the table.

    Example:
        >>> asymptotic_entropy_nats(1024, 100.0)
        0.0
    """
    _checked(n, sigma)
    return max(0.0, math.log(n) - sigma * sigma / 2.0)


def sigma_from_entropy(entropy_nats: float, n: float | _Numbers) -> float:
    """Effective sigma: the one at which Gaussian logits have this expected entropy.

    Args:
        entropy_nats: a mean entropy in nats.
        n: keys of the row, or a list with the keys of each row whose mean entropy this is (a causal call's 1..L, or
            a sample of it).

    Returns:
        sigma; 0 at log n and above, infinity at 0 and below, NaN where no row has a choice (n = 1) or for NaN.

    Raises:
        InvalidValueError: n out of range, or an empty list.

    Example:
        >>> round(sigma_from_entropy(expected_entropy_nats(512, 2.5), 512), 6)
        2.5
    """
    counts = [n] if isinstance(n, int | float) else list(n)
    if not counts:
        raise InvalidValueError("n holds at least one row; got an empty list", hint="Leave the head out.")
    for count in counts:
        _checked(count, 0.0)

    def mean(sigma: float) -> float:
        return sum(value("entropy", count, sigma) for count in counts) / len(counts)

    if math.isnan(entropy_nats) or max(counts) <= 1:
        return math.nan
    if entropy_nats <= 0.0:
        return math.inf
    if entropy_nats >= mean(0.0):
        return 0.0
    low, high = 0.0, 64.0
    last = mean(high)
    if entropy_nats <= last:
        return high * last / entropy_nats
    while high - low > 1e-9 * high:
        middle = (low + high) / 2.0
        low, high = (middle, high) if mean(middle) > entropy_nats else (low, middle)
    return (low + high) / 2.0
