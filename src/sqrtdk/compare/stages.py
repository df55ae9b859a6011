"""What each side does at a stage that is no tensor: scale, softcap, bias, mask, sinks, weights."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.compare.program import Formula
from sqrtdk.compare.records import StageDiff
from sqrtdk.compare.suspect import Sides


def of_formula(stage: str, sides: Sides) -> StageDiff:
    """A stage of both formulas, in few words."""
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None:
        return StageDiff(stage, None, reason="the formula of one side is not known")
    more = _other_keys(a, b) if stage == "mask" else ""
    return StageDiff(stage, None, a=_TEXT[stage](a), b=_TEXT[stage](b) + more)


def _other_keys(a: Formula, b: Formula) -> str:
    """How many entries, a row and a key, B's mask has otherwise: ", 37 keys differ"."""
    one = torch.ones((), dtype=torch.bool)
    left, right = (one if formula.visible is None else formula.visible.bool() for formula in (a, b))
    count = int((left ^ right).sum())
    return f", {count} {'key differs' if count == 1 else 'keys differ'}" if count else ""


def number(value: Tensor | float) -> str:
    """A factor in few characters.

    Example:
        >>> number(0.125), number(torch.tensor([1.0, 2.0]))
        ('0.125', '1 to 2')
    """
    if not isinstance(value, Tensor):
        return f"{value:.4g}"
    least, most = float(value.min()), float(value.max())
    return f"{least:.4g}" if least == most else f"{least:.4g} to {most:.4g}"


def _scale(formula: Formula) -> str:
    return number(formula.scale * formula.after)


def _softcap(formula: Formula) -> str:
    if formula.softcap is None:
        return "none"
    place = {"scaled": "", "product": ", before the scale", "masked": ", after the mask"}[formula.softcap_at]
    cap = f"{formula.softcap:.4g}"
    return f"{f'z * tanh(z / {cap})' if formula.softcap_by_logits else cap}{place}"


def _bias(formula: Formula) -> str:
    if formula.bias is None:
        return "none"
    by = "" if formula.bias_by == 1 else f", times {formula.bias_by:.4g}"
    return f"{formula.bias_name}, {number(formula.bias)}{by}"


def _mask(formula: Formula) -> str:
    if formula.visible is None:
        return "none"
    share = float(formula.visible.double().mean())
    fill = formula.fill * formula.fill_by
    told = "-inf" if fill == float("-inf") else f"{fill:.4g}"
    return f"{formula.mask or 'mask'}, {share:.1%} visible, {told}"


def _sinks(formula: Formula) -> str:
    return "none" if formula.sinks is None else number(formula.sinks)


def _weights(formula: Formula) -> str:
    kinds = [f"{name} in {dtype}" for name, dtype in _roundings(formula) if dtype is not None]
    if formula.kept is not None:
        kinds.append(f"dropout {formula.dropout:g}")
    return ", ".join(kinds) or "softmax"


def _roundings(formula: Formula) -> tuple[tuple[str, str | None], ...]:
    return ("logits", formula.logits_dtype), ("weights", formula.weights_dtype)


_TEXT = {
    "scale": _scale,
    "softcap": _softcap,
    "bias": _bias,
    "mask": _mask,
    "sinks": _sinks,
    "weights": _weights,
}


def hidden_rows(formula: Formula | None, batch: int, rows: int) -> Tensor:
    """(B, L), True where the row of some head sees no key: what its output is, is left open."""
    if formula is None or formula.visible is None:
        return torch.zeros(batch, rows, dtype=torch.bool)
    visible = formula.visible[(None,) * (4 - formula.visible.dim())]
    return (~visible.any(-1)).any(1).expand(batch, rows).clone()
