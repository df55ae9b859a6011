"""Random dot products: pairs of a query and a key of their own, and whole matrices of logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.lab._run import Run
from sqrtdk.lab.figures import Figure, Place
from sqrtdk.lab.intervals import mean

BLOCK = 2**22  # components drawn at once

Draw = Callable[[torch.Generator, int, int], tuple[Tensor, Tensor]]


def normal_pairs(rng: torch.Generator, pairs: int, d_k: int) -> tuple[Tensor, Tensor]:
    """Query and key (pairs, d_k) with independent components from N(0, 1), in float32."""
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
    """Query and key with components of mean 0 and variance 1, of one of the distributions of `COMPONENTS`.

    Args:
        components: the distribution.
        shared: chance that a component of the key is that of the query, which makes them dependent.
    """

    def draw(rng: torch.Generator, pairs: int, d_k: int) -> tuple[Tensor, Tensor]:
        query, key = (COMPONENTS[components](rng, (pairs, d_k)) for _ in range(2))
        if shared:
            key = torch.where(torch.rand(pairs, d_k, generator=rng) < shared, query, key)
        return query, key

    return draw


def dot_products(rng: torch.Generator, pairs: int, d_k: int, draw: Draw = normal_pairs) -> Tensor:
    """Independent dot products q . k, (pairs,), summed in float64.

    Args:
        rng: of the draw.
        pairs: how many; each has a query and a key of its own.
        d_k: components.
        draw: gives query and key (rows, d_k) of any dtype; called for a block of rows at a time.

    Example:
        >>> ones = lambda rng, rows, d_k: (torch.ones(rows, d_k), torch.ones(rows, d_k))
        >>> dot_products(torch.Generator(), 2, 8, ones)
        tensor([8., 8.], dtype=torch.float64)
    """
    rows = max(1, BLOCK // d_k)
    blocks = []
    for start in range(0, pairs, rows):
        query, key = draw(rng, min(rows, pairs - start), d_k)
        blocks.append(torch.linalg.vecdot(query.double(), key.double()))
    return torch.cat(blocks)


def product_matrices(run: Run, draws: int, length: int, d_k: int, std: float = 1.0) -> Iterator[Tensor]:
    """Matrices (length, length) of q . k in float64, each of fresh queries and keys with components from N(0, std^2).

    Rows of one matrix share keys: only the matrices are independent samples.
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
