"""Steps that neither side's program knows: the ways up to them and behind them; vectors that no segment tells of.

A step that both sides have and that nothing can be computed through, the rounding of a quantised cache say, parts a way
in two. A's program is run up to it, from what B had at the input, and goes on behind it with what B had there. Vectors
of which no segment tells anything are compared as they are, where both sides had the same input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.completing import ALIKE, TIGHT, Told, coarser, near
from sqrtdk.compare.explain import Explained, stage_of_vector, unknown_cause
from sqrtdk.compare.observed import NAMES, Seen
from sqrtdk.compare.program import Opaque, Program, Way
from sqrtdk.compare.segments import Segment, gap
from sqrtdk.compare.suspect import way_of, with_way

ONE_INPUT = 128.0  # roundings of the coarser dtype within which two inputs are taken for one
WORDS = {"query": "q", "key": "k", "value": "v"}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Both programs and B's q, k and v, of a part of the ways."""

    a: Program
    b: Program
    seen: dict[str, Seen]

    def of(self, name: str, ways: Sequence[Way], vector: Seen) -> Part:
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
        before = before.of(name, first, replace(vectors[1], used=starts[1].double()))
        behind = replace(vectors[1], projected=ends[1].double(), input=None, borrowed=False)
        after = after.of(name, last, behind)
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


# -- vectors as they are -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Direct:
    """Vectors that were compared directly.

    Attributes:
        parts: those that differ, though both sides had the same input.
        reasons: of those that could not be compared.
    """

    parts: tuple[tuple[Segment, Explained], ...] = ()
    reasons: tuple[str, ...] = ()


def compare_directly(sides: list[Told], program: Program, covered: set[str], rows: Tensor | None) -> Direct:
    """Compare what no segment covers.

    Args:
        sides: both.
        program: A's.
        covered: names of the segments that there are.
        rows: (B, L), True where the output is compared.
    """
    one_input, parts, reasons = same_input(sides, rows), [], []
    for name in NAMES:
        if f"{name} used" in covered or _used_alike(sides, name, rows, ALIKE):
            continue
        one, other = (_kept(side.seen[name].used, rows) for side in sides)
        if one_input and one.shape == other.shape:
            stage = stage_of_vector(name, [side.program for side in sides])
            parts.append(_differs(name, (stage,), one, other, coarser(sides), program))
            continue
        step = _step(sides, name)
        reasons.append(f"{WORDS[name]} can't be compared: {step}, and the inputs are not known to be the same")
    return Direct(tuple(parts), tuple(reasons))


def same_input(sides: list[Told], rows: Tensor | None = None) -> bool:
    """Whether what came in is known to be the same: the inputs, or one of the vectors that were made of it."""
    one, other = (side.seen for side in sides)
    return any(
        near(one[name].input, other[name].input, coarser(sides), TIGHT) or _used_alike(sides, name, rows, TIGHT)
        for name in NAMES
    )


def same_output(sides: list[Told], rows: Tensor | None) -> bool:
    """Whether the outputs agree of what is known to be the same input."""
    return same_input(sides, rows) and _output_alike(sides, rows, ALIKE)


def outputs_alike(sides: list[Told], rows: Tensor | None, roundings: float = ALIKE) -> bool | None:
    """Whether the outputs agree, where q, k and v do, within some roundings; None where these don't."""
    vectors = all(_used_alike(sides, name, rows, roundings) for name in NAMES)
    return _output_alike(sides, rows, roundings) if vectors else None


def output_differs(sides: list[Told], rows: Tensor | None, program: Program) -> tuple[Segment, Explained]:
    """The part of the output, where it differs and its formula is not known."""
    one, other = (_kept(side.call.output, rows) for side in sides)
    return _differs("output", ("weights", "output"), one, other, coarser(sides), program)


def _used_alike(sides: list[Told], name: str, rows: Tensor | None, roundings: float) -> bool:
    one, other = (_kept(side.seen[name].used, rows) for side in sides)
    return near(one, other, coarser(sides), roundings)


def _output_alike(sides: list[Told], rows: Tensor | None, roundings: float) -> bool:
    one, other = (_kept(side.call.output, rows) for side in sides)
    return near(one, other, coarser(sides), roundings)


def _differs(
    name: str, stages: tuple[str, ...], one: Tensor, other: Tensor, dtype: torch.dtype, program: Program
) -> tuple[Segment, Explained]:
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 2
    allowed = ALIKE * unit * float(other.double().square().mean().sqrt())
    segment = Segment(f"{name} used", stages, other, lambda _: one.double(), lambda _: allowed, asks=())
    apart = replace(gap(segment, program), within=False)
    return segment, Explained((unknown_cause(stages[0], apart),), program, apart, apart)


def _kept(values: Tensor, rows: Tensor | None) -> Tensor:
    """Rows that are compared, those of tokens; all where rows are no tokens."""
    if rows is None or values.shape[0] != rows.shape[0] or values.shape[2] != rows.shape[1] or not bool(rows.any()):
        return values
    return values.transpose(1, 2)[rows][None].transpose(1, 2)


def _step(sides: list[Told], name: str) -> str:
    """What is not known of a vector's way, in few words."""
    for label, side in zip("AB", sides, strict=True):
        unknown = [step.name for step in way_of(side.program, name).steps if isinstance(step, Opaque)]
        if unknown:
            return (
                f"{label} does not tell what it was projected to"
                if unknown == ["not recorded"]
                else (f"a step of {label} is not known ({unknown[0]})")
            )
    return "its way is not known"
