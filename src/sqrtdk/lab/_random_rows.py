"""Rows of random attention: independent queries and keys with N(0, 1) components, and the factor of a scale rule."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.scales import SCALES, sizes

SIDES = ("unscaled", "scaled")  # the two columns of the claims; a run's parameters name the scale rule of each
LARGEST_BLOCK = 2**22  # numbers drawn at once


def products(generator: torch.Generator, *, draws: int, keys: int, d_k: int, queries: int = 1) -> Tensor:
    """The products q . k of queries and keys drawn afresh each time, before any scale.

    Args:
        generator: of the draws.
        draws: independent sets of queries and keys.
        keys: of a set.
        d_k: their dimension.
        queries: of a set; its rows share their keys, so that only rows of different sets are independent.

    Returns:
        (draws, queries, keys), float64.

    Example:
        >>> products(torch.Generator().manual_seed(0), draws=5, keys=3, d_k=4).shape
        torch.Size([5, 1, 3])
    """
    height = max(1, LARGEST_BLOCK // ((keys + queries) * d_k))
    blocks = []
    for start in range(0, draws, height):
        sets = min(height, draws - start)
        query, key = (torch.randn(sets, n, d_k, generator=generator, dtype=torch.float64) for n in (queries, keys))
        blocks.append(query @ key.transpose(1, 2))
    return torch.cat(blocks)


def factor(rule: str, d_k: int) -> float:
    """What a rule of `SCALES` without arguments multiplies the product by.

    Example:
        >>> factor("sqrt_dk", 64), factor("none", 64)
        (0.125, 1.0)
    """
    return float(SCALES[rule]().beta(sizes(d_k)))
