"""The logits are multiplied by another number: the scale left out, applied twice, inverted, of another dimension.

What counts is the product of all factors, wherever they stand. Where a softcap lies between them, how they are shared
out is the business of `softcap_order`. Factors that differ by row, as log n, are `length_factor`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.tolerance import close, inverse_root
from sqrtdk.compare.causes._lengths import by_length
from sqrtdk.compare.numbers import (
    HELD,
    Value,
    held,
    of_formula,
    one_number,
    over,
    ratio,
    same,
    shown_apart,
    told_apart,
    total,
)
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion
from sqrtdk.tracing.records import AttentionCall, Scale

NAME = "scale"
SAID = {
    "missing": ("leaves the scale out", "has the scale that A leaves out"),
    "twice": ("applies the scale twice", "applies once the scale that A applies twice"),
    "inverted": ("multiplies by the root of head_dim instead of dividing", "divides by what A multiplies by"),
    "model_dim": ("takes the root of the model's width", "does not take the root of the model's width, as A does"),
    "head_count": ("takes the root of the number of heads", "does not take the root of the number of heads, as A does"),
    "padded_head": ("takes the root of a padded head_dim", "does not take the root of a padded head_dim, as A does"),
}


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """The scale of B in A's formula, where the two are not the same."""
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None:
        return
    capped_alike = a.softcap is not None and b.softcap is not None and a.softcap_at == b.softcap_at
    off = held(sides.a.dtype, sides.b.dtype)
    if same(total(a), total(b), off) and (not capped_alike or same(a.scale, b.scale, off)):
        return
    if by_length(sides):
        return
    yield Suspicion(
        NAME,
        "scale",
        *shown_apart(total(a), total(b)),
        of_formula(lambda formula: rescaled(formula, b)),
        describe(sides, total(a), total(b)),
    )


def rescaled(formula: Formula, other: Formula) -> Formula:
    """The formula with all factors of the other, before and after its own softcap as they were."""
    if formula.softcap_at == other.softcap_at:
        return replace(formula, scale=other.scale, after=other.after)
    if formula.softcap_at == "product":
        return replace(formula, after=over(total(other), formula.scale))
    return replace(formula, scale=over(total(other), formula.after))


def describe(sides: Sides, a: Value, b: Value) -> str:
    """Half a sentence on the factors of B, those of A being `a`."""
    one_a, one_b = one_number(a), one_number(b)
    if one_a is None or one_b is None:
        return _of_many(a, b)
    old, new = told_apart(one_a, one_b)
    numbers = f"({new} in place of {old})"
    of_b, of_a = _mistake(sides, one_a, one_b), _mistake(sides, one_b, one_a)
    if of_b is not None and not sides.declared_b:
        return f"{SAID[of_b][0]} {numbers}"
    if of_b is None and of_a is not None and not sides.declared_a:
        return f"{SAID[of_a][1]} {numbers}"
    if sides.declared_b:
        return f"applies its declared scale, {sides.declared_b} {numbers}"
    if sides.declared_a:
        return f"does not apply the scale that A declares, {sides.declared_a} {numbers}"
    if one_a and one_b / one_a < 0:
        return f"scales with the other sign {numbers}"
    if close(one_b, inverse_root(sides.head_dim), HELD):
        return f"scales by 1/sqrt(head_dim) {numbers}"
    return f"scales by another number {numbers}"


def _mistake(sides: Sides, right: float, wrong: float) -> str | None:
    """The mistake that makes `wrong` of `right`; of the textbook's scale those that are of a dimension as well."""
    if right <= 0 or wrong <= 0:
        return None
    by_ratio = {"missing": 1.0, "twice": right * right, "inverted": 1.0 / right}
    names = [name for name, value in by_ratio.items() if close(wrong, value, HELD) and not close(right, 1.0, HELD)]
    textbook = close(right, inverse_root(sides.head_dim), HELD)
    if textbook:
        call = _call(sides)
        names += [name for name in SAID if any(close(wrong, value, HELD) for value in MISTAKES[name].values(call))]
    return min(names, key=lambda name: MISTAKES[name].rank, default=None)


def _call(sides: Sides) -> AttentionCall:
    """What the dictionary of mistakes looks at: the sizes of an attention."""
    of_heads = sides.b.key.heads
    groups = sides.heads if of_heads is None else int(torch.unique(of_heads).numel())
    return AttentionCall(
        site="", index=0, module_class="", kind="", op="", score="dot", batch=1, heads=sides.heads, kv_heads=groups,
        head_dim=sides.head_dim, padded_head_dim=sides.head_dim, value_dim=sides.head_dim, model_dim=sides.model_dim,
        query_len=1, key_len=1, self_attention=sides.self_attention, dtype="", logits_dtype="", device="", stages=(),
        formula="", scale=Scale(None, None, None, None, None, ()),
    )  # fmt: skip


def _of_many(a: Value, b: Value) -> str:
    """Of factors that are not one number."""
    old, new = shown_apart(a, b)
    numbers = f"({new} in place of {old})"
    if ratio(a, b) is not None:
        return f"multiplies every factor of the scale by {ratio(a, b):.4g} {numbers}"
    what, added = over(b, a), True
    if one_number(a) is None and one_number(b) is not None:
        what, added = over(a, b), False
    kind = _kind(what)
    if one_number(a) is None and one_number(b) is None:
        return f"has other factors of {kind} {numbers}"
    return f"multiplies by factors of {kind} {numbers}" if added else f"leaves out factors of {kind} {numbers}"


def _kind(factors: Value) -> str:
    """What factors go by: "each row, the log of its number", "each head"."""
    assert isinstance(factors, Tensor)
    sizes = (1, 1, 1, 1, *factors.shape)[-4:]
    by = [name for name, size in zip(("batch entry", "head", "row", "key"), sizes, strict=True) if size > 1]
    if by == ["row"] and _logarithmic(factors.flatten()):
        return "each row, in proportion to the log of its number"
    return "each " + " and ".join(by)


def _logarithmic(rows: Tensor) -> bool:
    """Whether the last rows are in proportion to the log of one and their number, or of that and a start."""
    late = rows[rows.numel() // 2 :].double()
    if late.numel() < 3:
        return False
    number = torch.arange(rows.numel() - late.numel() + 1, rows.numel() + 1, dtype=torch.float64).log()
    factor = float((late * number).sum() / (number * number).sum())
    return not math.isclose(factor, 0.0) and bool(((late - factor * number).abs() <= 1e-5 * late.abs().max()).all())
