"""Completes what one side does not tell about an attention, from its own numbers and from the other side.

A trace file may hold only q, k, v and the output. If both sides had the same input, the other side's projected values
are also this side's. The missing steps are those, near the other side's, that lead from them to the values at the
product. That such steps exist is the proof that the inputs were equal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from sqrtdk.compare.build import program_of
from sqrtdk.compare.compute import dtype_of, project
from sqrtdk.compare.infer_formula import infer, known_of
from sqrtdk.compare.infer_used import compare_used
from sqrtdk.compare.infer_vectors import infer_way
from sqrtdk.compare.numbers import one_number, total
from sqrtdk.compare.observed import NAMES, NEAR, Seen, is_power
from sqrtdk.compare.program import Formula, Program, Rotation, Way
from sqrtdk.compare.recorded import Recorded
from sqrtdk.compare.segments import is_known
from sqrtdk.compare.suspect import way_of, with_way
from sqrtdk.tracing.tensors import CallTensors

ALIKE = 16.0  # roundings, in root mean square, within which two tensors are equal
TIGHT = 2.0  # for two vectors of one input: the sums of another kernel, and nothing else
ALONG = 0.99  # cosine of the first row's output and first value, if that row sees no other key
Vectors = dict[str, Seen]


@dataclass(frozen=True, slots=True, eq=False)
class Told:
    """A side: its call, its q, k and v, and its program."""

    call: CallTensors
    seen: Vectors
    program: Program

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the side computed."""
        return dtype_of(self.call.dtype)


def completed(
    a: CallTensors,
    b: CallTensors,
    seen_a: Mapping[str, Seen],
    seen_b: Mapping[str, Seen],
    first: tuple[Formula | None, Formula | None] = (None, None),
) -> list[Told]:
    """Returns both sides, completed from their numbers and from each other.

    Args:
        a: tensors of A.
        b: tensors of B.
        seen_a: result of `observe(a)`.
        seen_b: result of `observe(b)`.
        first: formulas of A and B in the previous call, which this call probably shares.
    """
    sides = []
    for call, own, others in ((a, seen_a, seen_b), (b, seen_b, seen_a)):
        lent = {name: others[name].projected for name in NAMES if own[name].projected is None}
        lent = {name: values for name, values in lent.items() if values is not None}
        seen = {**own, **{name: replace(own[name], projected=lent[name], borrowed=True) for name in lent}}
        sides.append(Told(call, seen, program_of(call, seen)))
    for name in NAMES:
        sides = _with_ways(sides, name)
    sides = [_folded(side) for side in sides]
    if _told_alike(sides):
        return sides  # equal q, k, v and output need no formula
    # A is tried again after B: the first time B's formula was unknown, so only a usual one was a start.
    for this in (0, 1, 0) if sides[1].program.formula is None else (0, 1):
        sides[this] = _with_formula(sides[this], sides[1 - this].program.formula, first[this])
    return [_sized(sides[this], sides[1 - this]) for this in (0, 1)]


def _told_alike(sides: list[Told]) -> bool:
    """Returns whether neither side tells a formula, and q, k, v and the output are equal."""
    if any(side.program.formula is not None for side in sides):
        return False
    dtype, (one, other) = coarser(sides), sides
    vectors = all(near(one.seen[name].used, other.seen[name].used, dtype, TIGHT) for name in NAMES)
    return vectors and near(one.call.output, other.call.output, dtype, TIGHT)


def coarser(sides: list[Told]) -> torch.dtype:
    """Returns the coarser dtype of the two sides."""
    return max((side.dtype for side in sides), key=lambda dtype: torch.finfo(dtype).eps)


def near(one: Tensor | None, other: Tensor | None, dtype: torch.dtype, roundings: float = ALIKE) -> bool:
    """Returns whether two tensors are equal within some roundings of a dtype; False if one is unknown.

    Example:
        >>> x = torch.ones(1, 1, 2, 2)
        >>> near(x, x * (1 + 2**-9), torch.bfloat16), near(x, x * (1 + 2**-9), torch.float32)
        (True, False)
    """
    if one is None or other is None or one.shape != other.shape or not one.numel():
        return False
    unit = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) / 2
    return bool((one.double() - other.double()).norm() <= roundings * unit * other.double().norm())


# -- q, k and v --------------------------------------------------------------------------------------------------------


