"""Random rows of attention, each with keys of its own: rows that share keys would be no independent samples."""

from __future__ import annotations

import torch
from torch import Tensor


def own_keys(
    rng: torch.Generator, rows: int, keys: int, d_k: int, *, std: float = 1.0, mean: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Queries and keys with independent Gaussian components, in float64.

    Args:
        rng: of the draw.
        rows: independent rows.
        keys: of each row.
        d_k: components.
        std: of every component, of queries and keys.
        mean: of every component.

    Returns:
        query (rows, 1, d_k) and key (rows, keys, d_k).

    Example:
        >>> [tuple(x.shape) for x in own_keys(torch.Generator(), 3, 5, 8)]
        [(3, 1, 8), (3, 5, 8)]
    """
    query, key = (torch.randn(rows, n, d_k, generator=rng, dtype=torch.float64) for n in (1, keys))
    return mean + std * query, mean + std * key
