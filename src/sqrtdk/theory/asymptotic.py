"""Softmax of n iid Gaussian logits in the limit of large n: the random energy model, and its error at finite n.

With L = log n, sigma_c = sqrt(2 L) and both of them large, the number of logits near sigma x is about e^{L - x^2 / 2}
up to x = sigma_c, and 0 beyond. So S = sum e^z is e^{L + sigma^2 / 2} below sigma_c, where it comes from the keys near
x = sigma, and e^{sigma sigma_c} above, where it comes from the largest few ("frozen"). The same holds for Q = sum e^{2
z} with 2 sigma in place of sigma, so Q is frozen from sigma_c / 2 on.

The forms are exact in the exponent: their error divided by L goes to 0 as n grows, while the error itself grows like
log L. `LARGEST_ERROR` has the largest error against the table over sigma from 0 to 64; verdicts use the table.

Reference: B. Derrida 1981, Physical Review B 24, 2613; for the weights above sigma_c, J. Pitman and M. Yor 1997,
Annals of Probability 25, 855.
"""

from __future__ import annotations

import math

from sqrtdk.theory.gaussian import critical_sigma, keys_of, sigma_of

# Largest |asymptotic - table| over sigma from 0 to 64, by n: nats, nats, a weight, a norm.
LARGEST_ERROR: dict[str, dict[int, float]] = {
    "entropy_nats": {2: 0.51, 16: 1.45, 256: 2.27, 2**12: 2.89, 2**16: 3.42, 2**20: 3.87},
    "log_effective_keys": {2: 0.47, 16: 1.28, 256: 1.93, 2**12: 2.38, 2**16: 2.72, 2**20: 3.0},
    "peak": {2: 0.27, 16: 0.49, 256: 0.6, 2**12: 0.65, 2**16: 0.68, 2**20: 0.71},
    "jacobian_norm": {2: 0.64, 16: 0.66, 256: 0.71, 2**12: 0.74, 2**16: 0.76, 2**20: 0.77},
}


def asymptotic_entropy_nats(n: float, sigma: float) -> float:
    """max(0, log n - sigma^2 / 2): entropy of the softmax, in nats.

    With L = log n and S = sum e^z: log S - sum p z = (L + sigma^2 / 2) - sigma^2 below sigma_c = sqrt(2 L), where the
    weight is near z = sigma^2. Exact to first order in L as n grows. Off by at most 0.51 nats at n = 2 and 3.87 at
    n = 2^20, both at sigma_c (see `LARGEST_ERROR`): for numbers take `expected_entropy_nats`.

    Args:
        n: keys, 1 to 2^24.
        sigma: standard deviation of the logits, natural-log units, at least 0.

    Returns:
        The entropy in nats.

    Raises:
        InvalidTypeError: n or sigma is not a real number.
        InvalidValueError: n or sigma is NaN or out of range.

    Example:
        >>> asymptotic_entropy_nats(1024, 100.0)
        0.0

    Reference:
        B. Derrida 1981, Physical Review B 24, 2613.
    """
    n, sigma = keys_of(n), sigma_of(sigma)
    return max(0.0, math.log(n) - sigma * sigma / 2.0)


def asymptotic_log_effective_keys(n: float, sigma: float) -> float:
    """log(S^2 / Q): log n - sigma^2 up to sigma_c / 2, (sigma_c - sigma)^2 up to sigma_c, 0 beyond.

    With L = log n, sigma_c = sqrt(2 L), S = sum e^z and Q = sum e^{2 z}: S is e^{L + sigma^2 / 2} up to sigma_c, Q is
    e^{L + 2 sigma^2} up to sigma_c / 2 and e^{2 sigma sigma_c} beyond. Exact to first order in L as n grows. Off by at
    most 0.47 at n = 2 and 3.0 at n = 2^20, at 0.9 sigma_c (see `LARGEST_ERROR`): for numbers take
    `expected_effective_keys`.

    Args:
        n: keys, 1 to 2^24.
        sigma: standard deviation of the logits, natural-log units, at least 0.

    Returns:
        The natural logarithm of a number of keys.

    Raises:
        InvalidTypeError: n or sigma is not a real number.
        InvalidValueError: n or sigma is NaN or out of range.

    Example:
        >>> round(asymptotic_log_effective_keys(1024, 1.0), 3)  # the table has 5.957
        5.931

    Reference:
        B. Derrida 1981, Physical Review B 24, 2613.
    """
    n, sigma = keys_of(n), sigma_of(sigma)
    critical = critical_sigma(n)
    if sigma <= critical / 2.0:
        return math.log(n) - sigma * sigma
    return max(0.0, critical - sigma) ** 2