def _with_ways(sides: list[Told], name: str) -> list[Told]:
    """Returns both sides with the steps of one vector completed; values borrowed without use are dropped."""
    ways = [way_of(side.program, name) for side in sides]
    if sides[0].seen[name].projected is None and sides[1].seen[name].projected is None:
        return _from_used(sides, name)
    for this in (0, 1):
        own, other = sides[this], sides[1 - this]
        vector = own.seen[name]
        if is_known(ways[this]) or vector.projected is None or not is_known(ways[1 - this]):
            continue
        found, factor = _found(own, other, name, coarser(sides))
        if found is not None:
            sides[this] = _into_scale(_told(own, other, name, found), name, factor)
        else:
            sides[this] = _given_back(own, name)
    if not any(is_known(way_of(side.program, name)) for side in sides) and any(x.seen[name].borrowed for x in sides):
        return _from_used([_given_back(side, name) for side in sides], name)
    return sides


def _given_back(side: Told, name: str) -> Told:
    """Returns a side without the values that it borrowed for a vector."""
    vector = side.seen[name]
    own = replace(vector, projected=None, borrowed=False) if vector.borrowed else vector
    return replace(side, seen=side.seen | {name: own})


def _found(own: Told, other: Told, name: str, dtype: torch.dtype) -> tuple[Way | None, float]:
    """Returns the way of a vector, and the part of the scale that multiplied it: none, or the other side's part.

    Of the two candidates, the one whose amplification is closest to the other side's is returned.
    """
    vector, known, beside = own.seen[name], way_of(other.program, name), other.seen[name].factor
    assert vector.projected is not None
    there = isinstance(vector.factor, float) and vector.factor == 1.0
    factors = [1.0, beside] if isinstance(beside, float) and beside not in (0.0, 1.0) and there else [1.0]
    found = [(infer_way(vector.projected, vector.used / factor, known, dtype=dtype), factor) for factor in factors]
    ways = [(way, factor) for way, factor in found if way is not None]
    return min(ways, key=lambda one: abs(math.log(_amplified(one[0]) / _amplified(known))), default=(None, 1.0))


def _amplified(way: Way) -> float:
    """Returns the factor by which a way enlarges its vector, apart from norms."""
    sizes = [float(step.table.abs().median()) for step in way.steps if isinstance(step, Rotation)]
    factor = float(torch.as_tensor(way.scaled, dtype=torch.float64).abs().median())
    return max(math.prod(sizes) * factor, 1e-300)


def _told(own: Told, other: Told, name: str, found: Way) -> Told:
    """Returns a side with a way that was found, and projected values to match if its projection changed."""
    vector, of_other = own.seen[name], way_of(other.program, name)
    moved = found.affine is not None and of_other.affine is not None and found.affine is not of_other.affine
    if not vector.borrowed:
        found = replace(found, affine=way_of(own.program, name).affine)
    elif moved and found.affine is not None and (entering := other.seen[name].input) is not None:
        vector = replace(vector, input=entering, projected=project(found.affine, entering))
    elif moved:
        found = replace(found, affine=None)
    heads = found.heads if found.heads is not of_other.heads else vector.heads
    program = with_way(own.program, name, replace(found, heads=heads))
    return replace(own, seen=own.seen | {name: vector}, program=program)


def _from_used(sides: list[Told], name: str) -> list[Told]:
    """Returns both sides with ways from a common input, if both tell a vector only at the product."""
    vectors = [side.seen[name] for side in sides]
    dtype = coarser(sides)
    if near(vectors[0].used, vectors[1].used, dtype):
        return sides
    pair = compare_used(vectors[0].used, vectors[1].used, dtype=dtype)
    if pair is None:
        return sides
    changed = []
    for side, vector, way in zip(sides, vectors, (pair.a, pair.b), strict=True):
        assert way.affine is not None
        seen = replace(vector, input=pair.input, projected=project(way.affine, pair.input), borrowed=True)
        program = with_way(side.program, name, replace(way, heads=vector.heads))
        changed.append(replace(side, seen=side.seen | {name: seen}, program=program))
    return changed


# -- factors that are parts of the scale -------------------------------------------------------------------------------


def _folded(side: Told) -> Told:
    """Returns the side with fitted factors of q and k moved into the scale: any of q's, powers of the width of k's.

    An equal factor on a rotating q and k may be the amplitude of a cos/sin table (YaRN), so it stays.
    """
    query, key = (way_of(side.program, name) for name in ("query", "key"))
    width = side.seen["query"].used.shape[-1]
    if _amplitude(query, key, width):
        return side
    side = _fold(side, "query")
    return _fold(side, "key") if is_power(key.scaled, width) else side


