"""Compute src/sqrtdk/theory/gaussian_table.json: softmax statistics of n iid Gaussian logits, by quadrature.

Nothing is simulated. With x_i iid standard normal, z_i = sigma x_i and S = sum e^{z_i}, the identities
1/S = int_0^inf e^{-tS} dt and 1/Q = int_0^inf e^{-sQ} ds (Q = sum e^{2 z_i}) factor the expectations over the n keys.
Writing t = e^u and w = u + sigma x, with phi(u) = E[exp(-e^w)] the Laplace transform of one term:

    E[sum p z]   = n int du E[z e^{w - e^w}] phi^{n-1}
    E[log S]     = int du (exp(-e^u) - phi^n)
    entropy      = E[log S] - E[sum p z]
    E[peak]      = n int dx N(x) int du e^{w - e^w} phi_x(u)^{n-1},  phi_x the part of phi with x' < x
    E[S^2 / Q]   = int du (n E[e^{w - e^w}] phi^{n-1} + n (n-1) E[e^{w/2 - e^w}]^2 phi^{n-2}),  w = u + 2 sigma x

All integrands are analytic and decay, so that the trapezoid rule converges exponentially (the running integral phi_x,
second order, is the exception). Run: python scripts/make_gaussian_table.py (needs numpy, takes about a minute).
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

COUNTS = (2, 3, 4, 6, 8, 12, *(2**k for k in range(4, 25)))
SIGMAS = (
    *(0.25 * i for i in range(1, 17)),
    *(4.0 + 0.5 * i for i in range(1, 9)),
    *(9.0, 10.0, 12.0, 14.0, 16.0, 20.0, 24.0, 32.0, 40.0, 48.0, 64.0),
)
TARGET = Path(__file__).parent.parent / "src" / "sqrtdk" / "theory" / "gaussian_table.json"
REACH = 9.5  # standard deviations: beyond, 2^24 keys hold less than 1e-13 of one


def _normal(step: float) -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(-REACH, REACH + step / 2, step)
    return x, step * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _log_power(missing: np.ndarray, power: int) -> np.ndarray:
    """(1 - missing)^power without cancellation."""
    with np.errstate(divide="ignore"):
        return np.exp(power * np.log1p(-np.minimum(missing, 1.0))) if power else np.ones_like(missing)


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def statistics(sigma: float, counts: tuple[int, ...]) -> dict[str, list[float]]:
    """Expected entropy (nats), peak and effective keys for each n."""
    du = 0.2
    x, weight = _normal(min(0.02, 0.2 / sigma))
    sums = {name: np.zeros(len(counts)) for name in ("entropy", "peak", "effective")}
    edge = REACH * sigma
    u_all = np.arange(-edge - math.log(max(counts)) - 40.0, edge + 8.0, du)
    below = np.concatenate([[0.0], np.cumsum(weight)[:-1]]) + weight / 2  # P(x' < x)
    for u in np.array_split(u_all, max(1, len(u_all) * len(x) // 2_000_000)):
        w = u[:, None] + sigma * x
        with np.errstate(over="ignore", under="ignore"):
            term = np.exp(w)
            lost = -np.expm1(-term) * weight  # contributions to 1 - phi
            tilt = np.exp(np.minimum(w, 700.0) - term) * weight
            missing = lost.sum(1)
            moment = tilt @ (sigma * x)
            partial = (1.0 - below) + np.cumsum(lost, 1) - lost / 2  # 1 - phi_x, running
            for i, n in enumerate(counts):
                log_s = np.exp(-np.exp(u)) - _log_power(missing, n)
                sums["entropy"][i] += du * (log_s - n * moment * _log_power(missing, n - 1)).sum()
                sums["peak"][i] += du * n * (tilt * _log_power(partial, n - 1)).sum()
    u_all = np.arange(-2 * edge - 2 * math.log(max(counts)) - 40.0, 2 * edge + 8.0, du)
    x, weight = _normal(min(0.05, 0.15 / sigma))
    for u in np.array_split(u_all, max(1, len(u_all) * len(x) // 2_000_000)):
        w = u[:, None] + 2 * sigma * x
        with np.errstate(over="ignore", under="ignore"):
            term = np.exp(np.minimum(w, 700.0))
            missing = -np.expm1(-term) @ weight
            own = np.exp(w - term) @ weight
            half = np.exp(w / 2 - term) @ weight
        for i, n in enumerate(counts):
            pairs = n * (n - 1) * half**2 * _log_power(missing, n - 2)
            sums["effective"][i] += du * (n * own * _log_power(missing, n - 1) + pairs).sum()
    return {name: value.tolist() for name, value in sums.items()}


def main() -> None:
    """Write the table: per quantity one row a key count, one column a sigma; entropy / log n, peak, log(effective)."""
    columns = [statistics(sigma, COUNTS) for sigma in SIGMAS]
    logs = [math.log(n) for n in COUNTS]
    table = {
        "n": list(COUNTS),
        "sigma": [0.0, *SIGMAS],
        "entropy": [[1.0, *(_short(c["entropy"][i] / log_n) for c in columns)] for i, log_n in enumerate(logs)],
        "peak": [[_short(1 / n), *(_short(c["peak"][i]) for c in columns)] for i, n in enumerate(COUNTS)],
        "effective": [
            [1.0, *(_short(math.log(c["effective"][i]) / log_n) for c in columns)] for i, log_n in enumerate(logs)
        ],
    }
    lines = ",\n".join(
        f'"{name}": ' + json.dumps(value, separators=(",", ":")).replace("],[", "],\n[")
        for name, value in table.items()
    )
    TARGET.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
