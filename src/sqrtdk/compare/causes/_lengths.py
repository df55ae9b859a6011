"""Factors of rows that stand for a length: the log of how many keys each row sees, to some base."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sqrtdk.audit.tolerance import inverse_root
from sqrtdk.compare.numbers import held, one_number, over, same
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides

WHOLE = 8.0  # roundings of its logarithm that a whole number may be off by


def by_length(sides: Sides) -> bool:
    """Whether what differs in the factors before the softcap goes by the length and not by the scale.

    It does where it is not the same for all rows, or where one side alone takes the log of the keys that a row sees;
    and where both do, if that is to the base of a whole number, a length, on both sides.
    """
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None:
        return False
    off = held(sides.a.dtype, sides.b.dtype)
    logs = [_log_factor(formula, off) for formula in (a, b)]
    if logs == [None, None]:
        return _by_rows(a, b, off)
    return None in logs or all(_is_length(factor, sides.head_dim, off) for factor in logs)


def _by_rows(a: Formula, b: Formula, off: float) -> bool:
    """Whether they are off by a number that is not the same for all rows; rows whose factor is 0 have any."""
    mine, wanted = (torch.as_tensor(formula.scale, dtype=torch.float64) for formula in (a, b))
    factors = over(wanted, mine)
    assert isinstance(factors, Tensor)
    if factors.ndim < 2 or factors.shape[-2] == 1:
        return False
    counted = torch.where(mine * wanted == 0, factors[..., -1:, :], factors)
    return not same(counted, counted[..., -1:, :], off)


def _log_factor(formula: Formula, off: float) -> float | None:
    """By what the factors are the logs of how many keys the rows see; None where they are not, or are one number."""
    scale, visible = formula.scale, formula.visible
    if not isinstance(scale, Tensor) or visible is None or one_number(scale) is not None:
        return None
    if scale.shape[-1] != 1 or visible.shape[-1] == 1:
        return None
    logs = visible.sum(-1, keepdim=True).clamp(min=1).double().log()
    mean = float((scale * logs).mean() / logs.square().mean().clamp(min=off))
    return mean if same(scale.double(), mean * logs, off) else None


def _is_length(factor: float | None, head_dim: int, off: float) -> bool:
    """Whether a factor of logs is the textbook's scale by the log of a whole number."""
    if not factor or factor < 0:
        return False
    log = inverse_root(head_dim) / factor
    base = math.exp(min(log, 50.0))
    return base > 1.5 and abs(base - round(base)) <= WHOLE * off * log * base
