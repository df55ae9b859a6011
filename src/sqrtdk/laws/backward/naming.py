"""Names what is wrong with gradients: what changed formula, or simple relation, gives those of the run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.laws.backward.case import QUERY_KEY_VALUE, Backward, Case, Fault, Wrong, largest_of
from sqrtdk.laws.backward.factors import call_scales, factor_name
from sqrtdk.laws.backward.faults import FormulaSlip, blind_rows, mistakes
from sqrtdk.laws.backward.formula import FormulaGradients
from sqrtdk.laws.backward.logits import RIGHT_FORMULA

_OWN_VALUES = (  # codes whose values tell two faults apart
    "factor", "scale_missing", "scale_twice", "scale_again", "part_missing", "part_twice", "group", "swapped",
)  # fmt: skip
_LEFT = 0.5  # what a name may leave of a difference, for roundings in another order than the run's


def named_faults(
    case: Case, backward: Backward | None, got: Mapping[str, Tensor | None], wrong: list[Wrong],
    right: FormulaGradients, misread: Tensor | None,
) -> Iterator[Fault]:  # fmt: skip
    """Yield the faults, each with the operands that it explains."""
    others = [one for one in wrong if one.name not in QUERY_KEY_VALUE]
    left = [one for one in wrong if one.name in QUERY_KEY_VALUE]
    none = [one for one in left if _is_zero(one)]
    if {one.name for one in none} == {"q", "k"} and len(left) == 2 and _right_of(case, "v", got, right):
        yield _fault(none, "weights_detached")
        left, none = [], []
    elif none:
        yield _fault(none, "none")
    left = [one for one in left if one not in none]
    nan = [one for one in left if not bool(one.got.isfinite().all())]
    if nan:
        blind = blind_rows(case.call)
        yield _fault(nan, "nan" if blind is None else "nan_blind")
        left = [one for one in left if one not in nan]
    if left and backward is not None:
        again = backward(case.d_out, case.d_lse, True)
        if not all(_equal(got[one.name], again[one.name]) for one in left):
            yield _fault(left, "random" if case.call.kept is None else "dropout_drawn")
            left = []
    blind = blind_rows(case.call)
    if left and backward is not None and blind is not None and bool(case.d_out[blind].any()):
        seeing = replace(case, d_out=case.d_out.masked_fill(blind[..., None], 0.0))
        of_seeing, without = backward(seeing.d_out, case.d_lse, False), seeing.gradients(RIGHT_FORMULA)
        if all(seeing.wrong(one.name, of_seeing[one.name], without) is None for one in left):
            yield _fault(left, "blind_rows")
            left = []
    if left and backward is not None:
        contiguous = backward(case.d_out.contiguous(), case.d_lse, False)
        if all(case.wrong(one.name, contiguous[one.name], right) is None for one in left):
            yield _fault(left, "strided")
            left = []
    if left and misread is not None:
        other = replace(case, d_out=misread)
        of_other = other.gradients(RIGHT_FORMULA)
        if all(other.wrong(one.name, got[one.name], of_other) is None for one in left):
            yield _fault(left, "strided")
            left = []
    yield from _explained(case, left, right)
    for one in others:
        if _is_zero(one):
            yield _fault([one], "none")
        elif not bool(one.got.isfinite().all()):
            yield _fault([one], "nan")
        elif (factor := _factor(one)) is not None and _fits_everywhere(one, factor):
            yield _factor_fault(case, [one], factor)
        else:
            yield _fault([one], "unknown")


def _explained(case: Case, left: list[Wrong], right: FormulaGradients) -> Iterator[Fault]:
    if not left:
        return
    v = next((one for one in left if one.name == "v"), None)
    gain = None if v is None else _factor(v)
    simple = {one.name: fault for one in left if (fault := _simple(case, one, right, gain)) is not None}
    if len(simple) == len(left):
        yield from _folded(simple.values())
        return
    single: dict[str, Fault] = dict(simple)
    q = [one for one in left if one.name == "q"]
    rows, keys = _left_out(q), _left_out([one for one in left if one.name != "q"])
    for mistake in mistakes(case.call, case.d_lse is not None, gain, rows, keys):
        changed = case.gradients(mistake.change)
        fits = [one for one in left if _fits(case, one, changed, mistake)]
        if len(fits) == len(left):
            yield _fault(left, mistake.code, mistake.values)
            return
        for one in fits:
            single.setdefault(one.name, _fault([one], mistake.code, mistake.values))
    yield from _folded(single.get(one.name, _fault([one], "unknown")) for one in left)


def _left_out(wrong: list[Wrong]) -> Tensor | None:
    """Return False for the rows in which a gradient is wrongly zero in all heads, (L,); None without such rows."""
    for one in wrong:
        zero = ~(one.got.any(-1).any(1).any(0)) & one.bad.any(1).any(0)
        if bool(zero.any()) and not bool(zero.all()):
            return ~zero
    return None


def _simple(case: Case, one: Wrong, right: FormulaGradients, gain: float | None) -> Fault | None:
    """Return the fault if the gradient is the formula's times a number, another operand's, or one head's of a group."""
    factor = _factor(one)
    if factor is not None:
        return _factor_fault(case, [one], factor, gain)
    heads, query_heads = case.heads(one.name), case.call.query.values.shape[1]
    if one.name != "q" and heads < query_heads:
        value, added, squared = (_by_group(x[one.name], heads) for x in (right.values, right.sums, right.squares))
        allowed = added + 4 * (squared.sqrt() + right.unit * value.abs() + right.floor)
        for head in range(value.shape[2]):
            if _within(one, value[:, :, head], allowed[:, :, head]):
                return _fault([one], "group", {"head": head})
    for other in QUERY_KEY_VALUE:
        if other != one.name and case.heads(other) == heads:
            value, allowed = case.expected(other, right)
            if value.shape == one.right.shape and _within(one, value, allowed):
                return _fault([one], "swapped", {"other": other})
    return None