def _amplitude(query: Way, key: Way, width: int) -> bool:
    if isinstance(query.scaled, Tensor) or isinstance(key.scaled, Tensor) or query.scaled == 1.0:
        return False
    turned = all(any(isinstance(step, Rotation) for step in way.steps) for way in (query, key))
    alike = abs(query.scaled - key.scaled) <= NEAR * abs(query.scaled)
    return turned and alike and not is_power(key.scaled, width)


def _fold(side: Told, name: str) -> Told:
    way, vector = way_of(side.program, name), side.seen[name]
    factor = way.scaled
    none = name != "query" or not bool((factor != 0).all()) if isinstance(factor, Tensor) else factor in (0.0, 1.0)
    if none or isinstance(vector.scaled, Tensor) or vector.scaled != 1.0:  # a factor of the code itself is recorded
        return side
    return _into_scale(replace(side, program=with_way(side.program, name, replace(way, scaled=1.0))), name, factor)


def _into_scale(side: Told, name: str, factor: Tensor | float) -> Told:
    """Returns a side with a factor of one vector moved into the scale of its formula."""
    vector, program, formula = side.seen[name], side.program, side.program.formula
    seen = replace(vector, used=vector.used / factor, factor=vector.factor * factor)
    if formula is not None:
        program = replace(program, formula=replace(formula, scale=formula.scale * factor))
    return replace(side, seen=side.seen | {name: seen}, program=program)


# -- the formula -------------------------------------------------------------------------------------------------------


def _with_formula(side: Told, other: Formula | None, first: Formula | None) -> Told:
    """Returns the side with the formula that gives the output, near the other side's formula or a usual one.

    If k and v have fewer heads than q, another order of groups is tried when the usual one gives nothing.
    """
    call = side.call
    if side.program.formula is not None or call.missing is not None:
        return side
    output = call.output.detach().to(side.dtype)  # may be stored in a finer dtype than it was computed in
    known = known_of(call, side.seen)
    for far, grouped in product((False, True), _grouped(side)):
        # every cheap search, in both group orders, before any expensive one
        query, key, value = (vector.used[:, vector.heads] for vector in (grouped.seen[name] for name in NAMES))
        base = _usual(query, value, call.output) if other is None else other
        formula = infer(Recorded(query, key, value, output, call.lse), base, first, known, far=far)
        if formula is not None:
            return replace(grouped, program=replace(grouped.program, formula=formula))
    return side


def _sized(own: Told, other: Told) -> Told:
    """Returns the side with q rescaled if its scale and q differ from the other side's by the same unknown factor.

    A found scale may partly have been applied to q. It is split so if that brings the sizes of the two q closer.
    """
    formula, beside = own.program.formula, other.program.formula
    if formula is None or beside is None or own.call.terms is not None:
        return own
    if all(is_known(way_of(side.program, "query")) for side in (own, other)):
        return own
    query, there = (side.seen["query"].used for side in (own, other))
    scale, wanted = one_number(total(formula)), one_number(total(beside))
    if near(query, there, coarser([own, other])) or not scale or not wanted or scale * wanted < 0:
        return own
    factor = scale / wanted
    apart = math.log(max(float(query.norm() / there.norm().clamp_min(1e-300)), 1e-300))
    if abs(apart + math.log(factor)) >= abs(apart):
        return own
    return _into_scale(own, "query", 1 / factor)


def _grouped(side: Told) -> Iterator[Told]:
    """Yields the side; then, with grouped heads, the side whose query heads read the key heads in turn."""
    yield side
    count = side.seen["query"].used.shape[1]
    groups = side.call.key.values.shape[1]
    turn = torch.arange(count) % groups
    if 1 < groups < count and all(side.seen[name].used.shape[1] == groups for name in ("key", "value")):
        for name in ("key", "value"):
            way = replace(way_of(side.program, name), heads=turn)
            seen = side.seen | {name: replace(side.seen[name], heads=turn)}
            side = replace(side, seen=seen, program=with_way(side.program, name, way))
        yield side


def _usual(query: Tensor, value: Tensor, output: Tensor) -> Formula:
    """Returns scale 1/sqrt(E); with a causal mask if the first rows give only their own value."""
    (rows, width), keys = query.shape[-2:], value.shape[-2]
    if not 1 < rows <= keys:
        return Formula(width**-0.5)
    visible = torch.ones(1, 1, rows, keys, dtype=torch.bool, device=query.device).tril(keys - rows)
    first, own = output[:, :, 0].double(), value[:, :, 0].double()
    along = torch.nn.functional.cosine_similarity(first, own, dim=-1)
    causal = bool((along > ALONG).double().mean() > 0.5) or keys > rows
    return Formula(width**-0.5, visible=visible, mask="causal") if causal else Formula(width**-0.5)
