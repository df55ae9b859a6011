"""`projection_bias`: the bias of a projection is missing on one side, or another.

A bias of zeros is none. Rows and biases that moved together are `head_order`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes._parts import QKV, Finding, joined, way
from sqrtdk.compare.causes._rows import bias_of, moved, pool, same
from sqrtdk.compare.program import Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "projection_bias"
NONE, SOME, OTHER = "none", "a bias", "another bias"
TEXTS = {
    (SOME, NONE): "leaves out the bias of the projection of {}",
    (NONE, SOME): "adds a bias to the projection of {}, which A does not",
    (SOME, OTHER): "adds another bias to the projection of {}",
}


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Another bias of q, k or v."""
    yield from joined(NAME, "", _findings(sides))


def _findings(sides: Sides) -> Iterator[Finding]:
    orders: dict[str, Tensor] | None = None
    for part in QKV:
        a, b = way(sides.a, part).affine, way(sides.b, part).affine
        if a is None or b is None or a.weight.shape[:2] != b.weight.shape[:2]:
            continue
        mine, wanted = bias_of(a), bias_of(b)
        if _same(mine, wanted):
            continue
        orders = moved(sides) if orders is None else orders
        if part in orders:
            rows = torch.cat([bias_of(x).flatten() for x in pool(sides.a, part, sides.self_attention)])
            if _same(rows[orders[part]].view_as(wanted), wanted):
                continue
        bias = b.bias

        def other(old: Way, bias: Tensor | None = bias) -> Way:
            return old if old.affine is None else replace(old, affine=replace(old.affine, bias=bias))

        a_words = SOME if bool(mine.any()) else NONE
        b_words = NONE if not bool(wanted.any()) else SOME if a_words == NONE else OTHER
        yield Finding(part, a_words, b_words, TEXTS[a_words, b_words], other)


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(same(a.reshape(1, -1), b.reshape(1, -1)).all())
