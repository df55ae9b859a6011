"""What S1's `attn.max()` over 1 x 10 x 10 weights prints: shares of draws at or below its printed numbers.

The keys are K = L U with orthonormal rows in U and Bartlett's triangular L: N(0, 1) below the diagonal, and on it chi
variables with d_k, d_k - 1, ... degrees of freedom. So Q K^T is distributed as Z L^T with a 10 x 10 normal Z, and
nothing of width d_k is drawn.
"""

import numpy as np

KEYS, BLOCK, BLOCKS = 10, 10_000, 8
PRINTED = {16: (0.342, 0.289), 64: (0.891, 0.276), 256: (0.998, 0.301)}  # d_k: unscaled, scaled


def logits(d_k: int, rng: np.random.Generator) -> np.ndarray:
    factor = np.tril(rng.standard_normal((BLOCK, KEYS, KEYS), dtype=np.float32), -1)
    factor[:, range(KEYS), range(KEYS)] = np.sqrt(rng.chisquare(d_k - np.arange(KEYS), (BLOCK, KEYS)))
    return rng.standard_normal((BLOCK, KEYS, KEYS), dtype=np.float32) @ factor.swapaxes(1, 2)


def figures() -> dict[str, tuple[float, float]]:
    rng = np.random.default_rng(10)
    found = {}
    for d_k, printed in PRINTED.items():
        rows: tuple[list[np.ndarray], ...] = ([], [])
        for _ in range(BLOCKS):
            products = logits(d_k, rng)
            for side, scale in enumerate((1.0, d_k**-0.5)):
                apart = scale * (products - products.max(-1, keepdims=True))
                rows[side].append(1 / np.exp(apart).sum(-1))  # the largest weight of each row
        for side, peaks, number in zip(("unscaled", "scaled"), map(np.concatenate, rows), printed, strict=True):
            largest = peaks.max(-1)
            draws = len(largest)
            share = float(np.mean(largest <= number + 5e-4))  # three digits are printed
            place = f"d_k={d_k}; side={side}"
            # with no draw among N, a share of 1/N is still likely
            found[f"runs_at_or_below; {place}"] = share, max(share * (1 - share) / draws, draws**-2) ** 0.5
            found[f"largest_of_the_matrix; {place}"] = float(largest.mean()), float(largest.std() / draws**0.5)
            found[f"largest_of_a_row; {place}"] = float(peaks.mean()), float(peaks.mean(1).std() / draws**0.5)
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
