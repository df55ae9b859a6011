"""Past steps that neither side's program knows: what is before them and what is after them, each by itself.

A step that both sides have and that nothing can be computed through, the rounding of a quantised cache say, parts a way
in two. A's program is run up to it, from what B had at the input, and goes on behind it with what B had there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.completing import near
from sqrtdk.compare.observed import NAMES, Seen
from sqrtdk.compare.program import Opaque, Program, Way
from sqrtdk.compare.suspect import way_of, with_way

ONE_INPUT = 128.0  # roundings of the coarser dtype within which two inputs are taken for one


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Both programs and B's q, k and v, of a part of the ways."""

    a: Program
    b: Program
    seen: dict[str, Seen]

    def of(self, name: str, ways: tuple[Way, Way], vector: Seen) -> Part:
        """With another way of one vector."""
        return Part(with_way(self.a, name, ways[0]), with_way(self.b, name, ways[1]), self.seen | {name: vector})


@dataclass(frozen=True, slots=True, eq=False)
class Passed:
    """Ways in two parts.

    Attributes:
        names: of the vectors whose ways are; the ways of the others are whole in both parts.
        before: up to the first step that is not known; its formula is none.
        after: from the last one on.
    """

    names: tuple[str, ...]
    before: Part
    after: Part


def past_unknown(a: Program, b: Program, seen_a: Mapping[str, Seen], seen_b: Mapping[str, Seen]) -> Passed:
    """Both programs before and after the steps that are not known and are the same on both sides.

    Where both sides had the same there, what the steps made of it is compared first: one that gave another stays.
    """
    before = Part(replace(a, formula=None), replace(b, formula=None), dict(seen_b))
    after, names = Part(a, b, dict(seen_b)), []
    for name in NAMES:
        ways, vectors = (way_of(a, name), way_of(b, name)), (seen_a[name], seen_b[name])
        spans = [span for way in ways if (span := _unknown(way)) is not None]
        if len(spans) < 2 or _labels(ways[0], spans[0]) != _labels(ways[1], spans[1]):
            continue
        starts = [_at(vector, span.start) for vector, span in zip(vectors, spans, strict=True)]
        ends = [_at(vector, span.stop) for vector, span in zip(vectors, spans, strict=True)]
        if starts[1] is None or ends[1] is None:
            continue
        alike = _near(vectors[0].input, vectors[1].input) and _near(starts[0], starts[1])
        if alike and not _near(ends[0], ends[1]):
            continue
        first = [replace(way, steps=way.steps[: span.start], scaled=1.0) for way, span in zip(ways, spans, strict=True)]
        last = [replace(way, affine=None, steps=way.steps[span.stop :]) for way, span in zip(ways, spans, strict=True)]
        before = before.of(name, (first[0], first[1]), replace(vectors[1], used=starts[1].double()))
        behind = replace(vectors[1], projected=ends[1].double(), input=None, borrowed=False)
        after = after.of(name, (last[0], last[1]), behind)
        names.append(name)
    return Passed(tuple(names), before, after)


def _unknown(way: Way) -> range | None:
    """From the first step that is not known to the last."""
    places = [place for place, step in enumerate(way.steps) if isinstance(step, Opaque)]
    return range(places[0], places[-1] + 1) if places else None


def _labels(way: Way, span: range) -> list[str]:
    return [
        step.name if isinstance(step, Opaque) else type(step).__name__ for step in way.steps[span.start : span.stop]
    ]


def _at(seen: Seen, count: int) -> Tensor | None:
    """The values after so many steps."""
    if count == 0:
        return seen.projected
    return seen.steps[count - 1].values if count <= len(seen.steps) else None


def _near(one: Tensor | None, other: Tensor | None) -> bool:
    """`near`, in the roundings of the coarser of the dtypes that the two are held in."""
    dtypes = [x.dtype for x in (one, other) if x is not None and x.is_floating_point()]
    return near(one, other, max(dtypes, key=lambda x: torch.finfo(x).eps, default=torch.float32), ONE_INPUT)
