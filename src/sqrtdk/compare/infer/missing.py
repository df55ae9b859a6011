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

from sqrtdk.compare.infer.evidence import SEARCH_NUMBERS, Recorded, SearchWork
from sqrtdk.compare.infer.formula import infer_formula, known_formula
from sqrtdk.compare.infer.used import compare_used
from sqrtdk.compare.infer.vectors import infer_path
from sqrtdk.compare.inside.build import program_of
from sqrtdk.compare.inside.call_numbers import FACTOR_TOLERANCE, ObservedVector, is_power
from sqrtdk.compare.inside.compute import dtype_by_name, project_input
from sqrtdk.compare.inside.program import QKV, Formula, Program, Rotation, VectorPath
from sqrtdk.compare.inside.segments import is_known
from sqrtdk.compare.inside.suspect import path_of, with_path
from sqrtdk.compare.numbers import single_number, total
from sqrtdk.masks.band import band_mask
from sqrtdk.messages import Message
from sqrtdk.tracing.tensors import CallTensors

EQUAL_ROUNDINGS = 16.0  # roundings, in root mean square, within which two tensors are equal
KERNEL_ROUNDINGS = 2.0  # for two vectors of one input: the sums of another kernel, and nothing else
FIRST_VALUE_COSINE = 0.99  # cosine of the first row's output and first value, if that row sees no other key
ObservedVectors = dict[str, ObservedVector]


@dataclass(frozen=True, slots=True, eq=False)
class KnownSide:
    """What is known about one side of a pair.

    Attributes:
        call: tensors of the call.
        seen: q, k and v by name.
        program: the program, completed as far as possible.
        ended: what the search for the formula left out, as half a sentence; None if nothing.
    """

    call: CallTensors
    seen: ObservedVectors
    program: Program
    ended: Message | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype in which the side computed."""
        return dtype_by_name(self.call.dtype)


def complete_sides(
    a: CallTensors,
    b: CallTensors,
    seen_a: Mapping[str, ObservedVector],
    seen_b: Mapping[str, ObservedVector],
    first: tuple[Formula | None, Formula | None] = (None, None),
    work: SearchWork | None = None,
) -> list[KnownSide]:
    """Return both sides, completed from their numbers and from each other.

    Args:
        a: tensors of A.
        b: tensors of B.
        seen_a: result of `observe(a)`.
        seen_b: result of `observe(b)`.
        first: formulas of A and B in the previous call, which this call probably shares.
        work: what the searches of all calls may compute; None is as much as for one comparison.
    """
    work = SearchWork(SEARCH_NUMBERS) if work is None else work
    sides = []
    for call, own, others in ((a, seen_a, seen_b), (b, seen_b, seen_a)):
        lent = {name: others[name].projected for name in QKV if own[name].projected is None}
        lent = {name: values for name, values in lent.items() if values is not None}
        seen = {**own, **{name: replace(own[name], projected=lent[name], borrowed=True) for name in lent}}
        sides.append(KnownSide(call, seen, program_of(call, seen)))
    on_the_way = work.part()
    for name in QKV:
        sides = _with_paths(sides, name, on_the_way)
    sides = [_folded(side) for side in sides]
    if _equal_without_formula(sides):
        return sides  # equal q, k, v and output need no formula
    started = sides[1].program.formula is not None
    for this in (0, 1):
        search = work.part(on_the_way)
        sides[this] = _with_formula(sides[this], sides[1 - this].program.formula, first[this], search)
    if not started and sides[1].program.formula is not None:
        # A is tried again: the first time B's formula was unknown, so only a usual one was a start
        sides[0] = _with_formula(sides[0], sides[1].program.formula, first[0], work.part(on_the_way))
    return [_sized(sides[this], sides[1 - this]) for this in (0, 1)]


def _equal_without_formula(sides: list[KnownSide]) -> bool:
    """Return whether neither side tells a formula, and q, k, v and the output are equal."""
    if any(side.program.formula is not None for side in sides):
        return False
    dtype, (one, other) = coarser(sides), sides
    vectors = all(near(one.seen[name].used, other.seen[name].used, dtype, KERNEL_ROUNDINGS) for name in QKV)
    return vectors and near(one.call.output, other.call.output, dtype, KERNEL_ROUNDINGS)


def coarser(sides: list[KnownSide]) -> torch.dtype:
    """Return the dtype with the larger eps of the sides' dtypes."""
    return max((side.dtype for side in sides), key=lambda dtype: torch.finfo(dtype).eps)