def _by_group(x: Tensor, heads: int) -> Tensor:
    return x.reshape(len(x), heads, -1, *x.shape[2:])


def _fits(case: Case, one: Wrong, changed: FormulaGradients, mistake: FormulaSlip) -> bool:
    value, allowed = case.expected(one.name, changed)
    # Logits that a change makes large have bounds so wide that anything is within them.
    if (one.got - value)[one.bad].norm() > _LEFT * (one.got - one.right)[one.bad].norm():
        return False
    return mistake.nearly or _within(one, value, allowed)


def _within(one: Wrong, value: Tensor, allowed: Tensor) -> bool:
    return bool(((one.got - value).abs() <= allowed)[one.bad].all())


def _factor(one: Wrong) -> float | None:
    """Return the number that makes the formula's gradient the run's in the wrong rows, or None."""
    got, right, allowed = one.got[one.bad], one.right[one.bad], one.allowed[one.bad]
    size, least = float((right * right).sum()), float((allowed * allowed).sum())
    if size <= least or float((got * got).sum()) <= least:  # one of them is nothing but rounding
        return None
    factor = float((got * right).sum()) / size
    fits = bool(((got - factor * right).abs() <= allowed * max(1.0, abs(factor))).all())
    return factor if fits and math.isfinite(factor) else None


def _fits_everywhere(one: Wrong, factor: float) -> bool:
    return bool(((one.got - factor * one.right).abs() <= one.allowed * max(1.0, abs(factor))).all())


def _factor_fault(case: Case, wrong: list[Wrong], factor: float, of_v: float | None = None) -> Fault:
    """Return the fault of a factor on a gradient; `of_v` is the factor on that of v, which a group shares with k."""
    name = wrong[0].name
    group = case.call.query.values.shape[1] // case.heads(name) if name in ("k", "v") else 1
    rate = case.call.dropout if case.call.kept is not None else 0.0
    shared = name == "k" and of_v is not None and abs(factor / of_v - 1) < 2e-3
    scales, parts = call_scales(case.call) if name in ("q", "k") and not shared else ((), ())
    code, exact = factor_name(factor, scales, parts, group, rate)
    values = {"factor": f"{exact:.4g}"}
    if code in ("part_missing", "part_twice"):
        values["part"] = f"{exact if code == 'part_twice' else 1 / exact:.4g}"
    return _fault(wrong, code, values)


def _right_of(case: Case, name: str, got: Mapping[str, Tensor | None], right: FormulaGradients) -> bool:
    return name in got and case.wrong(name, got[name], right) is None


def _fault(wrong: list[Wrong], code: str, values: dict[str, Any] | None = None) -> Fault:
    places: list[tuple[int, ...]] = [(), (), ()]
    shapes = {one.bad.shape for one in wrong}
    if all(one.name in QUERY_KEY_VALUE for one in wrong) and len(shapes) == 1:
        bad = torch.stack([one.bad for one in wrong]).any(0)
        for number, axes in enumerate(((0, 2), (0, 1), (1, 2))):
            there = bad.amax(axes)
            if not bool(there.all()):
                places[number] = tuple(there.nonzero().flatten().tolist())
    heads, rows, samples = places
    if code == "unknown" and all(largest_of(one.right) <= largest_of(one.allowed) for one in wrong):
        code = "not_zero"
    off = max(one.off for one in wrong)
    allowed = max(largest_of(one.allowed) / max(largest_of(one.right), 1e-300) for one in wrong)
    return Fault(tuple(one.name for one in wrong), code, values or {}, heads, rows, samples, off, allowed)


def _folded(faults: Any) -> Iterator[Fault]:
    """Yield the faults; those that say the same of several operands as one."""
    folded: list[Fault] = []
    for fault in faults:
        for number, earlier in enumerate(folded):
            alike = earlier.values == fault.values or fault.code not in _OWN_VALUES
            if earlier.code == fault.code != "unknown" and alike:
                folded[number] = replace(
                    earlier,
                    operands=(*earlier.operands, *fault.operands),
                    heads=earlier.heads if earlier.heads == fault.heads else (),
                    rows=earlier.rows if earlier.rows == fault.rows else (),
                    samples=earlier.samples if earlier.samples == fault.samples else (),
                    off=max(earlier.off, fault.off),
                    allowed=max(earlier.allowed, fault.allowed),
                )
                break
        else:
            folded.append(fault)
    yield from folded


def _is_zero(one: Wrong) -> bool:
    return not bool(one.got.any())


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.allclose(one, other, rtol=1e-3, atol=1e-6))
