"""Compute src/sqrtdk/theory/gaussian_table.json: softmax statistics of n iid Gaussian logits, by quadrature.

Nothing is simulated. With x_i iid standard normal, z_i = sigma x_i, S = sum e^{z_i} and Q = sum e^{2 z_i}, the
identities 1/S = int_0^inf e^{-tS} dt, 6/S^4 = int_0^inf t^3 e^{-tS} dt and 1/Q = int_0^inf e^{-sQ} ds factor the
expectations over the n keys. Writing t = e^u and w = u + sigma x, with phi(u) = E[exp(-e^w)] the Laplace transform of
one term and A_k(u) = E[e^{kw - e^w}]:

    E[sum p z]   = n int du E[z e^{w - e^w}] phi^{n-1}
    E[log S]     = int du (exp(-e^u) - phi^n)
    entropy      = E[log S] - E[sum p z]
    E[peak]      = n int dx N(x) int du e^{w - e^w} phi_x(u)^{n-1},  phi_x the part of phi with x' < x
    E[S^2 / Q]   = int du (n E[e^{w - e^w}] phi^{n-1} + n (n-1) E[e^{w/2 - e^w}]^2 phi^{n-2}),  w = u + 2 sigma x
    E|J|_F^2     = n (n-1)/6 int du A_2 (2 A_2 phi^{n-2} + (n-2) A_1^2 phi^{n-3})

The last holds since |J|_F^2 = sum_i p_i^2 (1 - p_i)^2 + sum_{i != j} p_i^2 p_j^2, and 1 - p_i is the sum of the other
weights: with all of i, j, k unlike, |J|_F^2 = 2 sum p_i^2 p_j^2 + sum p_i^2 p_j p_k. No term is subtracted, so that
nothing cancels in rows that are almost one-hot.

All integrands are analytic and decay, so that the trapezoid rule converges exponentially (the running integral phi_x,
fourth order, is the exception). The right-hand sides are defined for any real n; the row n = 1 of the table is the
limit n -> 1 of the ratios that are stored. Run: python scripts/make_gaussian_table.py (needs numpy, a few minutes).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

COUNTS = (1, 2, 3, 4, 6, 8, 12, *(2**k for k in range(4, 25)))
NEAR = 1e-5  # n - 1, in place of the limit 0
SIGMAS = (
    *(0.25 * i for i in range(1, 17)),
    *(4.0 + 0.5 * i for i in range(1, 9)),
    *(9.0, 10.0, 12.0, 14.0, 16.0, 20.0, 24.0, 32.0, 40.0, 48.0, 64.0),
)
NAMES = ("entropy", "peak", "effective", "jacobian")
TARGET = Path(__file__).parent.parent / "src" / "sqrtdk" / "theory" / "gaussian_table.json"
REACH = 9.5  # standard deviations: beyond, 2^24 keys hold less than 1e-13 of one
TOP = 4.2  # e^{w - e^w} is below 1e-27 from here on
CELLS = 2_000_000  # of a block of the (u, x) plane


def _normal(step: float) -> tuple[np.ndarray, np.ndarray]:
    x = np.arange(-REACH, REACH + step / 2, step)
    return x, step * np.exp(-(x**2) / 2) / math.sqrt(2 * math.pi)


def _log_kept(missing: np.ndarray, kept: np.ndarray | None = None) -> np.ndarray:
    """log(1 - missing), without cancellation where `kept` is the same 1 - missing from a sum of its own."""
    with np.errstate(divide="ignore"):
        small = np.log1p(-np.minimum(missing, 1.0))
        return small if kept is None else np.where(missing < 0.5, small, np.log(kept))


def _power(log_kept: np.ndarray, power: float) -> np.ndarray:
    return np.exp(power * log_kept) if power else np.ones_like(log_kept)


def _over(value: np.ndarray, log_kept: np.ndarray, power: float) -> np.ndarray:
    """Quotient value / kept^power, 0 where both have vanished."""
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(value > 0, np.exp(np.log(value) - power * log_kept), 0.0) if power else value


def statistics(sigma: float, counts: Sequence[float], fine: float = 1.0) -> dict[str, list[float]]:
    """Expected entropy (nats), peak and effective keys, and root mean square Jacobian norm, for each n.

    Args:
        sigma: standard deviation of the logits, above 0.
        counts: values of n, above 1, not necessarily whole.
        fine: divides every step, to see what the steps cost.
    """
    reach = math.log(max(counts)) + 40.0
    return {
        **dict(zip(("entropy", "jacobian"), _first(sigma, counts, reach, fine), strict=True)),
        "peak": _peak(sigma, counts, reach, fine),
        "effective": _effective(sigma, counts, reach, fine),
    }


def _grid(sigma: float, reach: float, step: float) -> np.ndarray:
    return np.arange(-REACH * sigma - reach, REACH * sigma + 8.0, step)


def _blocks(u: np.ndarray, width: int) -> Iterable[np.ndarray]:
    return np.array_split(u, max(1, len(u) * width // CELLS))


def _first(sigma: float, counts: Sequence[float], reach: float, fine: float) -> tuple[list[float], list[float]]:
    du = 0.2 / fine
    x, weight = _normal(min(0.05, 0.15 / sigma) / fine)
    entropy, jacobian = np.zeros(len(counts)), np.zeros(len(counts))
    for u in _blocks(_grid(sigma, reach, du), len(x)):
        w = u[:, None] + sigma * x
        with np.errstate(over="ignore", under="ignore"):
            term = np.exp(np.minimum(w, 700.0))
            bare = np.exp(-term) * weight
            kept = _log_kept(-np.expm1(-term) @ weight, bare.sum(1))
            tilt = term * bare
            moment = tilt @ (sigma * x)
            one = tilt.sum(1)
            two = (term * tilt).sum(1)
            for i, n in enumerate(counts):
                log_s = np.exp(-np.exp(u)) - _power(kept, n)
                entropy[i] += du * (log_s - n * moment * _power(kept, n - 1)).sum()
                pairs = _over(2 * two**2, kept, 2 - n)
                triples = _over(two * one**2, kept, 3 - n) * (n - 2)
                jacobian[i] += du * n * (n - 1) / 6 * (pairs + triples).sum()
    return entropy.tolist(), np.sqrt(jacobian).tolist()


def _peak(sigma: float, counts: Sequence[float], reach: float, fine: float) -> list[float]:
    du = 0.2 / fine
    x, weight = _normal(dx := min(0.02, 0.2 / sigma) / fine)
    # A running integral by the trapezoid rule is off by dx^2/12 f'(x) (Euler and Maclaurin), which is known.
    above = 1.0 - np.cumsum(weight) + weight / 2 - dx / 12 * x * weight  # P(x' > x)
    least = -2.0 * math.log(max(counts)) - 36.0  # of a w that counts: n e^w against a peak of at least 1 / n
    total = np.zeros(len(counts))
    u = _grid(sigma, reach, du)
    for part in np.array_split(u, len(u) // 10):
        first = max(0, int(np.searchsorted(x, (least - part[-1]) / sigma)))
        last = int(np.searchsorted(x, (TOP - part[0]) / sigma))
        if last <= first:
            continue
        w = part[:, None] + sigma * x[first:last]
        with np.errstate(over="ignore", under="ignore"):
            term = np.exp(np.minimum(w, 700.0))
            lost = -np.expm1(-term) * weight[first:last]
            tilt = np.exp(w - term) * weight[first:last]
            running = np.cumsum(lost, 1) - lost / 2 - dx / 12 * (sigma * tilt - x[first:last] * lost)
            kept = _log_kept(above[first:last] + running)  # log phi_x
            for i, n in enumerate(counts):
                total[i] += du * n * (tilt * _power(kept, n - 1)).sum()
    return total.tolist()


def _effective(sigma: float, counts: Sequence[float], reach: float, fine: float) -> list[float]:
    du = 0.2 / fine
    x, weight = _normal(min(0.05, 0.15 / sigma) / fine)
    total = np.zeros(len(counts))
    for u in _blocks(_grid(2.0 * sigma, reach + math.log(max(counts)), du), len(x)):
        w = u[:, None] + 2 * sigma * x
        with np.errstate(over="ignore", under="ignore"):
            term = np.exp(np.minimum(w, 700.0))
            kept = _log_kept(-np.expm1(-term) @ weight, np.exp(-term) @ weight)
            own = np.exp(w - term) @ weight
            half = np.exp(w / 2 - term) @ weight
        for i, n in enumerate(counts):
            pairs = n * (n - 1) * _over(half**2, kept, 2 - n)
            total[i] += du * (n * own * _power(kept, n - 1) + pairs).sum()
    return total.tolist()


def _short(value: float) -> float:
    return float(f"{value:.7g}")


def main() -> None:
    """Write the table: of each quantity one row for each n and one column for each sigma, 1 at sigma = 0.

    Stored are entropy / log n, -log(peak) / log n, log(effective keys) / log n and norm n / sqrt(n - 1).
    """
    counts = (1.0 + NEAR, *COUNTS[1:])
    columns = [statistics(sigma, counts) for sigma in SIGMAS]
    table: dict[str, list] = {"n": list(COUNTS), "sigma": [0.0, *SIGMAS]}
    for name in NAMES:
        table[name] = []
        for i, n in enumerate(counts):
            values = [column[name][i] for column in columns]
            table[name].append([1.0, *(_short(_ratio(name, value, n)) for value in values)])
    lines = ",\n".join(
        f'"{name}": ' + json.dumps(value, separators=(",", ":")).replace("],[", "],\n[")
        for name, value in table.items()
    )
    TARGET.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def _ratio(name: str, value: float, n: float) -> float:
    if name == "jacobian":
        return value * n / math.sqrt(n - 1.0)
    if name == "entropy":
        return value / math.log(n)
    return abs(math.log(value)) / math.log(n)


if __name__ == "__main__":
    main()
