"""The sinks, one logit a head that takes weight and has no value, are missing or others.

A sink of 0 is the softmax "off by one". With one the weights of a row sum to less than 1, as by no factor or bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sqrtdk.compare.numbers import held, of_formula, same, shown_apart
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "sinks"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's sinks in A's formula."""
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None or same(_weighty(a), _weighty(b), held(sides.a.dtype, sides.b.dtype)):
        return
    said_a, said_b = _said(a, b)
    yield Suspicion(
        NAME, "sinks", said_a, said_b, of_formula(lambda formula: replace(formula, sinks=b.sinks)), _text(a, b)
    )


def _weighty(formula: Formula) -> torch.Tensor | None:
    """The sinks, None where none of them takes any weight."""
    sinks = formula.sinks
    return None if sinks is None or bool((sinks == float("-inf")).all()) else sinks


def _said(a: Formula, b: Formula) -> tuple[str | float | None, str | float | None]:
    sinks = (_weighty(formula) for formula in (a, b))
    return shown_apart(*(None if one is None else one.reshape(1, -1, 1, 1) for one in sinks))


def _text(a: Formula, b: Formula) -> str:
    old, new = _said(a, b)
    if new is None:
        return f"leaves out the sinks ({old})"
    if old is None:
        return f"has sinks ({new}), which A has not"
    return f"has other sinks ({new} in place of {old})"
