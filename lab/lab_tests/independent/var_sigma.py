"""Variance of a dot product over d sigma^2, for both readings of sigma^2.

The variance of the product depends on the components only through their means and variances, so components that are +-s
stand for normal ones. Their product is a sum of d signs, times s^2; its second moment is summed over all outcomes.
"""

import math


def second_moment(d: int, variance_of_component: float) -> float:
    signs = sum(math.comb(d, k) * (2 * k - d) ** 2 for k in range(d + 1))
    return variance_of_component**2 * float(signs // 2**d)


def figures() -> dict[str, tuple[float, float]]:
    found = {}
    for d in (16, 64, 256):
        for sigma in (0.25, 0.5, 1.0, 2.0):
            # a product of two components of variance v has the variance v^2
            for reading, variance in (("component", sigma**2), ("product", sigma)):
                key = f"variance_over_d_sigma_squared; reading={reading}; sigma={sigma}; d_k={d}"
                found[key] = second_moment(d, variance) / (d * sigma**2), 0.0
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
