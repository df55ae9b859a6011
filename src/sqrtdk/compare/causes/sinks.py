"""The sinks, one logit a head that takes weight and has no value, are missing or others.

A sink of 0 is the softmax "off by one". With one the weights of a row sum to less than 1, as by no factor or bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from sqrtdk.compare.numbers import held, of_formula, same, shown
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "sinks"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's sinks in A's formula."""
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None or same(_weighty(a), _weighty(b), held(sides.a.dtype, sides.b.dtype)):
        return
    said_a, said_b = _said(a), _said(b)
    yield Suspicion(
        NAME, "sinks", said_a, said_b, of_formula(lambda formula: replace(formula, sinks=b.sinks)), _text(a, b)
    )


def _weighty(formula: Formula) -> torch.Tensor | None:
    """The sinks, None where none of them takes any weight."""
    sinks = formula.sinks
    return None if sinks is None or bool((sinks == float("-inf")).all()) else sinks


def _said(formula: Formula) -> str | float | None:
    sinks = _weighty(formula)
    return shown(None if sinks is None else sinks.reshape(1, -1, 1, 1))


def _text(a: Formula, b: Formula) -> str:
    if _weighty(b) is None:
        return f"leaves out the sinks ({_said(a)})"
    if _weighty(a) is None:
        return f"has sinks ({_said(b)}), which A has not"
    return f"has other sinks ({_said(b)} in place of {_said(a)})"
