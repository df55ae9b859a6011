"""Random dot products and rows of attention: from random queries and keys, and from the embedded model on real text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from sqrtdk import attention
from sqrtdk.models.demo import HEADS, DemoModel
from sqrtdk.positions import rope
from sqrtdk.scales import SCALES, sizes
from sqrtdk.scores import PairScore
from sqrtdk_lab.claim import ExperimentRun
from sqrtdk_lab.figures import Figure, Place
from sqrtdk_lab.intervals import mean
from sqrtdk_lab.training.settings import batch, stdlib_text

COMPONENTS_AT_ONCE = 2**22  # components drawn at once

Draw = Callable[[torch.Generator, int, int], tuple[Tensor, Tensor]]


def normal_pairs(rng: torch.Generator, pairs: int, d_k: int) -> tuple[Tensor, Tensor]:
    """Draw query and key (pairs, d_k) with independent components from N(0, 1), in float32."""
    query, key = (torch.randn(pairs, d_k, generator=rng) for _ in range(2))
    return query, key


def _uniform(rng: torch.Generator, shape: tuple[int, int]) -> Tensor:
    return math.sqrt(12.0) * (torch.rand(shape, generator=rng) - 0.5)


def _signs(rng: torch.Generator, shape: tuple[int, int]) -> Tensor:
    return torch.randint(2, shape, generator=rng).mul_(2).sub_(1).float()


def _laplace(rng: torch.Generator, shape: tuple[int, int]) -> Tensor:
    sizes = torch.empty(shape).exponential_(generator=rng) / math.sqrt(2.0)
    return sizes * _signs(rng, shape)


COMPONENTS: dict[str, Callable[[torch.Generator, tuple[int, int]], Tensor]] = {
    "normal": lambda rng, shape: torch.randn(shape, generator=rng),
    "uniform": _uniform,
    "signs": _signs,
    "Laplace": _laplace,
}


def standard_pairs(components: str, shared: float = 0.0) -> Draw:
    """Return a function that draws query and key with components of mean 0 and variance 1.

    Args:
        components: name in `COMPONENTS` of their distribution.
        shared: chance that a component of the key equals the query's, which makes the two dependent.
    """

    def draw(rng: torch.Generator, pairs: int, d_k: int) -> tuple[Tensor, Tensor]:
        query, key = (COMPONENTS[components](rng, (pairs, d_k)) for _ in range(2))
        if shared:
            # With chance p a component is shared, so E[q_i k_i] = p while both keep mean 0 and variance 1.
            key = torch.where(torch.rand(pairs, d_k, generator=rng) < shared, query, key)
        return query, key

    return draw


def dot_products(rng: torch.Generator, pairs: int, d_k: int, draw: Draw = normal_pairs) -> Tensor:
    """Draw independent dot products q . k, (pairs,), summed in float64.

    Args:
        rng: generator of the draws.
        pairs: number of pairs; each has its own query and key.
        d_k: number of components.
        draw: returns query and key (rows, d_k) of any dtype; called for one block of rows at a time.

    Example:
        >>> ones = lambda rng, rows, d_k: (torch.ones(rows, d_k), torch.ones(rows, d_k))
        >>> dot_products(torch.Generator(), 2, 8, ones)
        tensor([8., 8.], dtype=torch.float64)
    """
    rows = max(1, COMPONENTS_AT_ONCE // d_k)
    blocks = []
    for start in range(0, pairs, rows):
        query, key = draw(rng, min(rows, pairs - start), d_k)
        blocks.append(torch.linalg.vecdot(query.double(), key.double()))
    return torch.cat(blocks)


def product_matrices(run: ExperimentRun, draws: int, length: int, d_k: int, std: float = 1.0) -> Iterator[Tensor]:
    """Yield matrices (length, length) of q . k in float64, each of new queries and keys with components from N(0,
    std^2).

    Rows of one matrix share keys, so only the matrices are independent samples.
    """
    for draw in range(draws):
        query, key = normal_pairs(run.generator("matrix", d_k, draw), length, d_k)
        yield std**2 * (query.double() @ key.double().mT)


def root_mean_square(name: str, samples: Tensor, **at: Place) -> Figure:
    """Standard deviation of samples whose mean is known to be 0: the root of the mean square and of its t interval.

    Example:
        >>> root_mean_square("std", torch.tensor([3.0, -3.0])).value
        3.0
    """
    square = mean(name, samples**2, **at)
    value, low, high = (math.sqrt(max(0.0, end)) for end in (square.value, square.low, square.high))
    return replace(square, value=value, low=low, high=high)


SIDES = ("unscaled", "scaled")  # the two columns of the claims; the run's parameters name the scale rule of each
RULE_BY_SIDE = {"unscaled": "none", "scaled": "sqrt_dk"}  # for claims whose control does not exchange the two
LARGEST_BLOCK = 2**22  # numbers drawn at once


def own_keys(
    rng: torch.Generator, rows: int, keys: int, d_k: int, *, queries: int = 1, std: float = 1.0, mean: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Draw queries and keys with independent Gaussian components, with new keys for each row to make rows independent.

    Args:
        rng: generator of the draws.
        rows: number of independent rows, each with its own keys.
        keys: number of keys of each row.
        d_k: number of components.
        queries: number of queries over the same keys; default 1.
        std: of every component of queries and keys; default 1.
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
    """Return the unscaled products q . k of new queries and keys with N(0, 1) components.

    Args:
        generator: of the draws.
        draws: number of independent sets of queries and keys.
        keys: keys per set.
        d_k: their dimension.
        queries: queries per set; they share their keys, so only rows of different sets are independent.

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


def attention_weights(
    query: Tensor, key: Tensor, scale: float, *, is_causal: bool = False, score: PairScore | None = None
) -> Tensor:
    """Return the weight that `sqrtdk.attention` gives each key: its output for unit vectors as values.

    Args:
        query: (..., L, E).
        key: (..., S, E).
        scale: factor on the products.
        is_causal: whether row i sees only keys j <= i.
        score: instead of the dot product.

    Returns:
        (..., L, S), of the dtype of `query`.

    Example:
        >>> attention_weights(torch.zeros(1, 2), torch.ones(4, 2), 1.0)
        tensor([[0.2500, 0.2500, 0.2500, 0.2500]])
    """
    length = key.shape[-2]
    unit = torch.eye(length, dtype=key.dtype).expand(*key.shape[:-1], length)
    found = attention(query, key, unit, scale=scale, is_causal=is_causal, score=score)
    assert isinstance(found, Tensor)
    return found


def factor(rule: str, d_k: int) -> float:
    """Return the factor that a rule of `SCALES` without arguments puts on the product.

    Example:
        >>> factor("sqrt_dk", 64), factor("none", 64)
        (0.125, 1.0)
    """
    return float(SCALES[rule]().beta(sizes(d_k)))


@cache
def _held_out() -> Tensor:
    return stdlib_text()[1]


def windows(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return windows of the held-out text of the standard library.

    Args:
        count: number of windows, each from a random place.
        length: bytes of a window.
        generator: of the places.

    Returns:
        (count, length), integers below 256.
    """
    return batch(_held_out(), count, length, generator)[0]


def demo_weights(model: DemoModel, text: Tensor, scale: float) -> Tensor:
    """Return the weights of every layer and head.

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
                attention_weights(*rope(query, key), scale, is_causal=True)
                for query, key in zip(heads[::2], heads[1::2], strict=True)
            ]
    finally:
        for hook in hooks:
            hook.remove()
    return torch.stack(layers, 1)
