"""How two formulas differ: scale, factors of the rows, softcap, sinks, dropout, roundings of logits and weights.

What counts of a scale is the product of all factors, wherever they stand; where a softcap lies between them, how they
are shared out is `softcap_order`. Factors that differ by row, as log n, are `length_factor`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.tolerance import close, inverse_root
from sqrtdk.compare.compute import dtype_of
from sqrtdk.compare.numbers import (
    HELD,
    Value,
    one_number,
    over,
    ratio,
    rescaled,
    same,
    shown_apart,
    softcap_placed,
    told_apart,
    total,
)
from sqrtdk.compare.program import Formula, Rounded, Step, Way
from sqrtdk.compare.suspect import Both, Difference, Sides
from sqrtdk.tracing.records import AttentionCall, Scale

SAID = {  # what B does where the mistake is B's, and where it is A's
    "missing": ("leaves the scale out", "has the scale that A leaves out"),
    "twice": ("applies the scale twice", "applies once the scale that A applies twice"),
    "inverted": ("multiplies by the root of head_dim instead of dividing", "divides by what A multiplies by"),
    "model_dim": ("takes the root of the model's width", "does not take the root of the model's width, as A does"),
    "head_count": ("takes the root of the number of heads", "does not take the root of the number of heads, as A does"),
    "padded_head": ("takes the root of a padded head_dim", "does not take the root of a padded head_dim, as A does"),
}
PLACES = {"scaled": "after the scale", "product": "before the scale", "masked": "after the mask"}
ROWS = {True: "one for all rows", False: "one of each row"}
OF_ROWS = {  # by whether A and B have one factor for all rows
    (False, True): "leaves out the factor of the rows, as log n of the keys that each sees",
    (True, False): "multiplies each row by a factor of its own, as log n of its keys",
}
WHOLE = 8.0  # roundings of its logarithm that a whole number may be off by
OWN_DTYPE = "its own dtype"


# -- the scale ---------------------------------------------------------------------------------------------------------


def scale(both: Both[Formula]) -> Difference | None:
    """All that multiplies q . k, or what stands before a softcap that both have in one place."""
    a, b, off = both.a, both.b, both.sides.off
    capped_alike = a.softcap is not None and b.softcap is not None and a.softcap_at == b.softcap_at
    if same(total(a), total(b), off) and (not capped_alike or same(a.scale, b.scale, off)):
        return None
    if by_length(both):
        return None
    words = {"text": _scale_words(both.sides, total(a), total(b))}
    return Difference(*shown_apart(total(a), total(b)), words, lambda formula: rescaled(formula, b))


def _scale_words(sides: Sides, a: Value, b: Value) -> str:
    one_a, one_b = one_number(a), one_number(b)
    if one_a is None or one_b is None:
        return _words_of_many(a, b)
    old, new = told_apart(one_a, one_b)
    of_b, of_a = _mistake(sides, one_a, one_b), _mistake(sides, one_b, one_a)
    if of_b is not None and not sides.declared_b:
        text = SAID[of_b][0]
    elif of_b is None and of_a is not None and not sides.declared_a:
        text = SAID[of_a][1]
    elif sides.declared_b:
        text = f"applies its declared scale, {sides.declared_b}"
    elif sides.declared_a:
        text = f"does not apply the scale that A declares, {sides.declared_a}"
    elif one_a and one_b / one_a < 0:
        text = "scales with the other sign"
    elif close(one_b, inverse_root(sides.head_dim), HELD):
        text = "scales by 1/sqrt(head_dim)"
    else:
        text = "scales by another number"
    return f"{text} ({new} in place of {old})"


def _mistake(sides: Sides, right: float, wrong: float) -> str | None:
    """The mistake that makes `wrong` of `right`; of the textbook's scale those that are of a dimension as well."""
    if right <= 0 or wrong <= 0:
        return None
    by_ratio = {"missing": 1.0, "twice": right * right, "inverted": 1.0 / right}
    names = [name for name, value in by_ratio.items() if close(wrong, value, HELD) and not close(right, 1.0, HELD)]
    if close(right, inverse_root(sides.head_dim), HELD):
        call = _sizes(sides)
        names += [name for name in SAID if any(close(wrong, value, HELD) for value in MISTAKES[name].values(call))]
    return min(names, key=lambda name: MISTAKES[name].rank, default=None)


def _sizes(sides: Sides) -> AttentionCall:
    """What the dictionary of mistakes looks at: the sizes of an attention."""
    of_heads = sides.b.key.heads
    groups = sides.heads if of_heads is None else int(torch.unique(of_heads).numel())
    return AttentionCall(
        site="", index=0, module_class="", kind="", op="", score="dot", batch=1, heads=sides.heads, kv_heads=groups,
        head_dim=sides.head_dim, padded_head_dim=sides.head_dim, value_dim=sides.head_dim, model_dim=sides.model_dim,
        query_len=1, key_len=1, self_attention=sides.self_attention, dtype="", logits_dtype="", device="", stages=(),
        formula="", scale=Scale(None, None, None, None, None, ()),
    )  # fmt: skip


