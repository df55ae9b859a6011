"""The standard deviation of n independent normal logits at which the Jacobian of their softmax is largest.

With w = e^z and S the sum of n of them, 1/S^k is the integral of t^(k-1) e^(-t S) / (k-1)!. So the means of the sums of
p^2, p^3 and of the square of the first are single integrals over t of products of E[w^k e^(-t w)], and
|J|^2 = sum p^2 - 2 sum p^3 + (sum p^2)^2. Nothing is drawn.
"""

import numpy as np
from scipy import optimize

X, STEP = np.linspace(-10, 10, 601, retstep=True)
WEIGHT = np.exp(-X * X / 2) / np.sqrt(2 * np.pi) * STEP


def squared_norm(std: float, n: int) -> float:
    """Return the mean squared Frobenius norm of the Jacobian diag(p) - p p^T."""
    logs, step = np.linspace(-9 * std - np.log(n) - 5, 9 * std + 5, 401, retstep=True)  # log t
    product = np.exp(np.minimum(logs[:, None] + std * X, 30.0))  # t w; e^-(e^30) is 0
    f0, _, f2, f3, f4 = (product**k * np.exp(-product) @ WEIGHT for k in range(5))
    two, three = n * f2 * f0 ** (n - 1), n * f3 * f0 ** (n - 1) / 2
    square = n * f4 * f0 ** (n - 1) / 6 + n * (n - 1) * f2**2 * f0 ** (n - 2) / 6
    return float(np.sum(two - 2 * three + square) * step)


def figures() -> dict[str, tuple[float, float]]:
    found = {}
    for n in (8, 32, 256, 1024):
        best = optimize.minimize_scalar(lambda std, n=n: -squared_norm(std, n), bounds=(0.7, 9), method="bounded")
        found[f"sigma_of_largest_jacobian; keys={n}"] = float(best.x), 0.0
        share = squared_norm(1.0, n) ** 0.5 / squared_norm(best.x, n) ** 0.5
        found[f"jacobian_at_sigma_1_over_largest; keys={n}"] = share, 0.0
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
