"""Differences of two formulas: scale, factors of the rows, softcap, sinks, dropout, roundings of logits and weights.

Only the product of all factors counts as the scale, wherever they are applied. If a softcap lies between them, their
split is `softcap_order`. Factors that differ by row, like log n, are `length_factor`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.tolerance import inverse_root, is_close
from sqrtdk.compare.inside.compute import dtype_by_name
from sqrtdk.compare.inside.program import Formula, PathStep, RoundingStep, VectorPath
from sqrtdk.compare.inside.suspect import NO_VALUE, OWN_DTYPE, BothParts, PartDifference, Sides
from sqrtdk.compare.numbers import (
    CONSTANT_TOLERANCE,
    Value,
    quotient,
    rescaled,
    same,
    single_number,
    single_ratio,
    softcap_placed,
    total,
    unequal_texts,
)
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.records import AttentionCall

# mistakes with words of their own
NAMED_MISTAKES = ("missing", "twice", "inverted", "model_dim", "head_count", "derived_head", "padded_head")
DIFFERENT_FACTORS = {True: "causes.length_factor.one", False: "causes.length_factor.each"}
ROW_FACTORS = {  # key: whether A and B have one factor for all rows
    (False, True): "causes.length_factor.missing",
    (True, False): "causes.length_factor.added",
}
WHOLE_ROUNDINGS = 8.0  # roundings of its logarithm within which a number counts as whole
BOTH, LOGITS, WEIGHTS = "causes.rounding.both", "causes.rounding.logits", "causes.rounding.weights"
BATCH, ENTRY = "causes.axis.batch", "causes.axis.entry"
AXIS_WORDS = ("causes.axis.head", "causes.axis.row", "causes.axis.key")


# -- the scale ---------------------------------------------------------------------------------------------------------


def compare_scale(both: BothParts[Formula]) -> PartDifference | None:
    """Return the difference of all that multiplies q . k, or of its part before a common softcap; None if equal."""
    a, b, off = both.a, both.b, both.sides.off
    old, new = total(a), total(b)
    capped_alike = a.softcap is not None and b.softcap is not None and a.softcap_at == b.softcap_at
    if by_length(both) or (same(old, new, off) and (not capped_alike or same(a.scale, b.scale, off))):
        return None
    text = (_cap_words(both) if capped_alike else None) or _scale_words(both.sides, old, new)
    return PartDifference(*shown_apart(old, new), edit=lambda formula: rescaled(formula, b), text=text)


def _cap_words(both: BothParts[Formula]) -> Message | None:
    """Return the words for tanh(z / 50) in place of 50 * tanh(z / 50), or the reverse; None for anything else.

    tanh(z / 50) may be recorded as a softcap of 1 on logits divided by 50, or as a softcap of 50 times 1 / 50.
    """
    a, b, off = both.a, both.b, both.sides.off
    assert a.softcap is not None
    assert b.softcap is not None
    by = single_ratio(total(a), total(b))
    one_argument = same(quotient(a.scale, a.softcap), quotient(b.scale, b.softcap), off)
    if by is None or not one_argument:
        return None
    if is_close(by, 1 / a.softcap, CONSTANT_TOLERANCE):
        return Message("causes.scale.no_cap_behind", cap=f"{a.softcap:g}")
    cap = max(a.softcap, b.softcap)
    return Message("causes.scale.cap_behind", cap=f"{cap:g}") if is_close(by, cap, CONSTANT_TOLERANCE) else None


def _scale_words(sides: Sides, a: Value, b: Value) -> Message:
    one_a, one_b = single_number(a), single_number(b)
    if one_a is None or one_b is None:
        by, factors = single_ratio(a, b), torch.as_tensor(quotient(b, a) if one_b is None else quotient(a, b))
        axes = joined([Message(axis) for axis in _axes(factors, BATCH)], "side_by_side")
        if by is not None:
            what = Message("causes.scale.every_factor", ratio=f"{by:.4g}")
        elif one_b is not None:
            what = Message("causes.scale.factors_lost", what=axes)
        elif one_a is not None:
            what = Message("causes.scale.factors_added", what=axes)
        else:
            what = Message("causes.scale.factors_other", what=axes)
        old, new = (word if isinstance(word, str) else str(word) for word in shown_apart(a, b))
    else:
        what = _other_scale(sides, one_a, one_b)
        old, new = unequal_texts(one_a, one_b)
    return Message("causes.scale.replaced", what=what, new=new, old=old)


def _other_scale(sides: Sides, a: float, b: float) -> Message:
    # B is read as the port of A: its mistake is named first, one of A only if B's scale is none.
    of_b, of_a = _mistake(sides, a, b), _mistake(sides, b, a)
    if of_b is not None and not sides.declared_b:
        return Message(f"causes.scale.{of_b}")
    if of_b is None and of_a is not None and not sides.declared_a:
        return Message(f"causes.scale.{of_a}_in_a")
    if sides.declared_b:
        return Message("causes.scale.declared", by=sides.declared_b)
    if sides.declared_a:
        return Message("causes.scale.declared_in_a", by=sides.declared_a)
    if a and b / a < 0:
        return Message("causes.scale.other_sign")
    textbook = is_close(b, inverse_root(sides.head_dim), CONSTANT_TOLERANCE)
    return Message("causes.scale.textbook" if textbook else "causes.scale.other")


def _mistake(sides: Sides, right: float, wrong: float) -> str | None:
    """Return the sentence on the mistake that turns `right` into `wrong`.

    Wrong dimensions are tried only on the textbook scale.
    """
    if right <= 0 or wrong <= 0:
        return None
    # A right scale of 1 is its own square and its own inverse, so these names say nothing there.
    by_ratio = {"missing": 1.0, "twice": right * right, "inverted": 1.0 / right}
    names = [
        name
        for name, value in by_ratio.items()
        if is_close(wrong, value, CONSTANT_TOLERANCE) and not is_close(right, 1.0, CONSTANT_TOLERANCE)
    ]
    textbook = is_close(right, inverse_root(sides.head_dim), CONSTANT_TOLERANCE)
    if textbook:
        of_heads = sides.b.key.heads
        groups = sides.heads if of_heads is None else int(torch.unique(of_heads).numel())
        # all that the dictionary of mistakes reads from a call
        sizes = {"head_dim": sides.head_dim, "heads": sides.heads, "kv_heads": groups, "model_dim": sides.model_dim}
        call = cast(AttentionCall, SimpleNamespace(**sizes))
        names += [
            name
            for name in NAMED_MISTAKES
            if any(is_close(wrong, value, CONSTANT_TOLERANCE) for value in MISTAKES[name].values(call))
        ]
    name = min(names, key=lambda name: MISTAKES[name].rank, default=None)
    return "head_dim" if name == "twice" and textbook else name  # 1/head_dim is the textbook's square, and a slip


def _axes(values: Tensor, batch: str = ENTRY) -> list[str]:
    """Return the axes along which values vary, by the ids of their names."""
    sizes = (1, 1, 1, 1, *values.shape)[-4:]
    return [name for name, size in zip((batch, *AXIS_WORDS), sizes, strict=True) if size > 1]


def shown_apart(a: Value | None, b: Value | None) -> tuple[str | float | None, str | float | None]:
    """Return two differing numbers as records show them: with more digits, or at the entry that differs most.

    Example:
        >>> one, other = torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.1, 0.3, 0.4])
        >>> shown_apart(one[None, :, None, None], other[None, :, None, None])
        ('0.2 at head 1', '0.3 at head 1')
        >>> shown_apart(50.0, 50.0000001), shown_apart(0.125, one[None, :, None, None])
        ((50.0, 50.0000001), (0.125, '0.1 to 0.4 by head'))
    """
    words = _value_text(a), _value_text(b)
    if words[0] != words[1] or a is None or b is None:
        return words
    x, y = torch.broadcast_tensors(*(torch.as_tensor(value, dtype=torch.float64) for value in (a, b)))  # type: ignore[no-untyped-call]
    if not x.numel():
        return words
    at = int((x - y).abs().nan_to_num().flatten().argmax())
    one, other = unequal_texts(float(x.flatten()[at]), float(y.flatten()[at]))
    if x.numel() == 1 or isinstance(words[0], float):
        return float(one), float(other)
    places = torch.unravel_index(torch.tensor(at), x.squeeze().shape)
    axes = zip(_axes(x), places, strict=True)
    where = joined([Message("causes.axis.at", axis=Message(axis), index=int(place)) for axis, place in axes], "comma")
    old, new = (Message("causes.scale.at_place", value=number, place=where) for number in (one, other))
    return old, new


def _value_text(value: Value | None) -> str | float | None:
    """Return a number as records show it; for a tensor, its range and the axes along which it varies."""
    number = None if value is None else single_number(value)
    if value is None or number is not None:
        return None if number is None else float(f"{number:.6g}")
    assert isinstance(value, Tensor)
    if not value.numel():
        return Message(NO_VALUE)
    least, most = (f"{float(end):.4g}" for end in (value.min(), value.max()))
    axes = joined([Message(axis) for axis in _axes(value)], "side_by_side")
    return Message("causes.scale.range_by", least=least, most=most, what=axes)


# -- factors of the rows -----------------------------------------------------------------------------------------------


def compare_row_factors(both: BothParts[Formula]) -> PartDifference | None:
    """Return the difference of factors that depend on the length (`by_length`), such as log n; None if none does."""
    if not by_length(both):
        return None
    one = single_number(total(both.a)) is not None, single_number(total(both.b)) is not None
    old, new = (Message(DIFFERENT_FACTORS[of_side]) for of_side in one)
    text = ROW_FACTORS.get(one, "causes.length_factor.other")
    return PartDifference(old, new, edit=lambda formula: rescaled(formula, both.b), text=text)


def by_length(both: BothParts[Formula]) -> bool:
    """Return whether the difference of the factors depends on the length, wherever a softcap lies between them.

    It does if it varies by row, or if only one side uses the log of the number of visible keys. If both use it, it does
    if the base of both logs is a whole number, a length: log(n) / log(512).
    """
    off, factors = both.sides.off, (total(both.a), total(both.b))
    if same(*factors, off):
        return False
    logs = [_log_factor(total(formula), formula.visible, off) for formula in (both.a, both.b)]
    if logs == [None, None]:
        return _by_rows(*factors, off)
    return None in logs or all(_is_length(factor, both.sides.head_dim, off) for factor in logs)


def _by_rows(a: Value, b: Value, off: float) -> bool:
    """Return whether the quotient of the factors varies by row; rows whose factor is 0 fit any quotient."""
    mine, wanted = (torch.as_tensor(factor, dtype=torch.float64) for factor in (a, b))
    factors = torch.as_tensor(quotient(wanted, mine))
    if factors.ndim < 2 or factors.shape[-2] == 1:
        return False
    counted = torch.where(mine * wanted == 0, factors[..., -1:, :], factors)
    return not same(counted, counted[..., -1:, :], off)


def _log_factor(factors: Value, visible: Tensor | None, off: float) -> float | None:
    """Return the quotient of the factors and log(visible keys); None if it varies or the factors are one number."""
    if not isinstance(factors, Tensor) or visible is None or single_number(factors) is not None:
        return None
    if factors.shape[-1] != 1 or visible.shape[-1] == 1:
        return None
    logs = visible.sum(-1, keepdim=True).clamp(min=1).double().log()
    mean = float((factors * logs).mean() / logs.square().mean().clamp(min=off))
    return mean if same(factors, mean * logs, off) else None


def _is_length(factor: float | None, head_dim: int, off: float) -> bool:
    """Return whether `factor` times log(n) is the textbook scale times log(n) / log(a whole number)."""
    if not factor or factor < 0:
        return False
    log = inverse_root(head_dim) / factor
    # e^50 is no length, and larger logs would overflow
    base = math.exp(min(log, 50.0))
    return base > 1.5 and abs(base - round(base)) <= WHOLE_ROUNDINGS * off * log * base


# -- softcap, sinks, dropout -------------------------------------------------------------------------------------------


def compare_softcap(both: BothParts[Formula]) -> PartDifference | None:
    """Return the difference of the softcaps: one is missing, has another cap or multiplies otherwise; else None."""
    a, b = both.a.softcap, both.b.softcap
    if same(a, b) and (a is None or both.a.softcap_by_logits == both.b.softcap_by_logits):
        return None

    def capped(formula: Formula) -> Formula:
        if b is None:
            return replace(softcap_placed(formula, Formula()), softcap=None, softcap_by_logits=False)
        placed = formula if formula.softcap is not None else softcap_placed(formula, both.b)
        return replace(placed, softcap=b, softcap_by_logits=both.b.softcap_by_logits)

    if both.a.softcap_by_logits == both.b.softcap_by_logits:
        return PartDifference(a, b, edit=capped)
    old, new = (
        cap and f"{'z' if formula.softcap_by_logits else f'{cap:g}'} * tanh(z / {cap:g})"
        for formula, cap in ((both.a, a), (both.b, b))
    )
    return PartDifference(old, new, edit=capped, code="" if a is None or b is None else "form")


def compare_softcap_order(both: BothParts[Formula]) -> PartDifference | None:
    """Return the difference if the softcap comes before the scale, after it, or after the mask; None if alike."""
    a, b = both.a, both.b
    if a.softcap is None or b.softcap is None or a.softcap_at == b.softcap_at:
        return None
    old, new = (Message(f"causes.softcap_order.{formula.softcap_at}") for formula in (a, b))
    return PartDifference(old, new, edit=lambda formula: softcap_placed(formula, b))


def compare_sinks(both: BothParts[Formula]) -> PartDifference | None:
    """Return the difference of the sinks, a logit for each head without a value; None if equal. -inf counts as none."""
    # a sink of -inf takes no weight: exp(-inf) adds 0 to the sum
    found = (formula.sinks for formula in (both.a, both.b))
    a, b = (None if x is None or bool((x == -math.inf).all()) else x.reshape(1, -1, 1, 1) for x in found)
    if same(a, b, both.sides.off):
        return None
    old, new = shown_apart(a, b)
    words = {name: word if isinstance(word, str) else str(word) for name, word in (("a", old), ("b", new))}
    return PartDifference(old, new, words)


def compare_dropout(both: BothParts[Formula]) -> PartDifference | None:
    """Return the difference of dropped weights, even of equal rates with other random numbers; None if equal."""
    a, b = both.a, both.b
    if same(a.kept, b.kept) and (a.kept is None or a.dropout == b.dropout):
        return None
    if b.kept is None:
        text = Message("causes.dropout.missing", rate=f"{a.dropout:g}")
    elif a.kept is None:
        text = Message("causes.dropout.added", rate=f"{b.dropout:g}")
    elif a.dropout == b.dropout:
        text = Message("causes.dropout.others", rate=f"{b.dropout:g}")
    else:
        old, new = unequal_texts(a.dropout, b.dropout)
        text = Message("causes.dropout.other_rate", new=new, old=old)
    rate_a, rate_b = (0.0 if formula.kept is None else formula.dropout for formula in (a, b))
    return PartDifference(rate_a, rate_b, text=text)


# -- roundings beyond the dtype in which a side computes as a whole ----------------------------------------------------


def lesser(dtype: str | None, own: torch.dtype) -> str | None:
    """Return the dtype to which values are rounded; None if it is no coarser than the side's own.

    Example:
        >>> lesser("torch.float16", torch.float32), lesser("float32", torch.float32)
        ('float16', None)
    """
    if dtype is None or (dtype != "int8" and torch.finfo(dtype_by_name(dtype)).eps <= torch.finfo(own).eps):
        return None
    return dtype.removeprefix("torch.")


def compare_roundings(what: str) -> Callable[[BothParts[Formula]], PartDifference | None]:
    """Return a function that returns the difference in how `what` (LOGITS, WEIGHTS, BOTH) is rounded, or None."""

    def compare(both: BothParts[Formula]) -> PartDifference | None:
        a, b = (
            [lesser(dtype, side.dtype) for dtype in (formula.logits_dtype, formula.weights_dtype)]
            for side, formula in ((both.sides.a, both.a), (both.sides.b, both.b))
        )
        of_weights = int(what == WEIGHTS)
        old, new, alike = a[of_weights], b[of_weights], a[0] == a[1] and b[0] == b[1]
        return None if old == new or alike != (what == BOTH) else _rounding(old, new, what)

    return compare


def compare_vector_rounding(both: BothParts[VectorPath]) -> PartDifference | None:
    """Return the difference of the roundings of q, k or v to coarser dtypes on its path; None if equal."""
    a, b = _roundings(both.a, both.sides.a.dtype), _roundings(both.b, both.sides.b.dtype)
    if a == b:
        return None

    def edit(path: VectorPath) -> VectorPath:
        steps: list[PathStep] = [step for step in path.steps if not isinstance(step, RoundingStep)]
        for place, step in reversed(b):
            steps.insert(min(place, len(steps)), step)
        return replace(path, steps=tuple(steps))

    old, new = (", ".join(step.dtype for _, step in found) or None for found in (a, b))
    found = _by_values(both, old, new) or _rounding(old, new, f"stages.{both.vector}")
    return replace(found, edit=edit, key=found.key or both.vector)


def _by_values(both: BothParts[VectorPath], a: str | None, b: str | None) -> PartDifference | None:
    """Return the words for a side whose values alone show the rounding: a cache in float16 of a float32 program."""
    if (a is None) == (b is None):
        return None
    sides, path, dtype = both.sides, both.b if a is None else both.a, a or b
    if dtype is None or not all(step.by_values for step in path.steps if isinstance(step, RoundingStep)):
        return None
    own = str((sides.b if a is None else sides.a).dtype).removeprefix("torch.")
    text = "causes.rounding.held" if a is None else "causes.rounding.held_by_a"
    words = [word if word is not None else Message(OWN_DTYPE) for word in (a, b)]
    return PartDifference(words[0], words[1], {"dtype": dtype, "own": own}, key=(a, b), text=text)


def _roundings(path: VectorPath, own: torch.dtype) -> tuple[tuple[int, RoundingStep], ...]:
    """Return each rounding, with the number of norms and rotations before it."""
    found, others = [], 0
    for step in path.steps:
        if not isinstance(step, RoundingStep):
            others += 1
        elif (dtype := lesser(step.dtype, own)) is not None:
            found.append((others, replace(step, dtype=dtype)))
    return tuple(found)


def _rounding(a: str | None, b: str | None, what: str) -> PartDifference:
    words: dict[str, str] = {"what": Message(what)}
    if b is None:
        assert a is not None
        return PartDifference(a, Message(OWN_DTYPE), words | {"dtype": a}, text="causes.rounding.missing")
    words["dtype"] = b
    if a is None:
        return PartDifference(Message(OWN_DTYPE), b, words, text="causes.rounding.added")
    if a == b:
        return PartDifference(a, b, words, text="causes.rounding.elsewhere")
    return PartDifference(a, b, words | {"other": a}, text="causes.rounding.other")
