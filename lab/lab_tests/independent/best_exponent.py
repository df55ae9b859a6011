"""The exponent of d_k that leaves the entropy and the Jacobian of the first softmax as they are.

The logits of a row are s |q| a with a ~ N(0, I_n). The same a, and the same quantile of |q|, serve d_k = 16 and 512.
For each, the scale s is found that gives the quantity its value at d_k = 64 with logits of standard deviation sigma.
"""

import numpy as np
from scipy import optimize, stats

GROUPS, ROWS = 6, 1500
SIGMAS = (0.5, 1.0, 2.0, 4.0)


def quantities(logits: np.ndarray) -> dict[str, float]:
    """Return the mean entropy, and the root mean square of the Jacobian's norm."""
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    two = (p**2).sum(1)
    return {
        "entropy_share": float(-(p * np.log(p + 1e-30)).sum(1).mean()),  # over log n, which is the same for all d_k
        "jacobian": float(np.sqrt((two - 2 * (p**3).sum(1) + two**2).mean())),
    }


def exponent(name: str, sigma: float, a: np.ndarray, u: np.ndarray) -> float:
    lengths = {d_k: stats.chi.ppf(u, d_k)[:, None].astype(np.float32) for d_k in (16, 64, 512)}
    aim = quantities(sigma / 8 * lengths[64] * a)[name]

    def log_scale(d_k: int) -> float:
        def apart(x: float) -> float:
            return quantities(np.exp(x) * lengths[d_k] * a)[name] - aim

        centre = np.log(sigma) - np.log(d_k) / 2
        return float(optimize.brentq(apart, centre - 0.3, centre + 0.3, xtol=1e-4))

    return (log_scale(16) - log_scale(512)) / np.log(512 / 16)


def figures() -> dict[str, tuple[float, float]]:
    rng = np.random.default_rng(2026)
    found = {}
    for name in ("entropy_share", "jacobian"):
        # the Jacobian has its maximum near sigma = 2.8, where it does not tell one scale from another
        sigmas = SIGMAS if name == "entropy_share" else SIGMAS[:2]
        exponents = [
            np.mean([exponent(name, sigma, a, u) for sigma in sigmas])
            for a, u in ((rng.standard_normal((ROWS, 32), dtype=np.float32), rng.random(ROWS)) for _ in range(GROUPS))
        ]
        found[f"exponent; of={name}; keys=32"] = float(np.mean(exponents)), float(np.std(exponents) / GROUPS**0.5)
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
