"""Largest logits at dimension 512 without the scale, and the shares beyond 100 and, with the scale, within 3.

A logit is |q| times N(0, 1), so the share beyond a bound is an integral over the chi distribution of |q|. The rows of a
matrix share their keys; its largest logit is drawn as normals times the keys' triangular factor, as in
printed_maxima.py.
"""

import math

import numpy as np
from scipy import integrate, special

D_K = 512
DRAWS = {8: 400, 16: 400, 32: 200, 64: 200, 128: 100, 256: 40, 512: 10}  # by the number of queries and of keys


def share_beyond(bound: float) -> float:
    """Return the probability that a dot product lies further from 0 than a bound."""

    def integrand(r: float) -> float:
        density = math.exp((D_K - 1) * math.log(r) - r * r / 2 - (D_K / 2 - 1) * math.log(2) - special.gammaln(D_K / 2))
        return density * 2 * special.ndtr(-bound / r)

    return integrate.quad(integrand, 15, 32, epsabs=0, epsrel=1e-9)[0]  # |q| is 22.6 +- 0.7


def figures() -> dict[str, tuple[float, float]]:
    found = {
        "share_of_logits_beyond_100": (share_beyond(100.0), 0.0),
        "share_within_3_scaled": (1 - share_beyond(3 * math.sqrt(D_K)), 0.0),
    }
    rng = np.random.default_rng(D_K)
    for n, draws in DRAWS.items():
        most = np.empty(draws)
        for one in range(draws):
            factor = np.tril(rng.standard_normal((n, n), dtype=np.float32), -1)
            np.fill_diagonal(factor, np.sqrt(rng.chisquare(D_K - np.arange(n))))
            most[one] = np.abs(rng.standard_normal((n, n), dtype=np.float32) @ factor.T).max()
        mean, error = float(most.mean()), float(most.std() / math.sqrt(draws))
        found[f"largest_logit; side=unscaled; length={n}"] = mean, error
        found[f"largest_logit; side=scaled; length={n}"] = mean / math.sqrt(D_K), error / math.sqrt(D_K)
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
