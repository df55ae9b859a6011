"""The bias of positions is missing, or another: other slopes of ALiBi, another table, turned round, of the other sign.

What is the same for all keys of a row does not reach the weights and is taken off before two biases are compared
(slope * j is slope * (j - i)); so is what hidden keys have. One that is off by the scale alone is `bias_scaled`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.addends import common_keys
from sqrtdk.compare.causes.bias_scaled import factor_of_bias
from sqrtdk.compare.masks import distances
from sqrtdk.compare.numbers import HELD, held, of_formula, same, times, told_apart
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "bias"
SAID = {"alibi": "ALiBi bias", "relative": "relative bias", "bias": "bias"}


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's bias in A's formula."""
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None or (a.bias is None and b.bias is None):
        return
    by = factor_of_bias(a, b, sides.head_dim)  # the business of `bias_scaled`
    a = a if by is None else replace(a, bias_by=a.bias_by * by)
    left, right = effective(a, b), effective(b, a)
    if same(left, right, held(sides.a.dtype, sides.b.dtype)):
        return

    def change(formula: Formula) -> Formula:
        kept = formula.bias_by if formula.bias is not None and b.bias is not None else b.bias_by
        return replace(formula, bias=b.bias, bias_name=b.bias_name, bias_by=kept)

    said_a, said_b = _said(a, left), _said(b, right)
    yield Suspicion(NAME, "bias", said_a, said_b, of_formula(change), _text(a, b, left, right))


def effective(formula: Formula, other: Formula) -> Tensor:
    """What the bias adds, as far as it reaches the weights of both: 0 at hidden keys, and 0 on average in every row."""
    added = times(torch.zeros(1, 1, 1, 1) if formula.bias is None else formula.bias, formula.bias_by)
    assert isinstance(added, Tensor)
    added = added[(None,) * (4 - added.ndim)]
    exact = formula.sinks is not None or other.sinks is not None or "masked" in (formula.softcap_at, other.softcap_at)
    visible = common_keys(formula, other)
    if visible is None:
        return added if exact else added - added.mean(-1, keepdim=True)
    visible = visible[(None,) * (4 - visible.ndim)]
    added = torch.where(visible, added, 0.0)
    if exact:
        return added
    mean = added.sum(-1, keepdim=True) / visible.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(visible, added - mean, 0.0)


def _said(formula: Formula, added: Tensor) -> str | None:
    if formula.bias is None:
        return None
    return f"{SAID.get(formula.bias_name, 'bias')}, {float(added.min()):.4g} to {float(added.max()):.4g}"


def _text(a: Formula, b: Formula, left: Tensor, right: Tensor) -> str:
    if b.bias is None:
        return f"leaves out the {SAID.get(a.bias_name, 'bias')}"
    if a.bias is None:
        return f"adds a {SAID.get(b.bias_name, 'bias')}, which A has not".replace("a ALiBi", "an ALiBi")
    name = SAID.get(b.bias_name, "bias")
    if same(-left, right):
        return f"has the {name} with the other sign"
    if _turned(a, b):
        return f"has the {name} turned round, rows for keys"
    if _shuffled(left, right):
        return f"has the {name} of the heads in another order"
    slope_a, slope_b = slopes(a), slopes(b)
    if slope_a is not None and slope_b is not None:
        head = int((slope_a - slope_b).abs().argmax())
        old, new = told_apart(float(slope_a[head]), float(slope_b[head]))
        return f"has other slopes in its {name} (head {head}: {new} in place of {old})"
    return f"has another {name}{_where(a, b)}"


def _turned(a: Formula, b: Formula) -> bool:
    if a.bias is None or a.bias.ndim < 2 or a.bias.shape[-1] != a.bias.shape[-2]:
        return False
    return same(effective(replace(a, bias=a.bias.mT), b), effective(b, a))


def _shuffled(left: Tensor, right: Tensor) -> bool:
    """Whether every head of the one is some head of the other, and none twice."""
    heads = left.shape[1]
    if heads != right.shape[1] or heads < 2:
        return False
    places = [next((j for j in range(heads) if same(left[:, i], right[:, j])), -1) for i in range(heads)]
    return sorted(places) == list(range(heads))


def slopes(formula: Formula) -> Tensor | None:
    """By how much the bias falls from one key to the one before it, by head, (H,); None where it is not linear."""
    if formula.bias is None or formula.bias.ndim < 2 or formula.bias.shape[-1] < 3:
        return None
    bias = (formula.bias.double() * formula.bias_by)[(None,) * (4 - formula.bias.ndim)]
    steps = bias.diff(dim=-1)
    if bias.shape[-2] > 1:  # keys after the row may rise or fall
        before = distances(bias.shape[-2], bias.shape[-1], bias.device)[:, 1:] >= 0
        steps = steps[..., before]
    else:
        steps = steps.flatten(-2)
    slope = steps.mean(-1, keepdim=True)
    largest = float(bias.abs().max())
    if steps.shape[-1] < 2 or not bool(((steps - slope).abs() <= 4 * HELD * largest).all()) or not largest:
        return None
    return slope[0, :, 0]


def _where(a: Formula, b: Formula) -> str:
    """In which distances of row and key two biases differ: ", for keys after the row alone", ", from distance 8 on"."""
    whole = replace(a, sinks=torch.zeros(1))  # the numbers themselves: what is the same in a row is not taken off
    left, right = effective(whole, b), effective(b, whole)
    differ = (left - right).abs() > HELD * max(float(left.abs().max()), float(right.abs().max()))
    differ = differ.any(0).any(0)
    if differ.shape[0] < 2 or not bool(differ.any()):
        return ""
    apart = distances(differ.shape[0], differ.shape[1], differ.device)
    if not bool((differ & (apart > 0)).any()):
        return ", for keys after the row alone"
    if not bool((differ & (apart < 0)).any()) and bool((apart < 0).any()):
        return ", for keys before the row alone"
    first = int(apart[differ].abs().min())
    return f", from distance {first} on" if first > 1 else ""