def _words_of_many(a: Value, b: Value) -> str:
    """Of factors that are not one number."""
    old, new = shown_apart(a, b)
    numbers = f"({new} in place of {old})"
    if ratio(a, b) is not None:
        return f"multiplies every factor of the scale by {ratio(a, b):.4g} {numbers}"
    if one_number(b) is not None:
        return f"leaves out factors of {_kind(over(a, b))} {numbers}"
    what = "multiplies by factors" if one_number(a) is not None else "has other factors"
    return f"{what} of {_kind(over(b, a))} {numbers}"


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


# -- factors of the rows -----------------------------------------------------------------------------------------------


def of_rows(both: Both[Formula]) -> Difference | None:
    """A factor that stands for the length: it differs from row to row, or goes by the keys that each row sees."""
    if not by_length(both):
        return None
    one = one_number(total(both.a)) is not None, one_number(total(both.b)) is not None
    text = OF_ROWS.get(one, "multiplies the rows by other factors, as log n of their keys")
    return Difference(ROWS[one[0]], ROWS[one[1]], {"text": text}, lambda formula: rescaled(formula, both.b))


def by_length(both: Both[Formula]) -> bool:
    """Whether what differs in the factors, wherever a softcap lies between them, goes by the length.

    It does where it is not the same for all rows, or where one side alone takes the log of the keys that a row sees;
    and where both do, if that is to the base of a whole number, a length, on both sides.
    """
    off, factors = both.sides.off, (total(both.a), total(both.b))
    if same(*factors, off):
        return False
    logs = [
        _log_factor(factor, formula.visible, off) for factor, formula in zip(factors, (both.a, both.b), strict=True)
    ]
    if logs == [None, None]:
        return _by_rows(*factors, off)
    return None in logs or all(_is_length(factor, both.sides.head_dim, off) for factor in logs)


def _by_rows(a: Value, b: Value, off: float) -> bool:
    """Whether they are off by a number that is not the same for all rows; rows whose factor is 0 have any."""
    mine, wanted = (torch.as_tensor(factor, dtype=torch.float64) for factor in (a, b))
    factors = torch.as_tensor(over(wanted, mine))
    if factors.ndim < 2 or factors.shape[-2] == 1:
        return False
    counted = torch.where(mine * wanted == 0, factors[..., -1:, :], factors)
    return not same(counted, counted[..., -1:, :], off)


def _log_factor(factors: Value, visible: Tensor | None, off: float) -> float | None:
    """By what the factors are the logs of how many keys the rows see; None where they are not, or are one number."""
    if not isinstance(factors, Tensor) or visible is None or one_number(factors) is not None:
        return None
    if factors.shape[-1] != 1 or visible.shape[-1] == 1:
        return None
    logs = visible.sum(-1, keepdim=True).clamp(min=1).double().log()
    mean = float((factors * logs).mean() / logs.square().mean().clamp(min=off))
    return mean if same(factors, mean * logs, off) else None


def _is_length(factor: float | None, head_dim: int, off: float) -> bool:
    """Whether a factor of logs is the textbook's scale by the log of a whole number."""
    if not factor or factor < 0:
        return False
    log = inverse_root(head_dim) / factor
    base = math.exp(min(log, 50.0))
    return base > 1.5 and abs(base - round(base)) <= WHOLE * off * log * base


# -- softcap, sinks, dropout -------------------------------------------------------------------------------------------


def softcap(both: Both[Formula]) -> Difference | None:
    """Its value; and its place, where one side has none. No factor of the logits makes up for its curve."""
    a, b = both.a.softcap, both.b.softcap
    if same(a, b) and (a is None or both.a.softcap_by_logits == both.b.softcap_by_logits):
        return None

    def capped(formula: Formula) -> Formula:
        if b is None:
            return replace(softcap_placed(formula, Formula()), softcap=None, softcap_by_logits=False)
        placed = formula if formula.softcap is not None else softcap_placed(formula, both.b)
        return replace(placed, softcap=b, softcap_by_logits=both.b.softcap_by_logits)

    if both.a.softcap_by_logits == both.b.softcap_by_logits:
        return Difference(a, b, edit=capped)
    old, new = (
        cap and f"{'z' if formula.softcap_by_logits else f'{cap:g}'} * tanh(z / {cap:g})"
        for formula, cap in ((both.a, a), (both.b, b))
    )
    return Difference(old, new, edit=capped)


