"""Softmax of n iid Gaussian logits at finite n: expected entropy, peak, effective keys and norm of the Jacobian.

With z_i iid N(0, sigma^2), S = sum e^{z_i} and p_i = e^{z_i} / S, identities such as 1/S = int_0^inf e^{-tS} dt turn
expectations over all n keys into integrals of one key's Laplace transform, here phi(u) = E exp(-e^{u + z}). The shipped
table is computed from them by quadrature (scripts/make_gaussian_table.py), not simulated, and interpolated by cubic
splines.

For whole n from 2 to 2^24 and sigma from 0 to 64, the largest relative errors against the quadrature are: entropy 6e-5,
peak 6e-4, effective keys 1.4e-4, norm of the Jacobian 1.7e-4. Between whole numbers n is a smooth continuation. Beyond
sigma = 64 the functions follow the law of large sigma (entropy, log of effective keys and -log of the peak as 1 /
sigma, the norm as 1 / sqrt(sigma)): off by 2% at 100 and by 4% at 200 for n = 2^20, less for fewer keys. They are not
valid if the logits of a row are not Gaussian (skewed, few large outliers), unequal in variance, or dependent; given the
query, products with iid Gaussian keys satisfy all three conditions.

The limit of large n is in `sqrtdk.theory.asymptotic`; near the critical sigma it is off by nats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Real
from typing import Any, overload

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.theory._numeric import extended
from sqrtdk.theory._table import table_value

# The table behind these functions ends there; beyond, its interpolation is not checked.
LARGEST_N = 2**24
_Numbers = Iterable[float]


def keys_of(n: object) -> float:
    """Return `n` as a number of keys within the table's range.

    Raises:
        InvalidTypeError: It is not a real number.
        InvalidValueError: It is NaN or out of range.
    """
    count = extended(n, "n")
    if not 1 <= count <= LARGEST_N:
        raise InvalidValueError(
            f"n is a number of keys from 1 to {LARGEST_N}; got {n}", hint="Leave out rows that see no key."
        )
    return count


def sigma_of(sigma: object) -> float:
    """Return `sigma` as a standard deviation, infinity included.

    Raises:
        InvalidTypeError: It is not a real number.
        InvalidValueError: It is NaN or negative.
    """
    deviation = extended(sigma, "sigma")
    if deviation < 0:
        raise InvalidValueError(f"sigma is a standard deviation, at least 0; got {sigma}", hint="Pass its magnitude.")
    return deviation


def as_list(values: Any, name: str) -> list[Any]:
    """Return one number, or all of several, as a list.

    Raises:
        InvalidTypeError: It is neither a number nor iterable.

    Example:
        >>> as_list(3, "n"), as_list((3, 4), "n")
        ([3], [3, 4])
    """
    if isinstance(values, Real):
        return [values]
    try:
        return list(values)
    except TypeError as error:
        raise InvalidTypeError(
            f"{name} is a real number or a list of them; got a {type(values).__name__}", hint="Pass a float or an int."
        ) from error


def _each(quantity: str, n: float | _Numbers, sigma: float | _Numbers) -> list[float]:
    counts = [keys_of(count) for count in as_list(n, "n")]
    sigmas = [sigma_of(deviation) for deviation in as_list(sigma, "sigma")]
    # As NumPy broadcasts: one n for many sigmas, or one sigma for many n.
    size = max(len(counts), len(sigmas)) if counts and sigmas else 0
    if size and any(len(values) not in (1, size) for values in (counts, sigmas)):
        raise InvalidValueError(
            f"n and sigma are numbers or lists of one length; got {len(counts)} and {len(sigmas)}",
            hint="Repeat the shorter one.",
        )
    return [table_value(quantity, counts[i % len(counts)], sigmas[i % len(sigmas)]) for i in range(size)]


def _shaped(values: list[float], n: float | _Numbers, sigma: float | _Numbers) -> float | list[float]:
    return values[0] if isinstance(n, Real) and isinstance(sigma, Real) else values


@overload
def expected_entropy_nats(n: float, sigma: float) -> float: ...
@overload
def expected_entropy_nats(n: _Numbers, sigma: float | _Numbers) -> list[float]: ...
@overload
def expected_entropy_nats(n: float, sigma: _Numbers) -> list[float]: ...
def expected_entropy_nats(n: float | _Numbers, sigma: float | _Numbers) -> float | list[float]:
    """Expected entropy of softmax(z), z of n iid N(0, sigma^2) logits, in nats.

        E[-sum_i p_i log p_i] = E[log S] - E[sum_i p_i z_i],    p_i = e^{z_i} / S,  S = sum_i e^{z_i}
        E[log S]        = int exp(-e^u) - phi(u)^n du,           phi(u) = E exp(-e^{u + z})
        E[sum_i p_i z_i] = n int E[z e^{u + z} exp(-e^{u + z})] phi(u)^(n - 1) du

    It is log n at sigma = 0, and near log n - sigma^2 / 2 while sigma is well below `critical_sigma`.

    The table is off by at most 6e-5 of the entropy for sigma up to 64 and whole n from 2 to 2^24. Beyond sigma = 64 the
    entropy is taken to fall as 1 / sigma, 2% off at 100 for n = 2^20. Not valid for logits that are not Gaussian, not
    alike in variance, or dependent.

    Args:
        n: keys, 1 to 2^24, not necessarily whole; a number or a list.
        sigma: standard deviation of the logits, natural-log units, at least 0; a number or a list.

    Returns:
        A number for two numbers, else a list; lists go element by element.

    Raises:
        InvalidTypeError: n or sigma is not a real number and no list of them.
        InvalidValueError: n or sigma is NaN or out of range, or the lists differ in length.

    Example:
        >>> round(expected_entropy_nats(512, 1.0), 2)
        5.74
        >>> expected_entropy_nats([1, 8], 0.0) == [0.0, math.log(8)]
        True

    Reference:
        The integrals: scripts/make_gaussian_table.py. Large n: B. Derrida 1981, Physical Review B 24, 2613.
    """
    return _shaped(_each("entropy", n, sigma), n, sigma)


@overload
def expected_peak(n: float, sigma: float) -> float: ...
@overload
def expected_peak(n: _Numbers, sigma: float | _Numbers) -> list[float]: ...
@overload
def expected_peak(n: float, sigma: _Numbers) -> list[float]: ...
def expected_peak(n: float | _Numbers, sigma: float | _Numbers) -> float | list[float]:
    """Return the expected largest weight of softmax(z), where z is n independent logits of N(0, sigma^2).

    The weight has no unit and lies between 1 / n and 1:

        E[max_i p_i] = n int dx N(x) int du e^w exp(-e^w) phi_x(u)^(n - 1),    w = u + sigma x

    with p_i = e^{z_i} / sum_j e^{z_j}, N the standard normal density, and phi_x(u) = E[exp(-e^{u + z}); z < sigma x]:
    the largest key at x, the others below it.

    The table is off by at most 6e-4 of the peak for sigma up to 64 and whole n from 2 to 2^24. Beyond sigma = 64
    -log(peak) is taken to fall as 1 / sigma, and with it 1 - peak. Not valid for logits that are not Gaussian, not
    alike in variance, or dependent.

    Args:
        n: keys, 1 to 2^24, not necessarily whole; a number or a list.
        sigma: standard deviation of the logits, natural-log units, at least 0; a number or a list.

    Returns:
        A number for two numbers, else a list; lists go element by element.

    Raises:
        InvalidTypeError: n or sigma is not a real number and no list of them.
        InvalidValueError: n or sigma is NaN or out of range, or the lists differ in length.

    Example:
        >>> expected_peak(1, 3.0)
        1.0
        >>> round(expected_peak(1024, 8.0), 3)
        0.709

    Reference:
        The integral: scripts/make_gaussian_table.py. Large n: B. Derrida 1981, Physical Review B 24, 2613.
    """
    # The table holds logarithms, as peak and effective keys cover many powers of ten.
    return _shaped([math.exp(-x) for x in _each("peak", n, sigma)], n, sigma)


@overload
def expected_effective_keys(n: float, sigma: float) -> float: ...
@overload
def expected_effective_keys(n: _Numbers, sigma: float | _Numbers) -> list[float]: ...
@overload
def expected_effective_keys(n: float, sigma: _Numbers) -> list[float]: ...
def expected_effective_keys(n: float | _Numbers, sigma: float | _Numbers) -> float | list[float]:
    """Expected 1 / (sum of squared weights) of softmax(z), z of n iid N(0, sigma^2) logits; a number of keys, 1 to n.

        E[1 / sum_i p_i^2] = E[S^2 / Q],    S = sum_i e^{z_i},  Q = sum_i e^{2 z_i}
            = int n E[e^w exp(-e^w)] f(u)^(n - 1) + n (n - 1) E[e^{w/2} exp(-e^w)]^2 f(u)^(n - 2) du

    with w = u + 2 z and f(u) = E exp(-e^w). It is the mean of the ratio, which few rows with many effective keys can
    hold up: not 1 / E[sum_i p_i^2], which is smaller.

    The table is off by at most 1.4e-4 of the number for sigma up to 64 and whole n from 2 to 2^24. Beyond sigma = 64
    its logarithm is taken to fall as 1 / sigma. Not valid for logits that are not Gaussian, not alike in variance, or
    dependent.

    Args:
        n: keys, 1 to 2^24, not necessarily whole; a number or a list.
        sigma: standard deviation of the logits, natural-log units, at least 0; a number or a list.

    Returns:
        A number for two numbers, else a list; lists go element by element.

    Raises:
        InvalidTypeError: n or sigma is not a real number and no list of them.
        InvalidValueError: n or sigma is NaN or out of range, or the lists differ in length.

    Example:
        >>> round(expected_effective_keys(64, 0.0), 6)
        64.0
        >>> round(expected_effective_keys(64, 1.0), 1)
        27.8

    Reference:
        The integral: scripts/make_gaussian_table.py. Large n: B. Derrida 1981, Physical Review B 24, 2613.
    """
    return _shaped([math.exp(x) for x in _each("effective", n, sigma)], n, sigma)


@overload
def expected_jacobian_norm(n: float, sigma: float) -> float: ...
@overload
def expected_jacobian_norm(n: _Numbers, sigma: float | _Numbers) -> list[float]: ...
@overload
def expected_jacobian_norm(n: float, sigma: _Numbers) -> list[float]: ...
def expected_jacobian_norm(n: float | _Numbers, sigma: float | _Numbers) -> float | list[float]:
    """Root mean square Frobenius norm of the softmax Jacobian, sqrt(E |J|_F^2) with J = diag(p) - p p^T; without unit.

        |J|_F^2   = sum p^2 - 2 sum p^3 + (sum p^2)^2 = 2 sum_{i != j} p_i^2 p_j^2 + sum_{i, j, k unlike} p_i^2 p_j p_k
        E |J|_F^2 = n (n - 1) / 6 int A_2 (2 A_2 phi^(n - 2) + (n - 2) A_1^2 phi^(n - 3)) du

    with A_k(u) = E[e^{kw} exp(-e^w)], w = u + z, and phi(u) = E exp(-e^w); z of n iid N(0, sigma^2) logits. The mean
    is over rows, of the square. It is sqrt(n - 1) / n at sigma = 0, largest (0.34 at n = 16, 0.30 at n = 2^20) around
    `critical_sigma`, and falls like 1 / sqrt(sigma) beyond: there the few rows whose two largest logits lie within a
    unit make the mean, and the typical row has a far smaller norm.

    The table is off by at most 1.7e-4 of the norm for sigma up to 64 and whole n from 2 to 2^24. Beyond sigma = 64
    the norm is taken to fall as 1 / sqrt(sigma). Not valid for logits that are not Gaussian, not alike in variance,
    or dependent.

    Args:
        n: keys, 1 to 2^24, not necessarily whole; a number or a list.
        sigma: standard deviation of the logits, natural-log units, at least 0; a number or a list.

    Returns:
        A number for two numbers, else a list; lists go element by element.

    Raises:
        InvalidTypeError: n or sigma is not a real number and no list of them.
        InvalidValueError: n or sigma is NaN or out of range, or the lists differ in length.

    Example:
        >>> expected_jacobian_norm(4, 0.0) == math.sqrt(3) / 4
        True
        >>> round(expected_jacobian_norm(512, 22.6), 3)
        0.198

    Reference:
        The integral: scripts/make_gaussian_table.py. Large n: see `asymptotic_jacobian_norm`.
    """
    return _shaped(_each("jacobian", n, sigma), n, sigma)


def critical_sigma(n: float) -> float:
    """sigma_c = sqrt(2 log n): the standard deviation of n Gaussian logits at which the random energy model freezes.

    Below it many keys share the weight, in the limit of large log n; above it few do, and the entropy is 0 to first
    order in log n. The largest of n standard normals is near sigma_c as well. Exact only in that limit: at finite n
    nothing jumps, and at sigma_c the entropy is 0.51 nats at n = 2 and 3.9 at n = 2^20 (`expected_entropy_nats`). For
    logits that are not Gaussian the threshold is elsewhere.

    Args:
        n: keys, 1 to 2^24, not necessarily whole.

    Returns:
        sigma_c, natural-log units as the logits; 0 for one key.

    Raises:
        InvalidTypeError: n is not a real number.
        InvalidValueError: n is NaN or out of range.

    Example:
        >>> round(critical_sigma(1024), 3)
        3.723

    Reference:
        B. Derrida 1981, Physical Review B 24, 2613.
    """
    return math.sqrt(2.0 * math.log(keys_of(n)))