def asymptotic_peak(n: float, sigma: float) -> float:
    """e^{sigma sigma_c} / S: exp(-(sigma_c - sigma)^2 / 2) below sigma_c, 1 beyond.

    The largest of n standard normals is near sigma_c = sqrt(2 log n), and S = sum e^z near n e^{sigma^2 / 2} below it.
    Exact in the exponent as n grows. Too large wherever it is off: by at most 0.27 at n = 2 and 0.71 at n = 2^20, just
    below sigma_c (see `LARGEST_ERROR`): for numbers take `expected_peak`.

    Args:
        n: keys, 1 to 2^24.
        sigma: standard deviation of the logits, natural-log units, at least 0.

    Returns:
        A weight, without unit, 0 to 1.

    Raises:
        InvalidTypeError: n or sigma is not a real number.
        InvalidValueError: n or sigma is NaN or out of range.

    Example:
        >>> asymptotic_peak(1024, 100.0)
        1.0

    Reference:
        B. Derrida 1981, Physical Review B 24, 2613.
    """
    n, sigma = keys_of(n), sigma_of(sigma)
    return math.exp(-(max(0.0, critical_sigma(n) - sigma) ** 2) / 2.0)


def asymptotic_jacobian_norm(n: float, sigma: float) -> float:
    """Root mean square Frobenius norm of the softmax Jacobian J = diag(p) - p p^T, with L = log n, sigma_c = sqrt(2 L).

    exp((sigma^2 - L) / 2) up to sigma_c / sqrt(3): the root of E sum p^2, which comes from keys near x = 2 sigma, more
    than there are in a typical row. exp(-(sigma_c^2 / sigma - sigma)^2 / 16) up to sigma_c: rare rows with one key so
    large, x = (sigma_c^2 / sigma + sigma) / 2, that it takes about half of the weight. Beyond, with m = sigma_c /
    sigma, the weights are a Poisson-Dirichlet sequence of index m, for which with i, j, k unlike
    E sum p_i^2 p_j^2 = m (1 - m)^2 / 6 and E sum p_i^2 p_j p_k = m^2 (1 - m) / 3, so that E |J|_F^2 = m (1 - m) / 3.

    Off by at most 0.64 at n = 2 and 0.77 at n = 2^20, at sigma_c (see `LARGEST_ERROR`), since the exponent alone
    reaches 1 there; from 2 to 10 sigma_c within 13% of the table at n = 16 and 3.5% at n = 2^20.
    For numbers take `expected_jacobian_norm`.

    Args:
        n: keys, 1 to 2^24.
        sigma: standard deviation of the logits, natural-log units, at least 0.

    Returns:
        The norm, without unit.

    Raises:
        InvalidTypeError: n or sigma is not a real number.
        InvalidValueError: n or sigma is NaN or out of range.

    Example:
        >>> round(asymptotic_jacobian_norm(512, 22.6), 3)  # the table has 0.198
        0.21

    Reference:
        B. Derrida 1981, Physical Review B 24, 2613; J. Pitman and M. Yor 1997, Annals of Probability 25, 855.
    """
    n, sigma = keys_of(n), sigma_of(sigma)
    critical = critical_sigma(n)
    if sigma >= critical:
        m = critical / sigma if sigma > 0.0 else 0.0
        return math.sqrt(m * (1.0 - m) / 3.0)
    if sigma * math.sqrt(3.0) <= critical:
        return math.exp((sigma * sigma - math.log(n)) / 2.0)
    return math.exp(-((critical**2 / sigma - sigma) ** 2) / 16.0)
