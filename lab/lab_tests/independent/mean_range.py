"""Mean and deviation of the dot product of components with mean 0 or 1/2 and variance 1, summed over all outcomes.

Components that are m + 1 or m - 1 have the mean m and the variance 1. A product of two has four outcomes; d independent
ones add up their means and their variances.
"""

import itertools
import math


def moments(m: float) -> tuple[float, float]:
    """Return the mean and the variance of the product of two components."""
    outcomes = [q * k for q, k in itertools.product((m - 1, m + 1), repeat=2)]
    mean = sum(outcomes) / 4
    return mean, sum((one - mean) ** 2 for one in outcomes) / 4


def figures() -> dict[str, tuple[float, float]]:
    found = {}
    for d in (16, 64, 256, 1024):
        for side, scale in (("unscaled", 1.0), ("scaled", 1 / math.sqrt(d))):
            for components, m in (("zero", 0.0), ("shifted", 0.5)):
                mean, variance = moments(m)
                place = f"components={components}; side={side}; d_k={d}"
                found[f"mean; {place}"] = scale * d * mean, 0.0
                found[f"deviation; {place}"] = scale * math.sqrt(d * variance), 0.0
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