def softcap_order(both: Both[Formula]) -> Difference | None:
    """Its place. Before the scale it caps the bare product; after the mask it lifts hidden keys, so that they leak."""
    a, b = both.a, both.b
    if a.softcap is None or b.softcap is None or a.softcap_at == b.softcap_at:
        return None
    return Difference(PLACES[a.softcap_at], PLACES[b.softcap_at], edit=lambda formula: softcap_placed(formula, b))


def sinks(both: Both[Formula]) -> Difference | None:
    """Logits, one a head, that take weight and have no value; of 0 it is the softmax "off by one"."""
    a, b = (
        None if formula.sinks is None or bool((formula.sinks == float("-inf")).all()) else formula.sinks
        for formula in (both.a, both.b)
    )
    if same(a, b, both.sides.off):
        return None
    old, new = shown_apart(*(None if one is None else one.reshape(1, -1, 1, 1) for one in (a, b)))
    return Difference(old, new, {"a": str(old), "b": str(new)})


def dropout(both: Both[Formula]) -> Difference | None:
    """Weights that were dropped; two runs of one rate and other random numbers differ as well."""
    a, b = both.a, both.b
    if (a.kept is None and b.kept is None) or (
        a.kept is not None and b.kept is not None and a.dropout == b.dropout and bool((a.kept == b.kept).all())
    ):
        return None
    if b.kept is None:
        text = f"drops no weights, where A does (rate {a.dropout:g})"
    elif a.kept is None:
        text = f"drops weights (rate {b.dropout:g}), which A does not"
    elif a.dropout == b.dropout:
        text = f"drops other weights at the same rate ({b.dropout:g})"
    else:
        old, new = told_apart(a.dropout, b.dropout)
        text = f"drops weights at another rate ({new} in place of {old})"
    rate_a, rate_b = (0.0 if formula.kept is None else formula.dropout for formula in (a, b))
    return Difference(rate_a, rate_b, {"text": text})


# -- roundings beyond the dtype in which a side computes as a whole ----------------------------------------------------


def lesser(dtype: str | None, own: torch.dtype) -> str | None:
    """The dtype that values are rounded to, None where it is as fine as the side's own.

    Example:
        >>> lesser("torch.float16", torch.float32), lesser("float32", torch.float32)
        ('float16', None)
    """
    if dtype is None or (dtype != "int8" and torch.finfo(dtype_of(dtype)).eps <= torch.finfo(own).eps):
        return None
    return dtype.removeprefix("torch.")


def _lesser(both: Both[Formula], field: str) -> tuple[str | None, str | None]:
    a, b = (lesser(getattr(x.formula, field), x.dtype) for x in (both.sides.a, both.sides.b))
    return a, b


def rounded_logits_and_weights(both: Both[Formula]) -> Difference | None:
    """Both of them, alike: one cast."""
    logits, weights = _lesser(both, "logits_dtype"), _lesser(both, "weights_dtype")
    return _rounding(*logits, "the logits and the weights") if logits == weights else None


def rounded_logits(both: Both[Formula]) -> Difference | None:
    """The logits alone."""
    logits = _lesser(both, "logits_dtype")
    return _rounding(*logits, "the logits") if logits != _lesser(both, "weights_dtype") else None


def rounded_weights(both: Both[Formula]) -> Difference | None:
    """The weights alone."""
    weights = _lesser(both, "weights_dtype")
    return _rounding(*weights, "the weights") if weights != _lesser(both, "logits_dtype") else None


def rounded_vector(both: Both[Way]) -> Difference | None:
    """q, k or v on its way."""
    a, b = _roundings(both.a, both.sides.a.dtype), _roundings(both.b, both.sides.b.dtype)
    if a == b:
        return None

    def edit(way: Way) -> Way:
        steps: list[Step] = [step for step in way.steps if not isinstance(step, Rounded)]
        for place, step in reversed(b):
            steps.insert(min(place, len(steps)), step)
        return replace(way, steps=tuple(steps))

    old, new = (", ".join(step.dtype for _, step in found) or None for found in (a, b))
    differs = _rounding(old, new, both.vector, another_place=True)
    return None if differs is None else replace(differs, edit=edit, key=both.vector)


def _roundings(way: Way, own: torch.dtype) -> tuple[tuple[int, Rounded], ...]:
    """Each rounding, and after how many norms and rotations it is."""
    found, others = [], 0
    for step in way.steps:
        if not isinstance(step, Rounded):
            others += 1
        elif (dtype := lesser(step.dtype, own)) is not None:
            found.append((others, replace(step, dtype=dtype)))
    return tuple(found)


def _rounding(a: str | None, b: str | None, what: str, *, another_place: bool = False) -> Difference | None:
    if a == b and not another_place:
        return None
    if b is None:
        text = f"does not round {what} to {a}"
    elif a == b:
        text = f"rounds {what} to {b} at another place"
    else:
        text = f"rounds {what} to {b}" + (f", not to {a}" if a else "")
    return Difference(a or OWN_DTYPE, b or OWN_DTYPE, {"text": text})
