"""Rows of attention: of independent Gaussian queries and keys, and of the embedded model on real text."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.lab.training.tasks import batch, stdlib_text
from sqrtdk.models.demo import HEADS, DemoModel
from sqrtdk.positions import rope
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


@cache
def _held_out() -> Tensor:
    return stdlib_text()[1]


def windows(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows of the held-out text of the standard library.

    Args:
        count: of windows, each from a random place.
        length: bytes of a window.
        generator: of the places.

    Returns:
        (count, length), integers below 256.
    """
    return batch(_held_out(), count, length, generator)[0]


def demo_weights(model: DemoModel, text: Tensor, scale: float) -> Tensor:
    """Weights of every layer and head.

    Args:
        model: the embedded model, or one of its variants.
        text: (B, L) bytes.
        scale: the variant's own factor on the products.

    Returns:
        (B, layers, H, L, L), float32; row i sees keys j <= i.

    Example:
        >>> model = DemoModel("demo:unscaled")
        >>> demo_weights(model, torch.zeros(1, 4, dtype=torch.long), 1.0).sum(-1).allclose(torch.ones(1, 3, 2, 4))
        True
    """
    projected: list[Tensor] = []
    hooks = [
        getattr(block.attention, name).register_forward_hook(lambda _m, _a, out: projected.append(out))
        for block in model.blocks
        for name in ("q_proj", "k_proj")
    ]
    try:
        with torch.no_grad():
            model(text)
            heads = [x.view(*x.shape[:2], HEADS, -1).transpose(1, 2) for x in projected]
            layers = [
                weights(*rope(query, key), scale, is_causal=True)
                for query, key in zip(heads[::2], heads[1::2], strict=True)
            ]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(layers, 1)
