"""Pairs the matrices of two programs with other names and axes, where one side's numbers are the other's rounded."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

_ROUNDED_COSINE = 0.9  # cosine of two matrices, of which one is rounded: that of 2 bits is 0.93
_LOOKED_AT = 4096  # numbers, spread over a matrix, by which it is looked for
_MOST_PRODUCTS = 2**20  # pairs that are held against one another


def near_weights(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return for A's matrices by name B's with nearly the same numbers, with A's axes.

    Args:
        a: A's matrices by name.
        b: B's by name.

    Example:
        >>> q, k = torch.randn(2, 4, 6)
        >>> found = near_weights({"q": q, "k": k}, {"1": (k + 0.01).mT, "0": q})
        >>> {name: tuple(matrix.shape) for name, matrix in found.items()}
        {'q': (4, 6), 'k': (4, 6)}
    """
    kept: dict[tuple[int, ...], list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
    for name, matrix in b.items():
        for turned in (matrix, matrix.mT):
            kept[tuple(turned.shape)].append((name, turned, _looked_at(turned)))
    if len(a) * max(map(len, kept.values()), default=0) > _MOST_PRODUCTS:
        return {}
    found: dict[str, Tensor] = {}
    for name, matrix in a.items():
        own, like = _looked_at(matrix), kept[tuple(matrix.shape)]
        if not like:
            continue
        cosines = torch.stack([each for _, _, each in like]) @ own
        best = int(cosines.argmax())
        if float(cosines[best]) > _ROUNDED_COSINE:
            found[name] = like[best][1].to(matrix.device)
    return found


def _looked_at(matrix: Tensor) -> Tensor:
    step = max(1, matrix.numel() // _LOOKED_AT) | 1  # an odd step meets every column
    some = matrix.reshape(-1)[::step].double().cpu()
    unit: Tensor = some / some.norm().clamp(min=1e-300)
    return unit
