"""Median length of a row of dL/dQ, without the scale over with it, and how the length grows with d_k.

Given |q|, the logits of a row are |q| a with a ~ N(0, I_n), and key j is a_j q/|q| plus a normal vector across q. If
dL/dp is b, then c = p (b - p.b) gives |dL/dq| = s sqrt((c.a)^2 + |c|^2 chi^2(d_k - 1)): no key is drawn. With normal
values, an upstream gradient of length 1 gives b ~ N(0, I_n). One of d_k normal elements is sqrt(d_k) times as long.
"""

import numpy as np

MEDIAN_ROWS = {32: 20_000, 256: 10_000, 1024: 5_000}
BLOCK, GROUPS = 500, 8
DIMS = (16, 32, 64, 128, 256, 512)


def lengths(n: int, d_k: int, rng: np.random.Generator, squared_error: bool = False) -> list[np.ndarray]:
    """Return |dL/dq| of a block of rows, without the scale and with it."""
    a, b = rng.standard_normal((2, BLOCK, n), dtype=np.float32)
    query, across = np.sqrt(rng.chisquare(d_k, BLOCK)).astype(np.float32), rng.chisquare(d_k - 1, BLOCK)
    if squared_error:
        values = rng.standard_normal((BLOCK, n, d_k), dtype=np.float32)
        target = rng.standard_normal((BLOCK, 1, d_k), dtype=np.float32)
    found = []
    for scale in (1.0, d_k**-0.5):
        logits = scale * query[:, None] * a
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        if squared_error:  # the mean over d_k elements of (p V - target)^2
            b = (2 / d_k * (p[:, None] @ values - target) @ values.swapaxes(1, 2))[:, 0]
        c = p * (b - (p * b).sum(1, keepdims=True))
        found.append(scale * np.sqrt((c * a).sum(1) ** 2 + (c**2).sum(1) * across))
    return found


def slope(rng: np.random.Generator, blocks: int, squared_error: bool) -> float:
    """Return the exponent of d_k in the root mean square of |dL/dq| with the scale, for 32 keys."""
    rows = [np.concatenate([lengths(32, d, rng, squared_error)[1] for _ in range(blocks)]) for d in DIMS]
    return float(np.polyfit(np.log(DIMS), [np.log(np.mean(one**2)) / 2 for one in rows], 1)[0])


def figures() -> dict[str, tuple[float, float]]:
    rng = np.random.default_rng(64)
    found = {}
    for n, rows in MEDIAN_ROWS.items():
        for d_k in (64, 128, 256, 512):
            blocks = [lengths(n, d_k, rng) for _ in range(rows // BLOCK)]
            unscaled, scaled = np.sort(np.concatenate(blocks, axis=1), axis=1)
            # the rank of the median has a standard error of sqrt(rows) / 2
            below, above = (rows // 2 + side * int(rows**0.5) // 2 for side in (-1, 1))
            error = np.hypot(*(np.log(one[above] / one[below]) / 2 for one in (unscaled, scaled)))
            ratio = np.median(unscaled) / np.median(scaled)
            found[f"median_gradient_ratio; keys={n}; d_k={d_k}"] = float(ratio), float(ratio * error)
    unit = [slope(rng, 4, squared_error=False) for _ in range(GROUPS)]
    average = [slope(rng, 1, squared_error=True) for _ in range(GROUPS)]
    for upstream, shift, slopes in (("unit", 0.0, unit), ("sum", 0.5, unit), ("average", 0.0, average)):
        key = f"slope_of_rms_gradient_norm; case=scaled; keys=32; upstream={upstream}"
        found[key] = float(np.mean(slopes) + shift), float(np.std(slopes, ddof=1) / GROUPS**0.5)
    return found


if __name__ == "__main__":
    print(*figures().items(), sep="\n")
