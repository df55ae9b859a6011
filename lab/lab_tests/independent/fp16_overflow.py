"""Largest magnitude among the 64 x 64 products of N(0, 1) queries and keys, for one head.

As in printed_maxima.py: by Bartlett's triangular factor of the keys, so that d_k = 4096 costs no more than 256. The
largest number of fp16 is 65504.
"""

import numpy as np

KEYS, DRAWS = 64, 1500


def figures() -> dict[str, tuple[float, float]]:
    rng = np.random.default_rng(16)
    found = {}
    for d_k in (256, 4096):
        most = np.empty(DRAWS)
        for draw in range(DRAWS):
            factor = np.tril(rng.standard_normal((KEYS, KEYS), dtype=np.float32), -1)
            np.fill_diagonal(factor, np.sqrt(rng.chisquare(d_k - np.arange(KEYS))))
            most[draw] = np.abs(rng.standard_normal((KEYS, KEYS), dtype=np.float32) @ factor.T).max()
        for scale, factor_of in (("none", 1.0), ("sqrt_dk", d_k**-0.5)):
            mean, error = factor_of * most.mean(), factor_of * most.std() / DRAWS**0.5
            found[f"largest_product; inputs=N(0,1); d_k={d_k}; scale={scale}"] = float(mean), float(error)
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
