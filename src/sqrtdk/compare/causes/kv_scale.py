"""`kv_scale`: k or v is off by a factor of each head: the scale of a quantised cache applied twice or not at all.

A factor on q, or one that the code put into the logits, is `scale`; one in the rows of the projection is `weights`; one
and the same on q and k, both rotated, is `length_factor`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes._parts import Finding, apart, joined, like_amplitude, number, slack, way
from sqrtdk.compare.program import Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "kv_scale"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """Another factor on k or v."""
    yield from joined(NAME, "", _findings(sides))


def _findings(sides: Sides) -> Iterator[Finding]:
    for part in ("key", "value"):
        a, b = (torch.as_tensor(way(side, part).scaled, dtype=torch.float64) for side in (sides.a, sides.b))
        if not apart(a, b, slack(sides)) or (part == "key" and like_amplitude(sides)):
            continue
        scaled = way(sides.b, part).scaled

        def other(old: Way, scaled: Tensor | float = scaled) -> Way:
            return replace(old, scaled=scaled)

        ratio = (b / a).flatten()
        words = _size(a), _size(b)
        text = f"has {{}} times {_size(ratio)}: the scale of a quantised cache applied twice, or not at all"
        yield Finding(part, *words, text, other)


def _size(factor: Tensor) -> float | str:
    least, most = float(factor.min()), float(factor.max())
    return number(least) if number(least) == number(most) else f"{number(least):g} to {number(most):g}"
