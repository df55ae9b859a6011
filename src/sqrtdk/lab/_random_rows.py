"""Rows of random attention: independent Gaussian queries and keys, their products, and the factor of a scale rule."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.scales import SCALES, sizes
from sqrtdk.scores import PairScore

SIDES = ("unscaled", "scaled")  # the two columns of the claims; a run's parameters name the scale rule of each
LARGEST_BLOCK = 2**22  # numbers drawn at once


def own_keys(
    rng: torch.Generator, rows: int, keys: int, d_k: int, *, queries: int = 1, std: float = 1.0, mean: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Queries and keys with independent Gaussian components; rows that share keys would be no independent samples.

    Args:
        rng: of the draw.
        rows: independent rows, each with keys of its own.
        keys: of each row.
        d_k: components.
        queries: over the same keys; default 1.
        std: of every component, of queries and keys; default 1.
        mean: of every component; default 0.

    Returns:
        query (rows, queries, d_k) and key (rows, keys, d_k), float64.

    Example:
        >>> [tuple(x.shape) for x in own_keys(torch.Generator(), 3, 5, 8)]
        [(3, 1, 8), (3, 5, 8)]
    """
    query, key = (torch.randn(rows, n, d_k, generator=rng, dtype=torch.float64) for n in (queries, keys))
    return mean + std * query, mean + std * key


def products(generator: torch.Generator, *, draws: int, keys: int, d_k: int, queries: int = 1) -> Tensor:
    """The products q . k of queries and keys with N(0, 1) components, drawn afresh each time, before any scale.

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
        query, key = own_keys(generator, min(height, draws - start), keys, d_k, queries=queries)
        blocks.append(query @ key.mT)
    return torch.cat(blocks)


def weights(
    query: Tensor, key: Tensor, scale: float, *, is_causal: bool = False, score: PairScore | None = None
) -> Tensor:
    """The weights that `sqrtdk.attention` gives each key: its output where the values are the unit vectors.

    Args:
        query: (..., L, E).
        key: (..., S, E).
        scale: on the products.
        is_causal: whether row i sees keys j <= i only.
        score: in place of the dot product.

    Returns:
        (..., L, S), of the dtype of `query`.

    Example:
        >>> weights(torch.zeros(1, 2), torch.ones(4, 2), 1.0)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    length = key.shape[-2]
    unit = torch.eye(length, dtype=key.dtype).expand(*key.shape[:-1], length)
    found = attention(query, key, unit, scale=scale, is_causal=is_causal, score=score)
    assert isinstance(found, Tensor)
    return found


def factor(rule: str, d_k: int) -> float:
    """What a rule of `SCALES` without arguments multiplies the product by.

    Example:
        >>> factor("sqrt_dk", 64), factor("none", 64)
        (0.125, 1.0)
    """
    return float(SCALES[rule]().beta(sizes(d_k)))
