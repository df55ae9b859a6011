"""How far the scaled dot product of two N(0, 1) vectors is from N(0, 1): tails, kurtosis, Kolmogorov's distance.

The product has the variance-gamma density |x/2|^v K_v(|x|) / (sqrt(pi) Gamma(d/2)), v = (d - 1)/2 (Pearson, Jeffery and
Elderton, 1929), which is integrated here. Nothing is drawn.
"""

import math

import numpy as np
from scipy import integrate, special


def density(x: float, d_k: int) -> float:
    """Return the density of the scaled product at x > 0."""
    order, product = (d_k - 1) / 2, x * math.sqrt(d_k)
    logarithm = order * math.log(product / 2) - special.gammaln(d_k / 2) - product + math.log(d_k / math.pi) / 2
    return float(math.exp(logarithm) * special.kve(order, product))


def above(x: float, d_k: int, power: int = 0) -> float:
    """Return the expectation of product ** power, counted where the scaled product exceeds x."""
    return integrate.quad(lambda y: y**power * density(y, d_k), x, 60, epsabs=0, epsrel=1e-11, limit=200)[0]


def figures() -> dict[str, tuple[float, float]]:
    found = {}
    for d_k in (4, 16, 64, 256):
        for bound in (1, 2, 3, 4):
            ratio = above(bound, d_k) / special.ndtr(-bound)
            found[f"tail_over_normal; d_k={d_k}; outside={bound:.1f}"] = float(ratio), 0.0
        found[f"counted_beyond_4; d_k={d_k}"] = 2 * above(4, d_k), 0.0
        # the right half of a symmetric distribution; K_v is too large for a float below 0.1 at d_k = 256, where the
        # fourth moment has 1e-6
        found[f"excess_kurtosis; d_k={d_k}"] = 2 * above(0.1, d_k, power=4) - 3, 0.0
        apart = [abs(above(x, d_k) - special.ndtr(-x)) for x in np.linspace(0.1, 3, 59)]
        found[f"kolmogorov_distance; d_k={d_k}"] = float(max(apart)), 0.0
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