def near(one: Tensor | None, other: Tensor | None, dtype: torch.dtype, roundings: float = EQUAL_ROUNDINGS) -> bool:
    """Return whether ||one - other|| <= roundings * u * ||other||, u the unit roundoff.

    It is False if a tensor is None or empty or if the shapes differ.

    Args:
        one: a tensor, or None if unknown.
        other: a tensor, or None if unknown.
        dtype: dtype of u, which is at least that of float32.
        roundings: allowed number of roundings.

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


def _with_paths(sides: list[KnownSide], name: str, work: SearchWork) -> list[KnownSide]:
    """Return both sides with the steps of one vector completed; values borrowed without use are dropped."""
    paths = [path_of(side.program, name) for side in sides]
    if sides[0].seen[name].projected is None and sides[1].seen[name].projected is None:
        return _from_used(sides, name, work)
    for this in (0, 1):
        own, other = sides[this], sides[1 - this]
        vector = own.seen[name]
        if is_known(paths[this]) or vector.projected is None or not is_known(paths[1 - this]):
            continue
        found, factor = _path_and_scale(own, other, name, coarser(sides), work)
        if found is not None:
            work.found()
            sides[this] = _into_scale(_with_path(own, other, name, found), name, factor)
        else:
            sides[this] = _given_back(own, name)
    if not any(is_known(path_of(side.program, name)) for side in sides) and any(x.seen[name].borrowed for x in sides):
        return _from_used([_given_back(side, name) for side in sides], name, work)
    return sides


def _given_back(side: KnownSide, name: str) -> KnownSide:
    """Return a side without the values that it borrowed for a vector."""
    vector = side.seen[name]
    own = replace(vector, projected=None, borrowed=False) if vector.borrowed else vector
    return replace(side, seen=side.seen | {name: own})


def _path_and_scale(
    own: KnownSide, other: KnownSide, name: str, dtype: torch.dtype, work: SearchWork
) -> tuple[VectorPath | None, float]:
    """Return the path of a vector, and the part of the scale that multiplied it: none, or the other side's part.

    Of the two candidates, the one whose amplification is closest to the other side's is returned.
    """
    vector, known, beside = own.seen[name], path_of(other.program, name), other.seen[name].factor
    assert vector.projected is not None
    there = isinstance(vector.factor, float) and vector.factor == 1.0
    factors = [1.0, beside] if isinstance(beside, float) and beside not in (0.0, 1.0) and there else [1.0]
    found = [
        (infer_path(vector.projected, vector.used / factor, known, dtype=dtype, work=work), factor)
        for factor in factors
    ]
    paths = [(path, factor) for path, factor in found if path is not None]
    return min(paths, key=lambda one: abs(math.log(_amplified(one[0]) / _amplified(known))), default=(None, 1.0))


def _amplified(path: VectorPath) -> float:
    """Return the factor by which a path enlarges its vector, apart from norms."""
    sizes = [float(step.table.abs().median()) for step in path.steps if isinstance(step, Rotation)]
    factor = float(torch.as_tensor(path.scaled, dtype=torch.float64).abs().median())
    return max(math.prod(sizes) * factor, 1e-300)


def _with_path(own: KnownSide, other: KnownSide, name: str, found: VectorPath) -> KnownSide:
    """Return a side with a path that was found, and projected values to match if its projection changed."""
    vector, of_other = own.seen[name], path_of(other.program, name)
    moved = found.affine is not None and of_other.affine is not None and found.affine is not of_other.affine
    if not vector.borrowed:
        found = replace(found, affine=path_of(own.program, name).affine)
    elif moved and found.affine is not None and (entering := other.seen[name].input) is not None:
        vector = replace(vector, input=entering, projected=project_input(found.affine, entering))
    elif moved:
        found = replace(found, affine=None)
    heads = found.heads if found.heads is not of_other.heads else vector.heads
    program = with_path(own.program, name, replace(found, heads=heads))
    return replace(own, seen=own.seen | {name: vector}, program=program)


def _from_used(sides: list[KnownSide], name: str, work: SearchWork) -> list[KnownSide]:
    """Return both sides with paths from a common input, if both tell a vector only at the product."""
    vectors = [side.seen[name] for side in sides]
    dtype = coarser(sides)
    if near(vectors[0].used, vectors[1].used, dtype):
        return sides
    pair = compare_used(vectors[0].used, vectors[1].used, dtype=dtype, work=work)
    if pair is None:
        return sides
    work.found()
    changed = []
    for side, vector, path in zip(sides, vectors, (pair.a, pair.b), strict=True):
        assert path.affine is not None
        seen = replace(vector, input=pair.input, projected=project_input(path.affine, pair.input), borrowed=True)
        program = with_path(side.program, name, replace(path, heads=vector.heads))
        changed.append(replace(side, seen=side.seen | {name: seen}, program=program))
    return changed


# -- factors that are parts of the scale -------------------------------------------------------------------------------


def _folded(side: KnownSide) -> KnownSide:
    """Return the side with fitted factors of q and k moved into the scale: any of q's, powers of the width of k's.

    An equal factor on a rotating q and k may be the amplitude of a cos/sin table (YaRN), so it stays.
    """
    query, key = (path_of(side.program, name) for name in ("query", "key"))
    width = side.seen["query"].used.shape[-1]
    if _amplitude(query, key, width):
        return side
    side = _fold(side, "query")
    return _fold(side, "key") if is_power(key.scaled, width) else side


def _amplitude(query: VectorPath, key: VectorPath, width: int) -> bool:
    if isinstance(query.scaled, Tensor) or isinstance(key.scaled, Tensor) or query.scaled == 1.0:
        return False
    turned = all(any(isinstance(step, Rotation) for step in path.steps) for path in (query, key))
    alike = abs(query.scaled - key.scaled) <= FACTOR_TOLERANCE * abs(query.scaled)
    return turned and alike and not is_power(key.scaled, width)


def _fold(side: KnownSide, name: str) -> KnownSide:
    path, vector = path_of(side.program, name), side.seen[name]
    factor = path.scaled
    none = name != "query" or not bool((factor != 0).all()) if isinstance(factor, Tensor) else factor in (0.0, 1.0)
    if none or isinstance(vector.scaled, Tensor) or vector.scaled != 1.0:  # a factor of the code itself is recorded
        return side
    return _into_scale(replace(side, program=with_path(side.program, name, replace(path, scaled=1.0))), name, factor)


def _into_scale(side: KnownSide, name: str, factor: Tensor | float) -> KnownSide:
    """Return a side with a factor of one vector moved into the scale of its formula."""
    vector, program, formula = side.seen[name], side.program, side.program.formula
    seen = replace(vector, used=vector.used / factor, factor=vector.factor * factor)
    if formula is not None:
        program = replace(program, formula=replace(formula, scale=formula.scale * factor))
    return replace(side, seen=side.seen | {name: seen}, program=program)


# -- the formula -------------------------------------------------------------------------------------------------------


def _with_formula(side: KnownSide, other: Formula | None, first: Formula | None, work: SearchWork) -> KnownSide:
    """Return the side with the formula that gives the output, near the other side's formula or a usual one.

    If k and v have fewer heads than q, another order of groups is tried when the usual one gives nothing.
    """
    call = side.call
    if side.program.formula is not None or call.missing is not None:
        return side
    output = call.output.detach().to(side.dtype)  # may be stored in a finer dtype than it was computed in
    known = known_formula(call, side.seen)
    for far, grouped in product((False, True), _grouped(side)):
        # every cheap search, in both group orders, before any expensive one
        query, key, value = (vector.used[:, vector.heads] for vector in (grouped.seen[name] for name in QKV))
        base = _usual(query, value, call.output) if other is None else other
        told = Recorded(query, key, value, output, call.lse)
        formula = infer_formula(told, base, first, known, far=far, work=work)
        if formula is not None:
            work.found()
            return replace(grouped, program=replace(grouped.program, formula=formula))
    return replace(side, ended=work.ended)


def _sized(own: KnownSide, other: KnownSide) -> KnownSide:
    """Return the side with q rescaled if its scale and q differ from the other side's by the same unknown factor.

    A found scale may partly have been applied to q. It is split so if that brings the sizes of the two q closer.
    """
    formula, beside = own.program.formula, other.program.formula
    if formula is None or beside is None or own.call.terms is not None:
        return own
    if all(is_known(path_of(side.program, "query")) for side in (own, other)):
        return own
    query, there = (side.seen["query"].used for side in (own, other))
    scale, wanted = single_number(total(formula)), single_number(total(beside))
    if near(query, there, coarser([own, other])) or not scale or not wanted or scale * wanted < 0:
        return own
    factor = scale / wanted
    apart = math.log(max(float(query.norm() / there.norm().clamp_min(1e-300)), 1e-300))
    if abs(apart + math.log(factor)) >= abs(apart):
        return own
    return _into_scale(own, "query", 1 / factor)


def _grouped(side: KnownSide) -> Iterator[KnownSide]:
    """Yield the side; then, with grouped heads, the side whose query heads read the key heads in turn."""
    yield side
    count = side.seen["query"].used.shape[1]
    groups = side.call.key.values.shape[1]
    turn = torch.arange(count) % groups
    if 1 < groups < count and all(side.seen[name].used.shape[1] == groups for name in ("key", "value")):
        for name in ("key", "value"):
            path = replace(path_of(side.program, name), heads=turn)
            seen = side.seen | {name: replace(side.seen[name], heads=turn)}
            side = replace(side, seen=seen, program=with_path(side.program, name, path))
        yield side


def _usual(query: Tensor, value: Tensor, output: Tensor) -> Formula:
    """Return scale 1/sqrt(E); with a causal mask if the first rows give only their own value."""
    (rows, width), keys = query.shape[-2:], value.shape[-2]
    if not 1 < rows <= keys:
        return Formula(width**-0.5)
    visible = band_mask(rows, keys, rows - keys, None, query.device)[None, None]
    first, own = output[:, :, 0].double(), value[:, :, 0].double()
    along = torch.nn.functional.cosine_similarity(first, own, dim=-1)
    causal = bool((along > FIRST_VALUE_COSINE).double().mean() > 0.5) or keys > rows
    return Formula(width**-0.5, visible=visible, mask="causal") if causal else Formula(width**-0.5)
