"""Pairs the matrices of two programs with other names and axes, where one side's numbers are the other's rounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

_ROUNDED_COSINE = 0.9  # cosine of two matrices, of which one is rounded: that of 2 bits is 0.93
_LOOKED_AT = 4096  # numbers, spread over a matrix, by which it is looked for
_MOST_PRODUCTS = 2**20  # pairs that are held against one another


def near_weights(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A's weights as matrices, by name, each with B's of nearly the same numbers.

    Args:
        a: A's weights by name.
        b: B's by name; one with more axes, as heads beside features, is every matrix that its neighbouring axes make.

    Example:
        >>> q, k = torch.randn(2, 4, 6)
        >>> found = near_weights({"q": q, "k": k}, {"1": (k + 0.01).mT.reshape(6, 2, 2), "0": q})
        >>> {name: (tuple(own.shape), tuple(other.shape)) for name, (own, other) in found.items()}
        {'q': ((4, 6), (4, 6)), 'k': ((4, 6), (4, 6))}
    """
    kept: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = defaultdict(list)
    for weight in b.values():
        for matrix in _matrices(weight):
            for turned in (matrix, matrix.mT):
                kept[tuple(turned.shape)].append((turned, _looked_at(turned)))
    if len(a) * max(map(len, kept.values()), default=0) > _MOST_PRODUCTS:
        return {}
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, weight in a.items():
        for matrix in _matrices(weight):
            if not (like := kept[tuple(matrix.shape)]):
                continue
            cosines = torch.stack([each for _, each in like]) @ _looked_at(matrix)
            best = int(cosines.argmax())
            if float(cosines[best]) > _ROUNDED_COSINE:
                found[name] = matrix, like[best][0].to(matrix.device)
                break
    return found


def _matrices(weight: Tensor) -> list[Tensor]:
    """Return a weight as each matrix whose rows are its first axes, and whose columns are the others."""
    return [weight.flatten(0, at - 1).flatten(1) for at in range(1, weight.dim())]


def _looked_at(matrix: Tensor) -> Tensor:
    step = max(1, matrix.numel() // _LOOKED_AT) | 1  # an odd step meets every column
    some = matrix.reshape(-1)[::step].double().cpu()
    unit: Tensor = some / some.norm().clamp(min=1e-300)
    return unit
