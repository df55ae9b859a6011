"""Softmax of n iid Gaussian logits at finite n: expected entropy, peak, effective keys and norm of the Jacobian.

The table shipped here is computed by quadrature (scripts/make_gaussian_table.py), not simulated. For whole n from 2 to
2^24 and sigma from 0 to 64 the interpolated entropy is within 0.02% of its true value, the other three within 0.1%.
Beyond sigma = 64 they follow the law of large sigma (entropy, log of effective keys and -log of the peak as 1 / sigma,
the norm as 1 / sqrt(sigma)): off by 2% at 100 and by 4% at 200 for n = 2^20, less for fewer keys. Between whole
numbers n is a smooth continuation. The functions stop being valid where the logits of a row are not Gaussian
(skewed, few large outliers) or not alike in variance; given the query, products with iid Gaussian keys are.

The limit of large n is in `sqrtdk.theory.asymptotic`; near the critical sigma it is off by nats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import overload

from sqrtdk.errors import InvalidValueError
from sqrtdk.theory._table import value

LARGEST_N = 2**24
_Numbers = Sequence[float]


def checked(n: float, sigma: float) -> None:
    """Refuse an n or a sigma that no row of logits has."""
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
        checked(*pair)
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


@overload
def expected_jacobian_norm(n: float, sigma: float) -> float: ...
@overload
def expected_jacobian_norm(n: _Numbers, sigma: float | _Numbers) -> list[float]: ...
@overload
def expected_jacobian_norm(n: float, sigma: _Numbers) -> list[float]: ...
def expected_jacobian_norm(n: float | _Numbers, sigma: float | _Numbers) -> float | list[float]:
    """Root mean square Frobenius norm of the softmax Jacobian, sqrt(E |diag(p) - p p^T|_F^2).

    |J|_F^2 = sum p^2 - 2 sum p^3 + (sum p^2)^2; the mean is over rows, of the square. It is sqrt(n - 1) / n at
    sigma = 0, largest (0.34 at n = 16, 0.30 at n = 2^20) around the critical sigma, and falls like 1 / sqrt(sigma)
    beyond: there the few rows whose two largest logits lie within a unit make the mean, and the typical row has a far
    smaller norm. Arguments and errors as in `expected_entropy_nats`.

    Example:
        >>> expected_jacobian_norm(4, 0.0) == math.sqrt(3) / 4
        True
        >>> round(expected_jacobian_norm(512, 22.6), 3)
        0.198
    """
    return _shaped(_each("jacobian", n, sigma), n, sigma)


def critical_sigma(n: float) -> float:
    """sqrt(2 log n): where the random energy model freezes.

    Example:
        >>> round(critical_sigma(1024), 3)
        3.723
    """
    checked(n, 0.0)
    return math.sqrt(2.0 * math.log(n))
