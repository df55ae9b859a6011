"""Differences of what is added to the logits, and of its factor: position biases and fills of hidden keys.

A number that is the same for all keys of a row does not change the weights, so it is subtracted before biases are
compared (slope * j is slope * (j - i)). Entries of hidden keys are ignored too. A bias or fill that is off by the scale
in all its numbers is `bias_scaled`: the scale was applied to the sum instead of the product.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.audit.tolerance import inverse_root
from sqrtdk.compare.inside.addends import ZERO_WEIGHT_FILL, common_keys, four_axes
from sqrtdk.compare.inside.program import Formula
from sqrtdk.compare.inside.suspect import BothParts, PartDifference
from sqrtdk.compare.numbers import CONSTANT_TOLERANCE, same, single_number, single_ratio, times, total, unequal_texts
from sqrtdk.masks.band import distances
from sqrtdk.messages import Message

ALIBI, RELATIVE, BIAS = "causes.bias.alibi", "causes.bias.relative", "causes.bias.bias"
BIAS_KINDS = {"alibi": ALIBI, "relative": RELATIVE}


# -- the factor --------------------------------------------------------------------------------------------------------


def compare_bias_factor(both: BothParts[Formula]) -> PartDifference | None:
    """Return the difference of the numbers that multiply the bias; None if there is none.

    It counts if the trace saw both numbers, or if their quotient is a scale of the attention or its inverse.
    """
    return _scaled("bias_by", both.a.bias_by, _factor_of_bias(both))


def compare_fill_factor(both: BothParts[Formula]) -> PartDifference | None:
    """Return the difference of the numbers that multiply the fill of hidden keys; None if there is none.

    Only finite fills other than 0 show it. It counts under the same conditions as for `compare_bias_factor`.
    """
    return _scaled("fill_by", both.a.fill_by, _factor_of_fill(both))


def _scaled(field: str, old: float, by: float | None) -> PartDifference | None:
    if by is None:
        return None
    return PartDifference(old, old * by, {"by": f"{by:.4g}"}, lambda formula: replace(formula, **{field: old * by}))


def _factor_of_bias(both: BothParts[Formula]) -> float | None:
    """Return the factor between the biases; None if there is none, or if it is no sign of a scale."""
    a, b = both.a, both.b
    if a.bias is None or b.bias is None:
        return None
    keys = common_keys(a, b)
    keys = torch.ones((), dtype=torch.bool) if keys is None else keys
    by = single_ratio(
        *(times(times(bias, factor), keys) for bias, factor in ((a.bias, a.bias_by), (b.bias, b.bias_by)))
    )
    if by is not None and same(by, 1.0):
        return None
    if a.bias_by and not same(a.bias_by, b.bias_by):
        return b.bias_by / a.bias_by  # the trace saw both factors, so the bias may differ as well
    return by if by is not None and _is_scale(by, both) else None


def _factor_of_fill(both: BothParts[Formula]) -> float | None:
    a, b = both.a, both.b
    fills = a.fill * a.fill_by, b.fill * b.fill_by
    if a.visible is None or b.visible is None or not all(fill and math.isfinite(fill) for fill in fills):
        return None
    by = fills[1] / fills[0]
    seen = same(a.fill, b.fill) and not same(a.fill_by, b.fill_by)
    return by if not same(*fills) and (seen or _is_scale(by, both)) else None


def _is_scale(by: float, both: BothParts[Formula]) -> bool:
    """Return whether a number is the scale of a side, or the textbook scale, which row factors may hide."""
    scales = (single_number(total(both.a)), single_number(total(both.b)), inverse_root(both.sides.head_dim))
    return any(same(by, value) for scale in scales if scale and scale != 1.0 for value in (scale, 1.0 / scale))


# -- the fill ----------------------------------------------------------------------------------------------------------


def compare_fill(both: BothParts[Formula]) -> PartDifference | None:
    """Return the difference of the number that hidden logits get, or that is added to them; None if it has no effect.

    A fill far below all logits leaves no weight in a row that sees any key. A row that sees no key shows the fill: its
    output is the mean over hidden keys, or 0. `a` and `b` are the fills, "-inf" for minus infinity.
    """
    a, b = both.a, both.b
    if a.visible is None or b.visible is None or _factor_of_fill(both) is not None:
        return None
    left, right = _applied(a), _applied(b)
    if same(left, right) and (a.fill_added == b.fill_added or math.isinf(left)):
        return None
    blind = any(not bool(visible.any(-1).all()) for visible in (a.visible, b.visible))
    if max(left, right) <= ZERO_WEIGHT_FILL and not blind:
        return None
    if same(left, right):
        id = "causes.mask_magnitude.added" if b.fill_added else "causes.mask_magnitude.written"
        text = Message(id, fill=f"{right:.4g}")
    else:
        was, now = unequal_texts(left, right)
        text = Message("causes.mask_magnitude.other", new=now, old=was)
    old, new = ("-inf" if math.isinf(number) else float(f"{number:.6g}") for number in (left, right))
    return PartDifference(old, new, text=text, code="infinite" if math.isinf(left) else "")


def _applied(formula: Formula) -> float:
    number = formula.fill * formula.fill_by
    return -math.inf if math.isnan(number) else number


# -- the bias ----------------------------------------------------------------------------------------------------------


def compare_bias(both: BothParts[Formula]) -> PartDifference | None:
    """Return the difference of what is added to the logits of visible keys; None if it is the same for the softmax.

    It tells a missing bias, other ALiBi slopes, another sign, transposed, permuted heads, and another table apart. `a`
    and `b` are the ranges of the biases.
    """
    a, b = both.a, both.b
    if a.bias is None and b.bias is None:
        return None
    by = _factor_of_bias(both)  # the factor is left to `bias_scaled`
    a = a if by is None else replace(a, bias_by=a.bias_by * by)
    left, right = _effective(a, b), _effective(b, a)
    if same(left, right, both.sides.off):
        return None

    def other(formula: Formula) -> Formula:
        kept = formula.bias_by if formula.bias is not None and b.bias is not None else b.bias_by
        return replace(formula, bias=b.bias, bias_name=b.bias_name, bias_by=kept)

    return PartDifference(_in_words(a, left), _in_words(b, right), edit=other, text=_text(a, b, left, right))


def _effective(formula: Formula, other: Formula) -> Tensor:
    """Return what the bias adds where both sides have weight: 0 at hidden keys, and mean 0 in every row."""
    added = four_axes(torch.as_tensor(times(0.0 if formula.bias is None else formula.bias, formula.bias_by)))
    visible = common_keys(formula, other)
    seen = torch.ones_like(added, dtype=torch.bool) if visible is None else four_axes(visible)
    added = torch.where(seen, added, 0.0)
    # A sink, or a softcap after the mask, compares the logits with a fixed number: there a row's mean does matter.
    if formula.sinks is not None or other.sinks is not None or "masked" in (formula.softcap_at, other.softcap_at):
        return added
    mean = added.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(seen, added - mean, 0.0)


def _name(formula: Formula) -> Message:
    return Message(BIAS_KINDS.get(formula.bias_name, BIAS))


def _in_words(formula: Formula, added: Tensor) -> str | None:
    if formula.bias is None:
        return None
    least, most = (f"{float(end):.4g}" for end in (added.min(), added.max()))
    return Message("causes.bias.range", bias=_name(formula), least=least, most=most)


def _text(a: Formula, b: Formula, left: Tensor, right: Tensor) -> Message:
    if b.bias is None:
        return Message("causes.bias.missing", bias=_name(a))
    name = _name(b)
    if a.bias is None:
        return Message("causes.bias.added_an" if name.id == ALIBI else "causes.bias.added", bias=name)
    if same(-left, right):
        return Message("causes.bias.other_sign", bias=name)
    square = a.bias.ndim > 1 and a.bias.shape[-1] == a.bias.shape[-2]
    # slope * (j - i) for slope * (i - j), or a relative table indexed [key, row]
    turned = square and same(_effective(replace(a, bias=a.bias.mT), b), right)
    # the fix is to turn B's: without a row's mean, which the softmax does not see, that is not the same question
    if turned and same(_effective(replace(b, bias=b.bias.mT), a), left):
        return Message("causes.bias.turned", bias=name)
    if _shuffled(left, right):
        return Message("causes.bias.heads", bias=name)
    slope_a, slope_b = _slopes(a), _slopes(b)
    if slope_a is not None and slope_b is not None:
        head = int((slope_a - slope_b).abs().argmax())
        old, new = unequal_texts(float(slope_a[head]), float(slope_b[head]))
        return Message("causes.bias.slopes", bias=name, head=head, new=new, old=old)
    return _other_bias(a, b, name)


def _shuffled(left: Tensor, right: Tensor) -> bool:
    """Return whether every head of one is exactly one head of the other."""
    heads = left.shape[1]
    if heads != right.shape[1] or heads < 2:
        return False
    places = [next((j for j in range(heads) if same(left[:, i], right[:, j])), -1) for i in range(heads)]
    return sorted(places) == list(range(heads))


def _slopes(formula: Formula) -> Tensor | None:
    """Return how much the bias falls per key of distance, by head, (H,); None if it is not linear."""
    if formula.bias is None or formula.bias.ndim < 2 or formula.bias.shape[-1] < 3:
        return None
    bias = four_axes(formula.bias) * formula.bias_by
    rows, keys = bias.shape[-2:]
    # only keys up to the row's own: after it an ALiBi bias may rise, fall or stop
    before = distances(rows, keys, bias.device)[:, 1:] >= (0 if rows > 1 else -keys)
    steps, largest = bias.diff(dim=-1)[..., before], float(bias.abs().max())
    slope = steps.mean(-1, keepdim=True)
    linear = steps.shape[-1] > 1 and bool(((steps - slope).abs() <= 4 * CONSTANT_TOLERANCE * largest).all())
    return slope[0, :, 0] if linear and largest else None


def _other_bias(a: Formula, b: Formula, name: Message) -> Message:
    """Return that the bias is another, and at which distances: for keys after the row alone, from distance 8 on."""
    plain = replace(a, sinks=torch.zeros(1))  # sinks keep the row's mean in the numbers
    left, right = _effective(plain, b), _effective(b, plain)
    differ = (left - right).abs() > CONSTANT_TOLERANCE * max(float(left.abs().max()), float(right.abs().max()))
    differ = differ.any(0).any(0)
    if differ.shape[0] < 2 or not bool(differ.any()):
        return Message("causes.bias.other", bias=name)
    apart = distances(differ.shape[0], differ.shape[1], differ.device)
    if not bool((differ & (apart > 0)).any()):
        return Message("causes.bias.other_after", bias=name)
    if not bool((differ & (apart < 0)).any()) and bool((apart < 0).any()):
        return Message("causes.bias.other_before", bias=name)
    first = int(apart[differ].abs().min())
    if first > 1:
        return Message("causes.bias.other_from", bias=name, distance=first)
    return Message("causes.bias.other", bias=name)
