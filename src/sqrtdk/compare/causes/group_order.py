"""`group_order`: a query head reads another head of keys and values: grouped heads repeated in the wrong order.

0 0 1 1 is how `repeat_interleave` lays two heads out for four, 0 1 0 1 how `tile` does. Heads whose rows of the
projection stand in another order are `head_order`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes._parts import Finding, joined, way
from sqrtdk.compare.causes._rows import head_map
from sqrtdk.compare.program import Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "group_order"
SHOWN = 8  # heads in a text


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Other heads for the query heads."""
    yield from joined(NAME, "", _findings(sides))


def _findings(sides: Sides) -> Iterator[Finding]:
    for part in ("key", "value"):
        a, b = _read(sides, part)
        if a is None or b is None or a.shape != b.shape or torch.equal(a, b):
            continue
        heads = b

        def other(old: Way, heads: Tensor = heads) -> Way:
            return replace(old, heads=heads)

        words = _order(a), _order(b)
        yield Finding(part, *words, f"gives the query heads the heads {words[1]} of {{}} instead of {words[0]}", other)


def _read(sides: Sides, part: str) -> tuple[Tensor | None, Tensor | None]:
    """For each query head the head of A's that it reads, on both sides; None where that can't be told."""
    a, b = way(sides.a, part), way(sides.b, part)
    mine, other = (x.heads for x in (a, b))
    if a.affine is None or b.affine is None:
        return mine, other
    if len(a.affine.weight) == len(b.affine.weight):
        every = torch.arange(len(a.affine.weight))
        return (every if mine is None else mine), (every if other is None else other)
    same = head_map(a.affine, b.affine)  # a side that repeats the rows has a head for each query head
    if same is None:
        return None, None
    every = torch.arange(len(b.affine.weight))
    return mine, same[every if other is None else other]


def _order(heads: Tensor) -> str:
    shown = " ".join(str(head) for head in heads[:SHOWN].tolist())
    return shown if len(heads) <= SHOWN else f"{shown} ..."
