"""Numbers are rounded to a lesser dtype on the way: q or k before the product, the logits, the weights.

A side that computes in half precision as a whole rounds nothing beyond its own dtype, which its program names; the
rounding that this allows is no cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from sqrtdk.compare.compute import dtype_of
from sqrtdk.compare.numbers import of_formula
from sqrtdk.compare.program import Change, Formula, Program, Rounded, Way
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "rounding"
NONE = "its own dtype"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """B's roundings in A's program, those of each vector apart, and those of logits and weights."""
    yield from _of_way("query", sides.a.query, sides.b.query, sides)
    yield from _of_way("key", sides.a.key, sides.b.key, sides)
    yield from _of_way("value", sides.a.value, sides.b.value, sides)
    a, b = sides.a.formula, sides.b.formula
    if a is None or b is None:
        return
    logits = lesser(a.logits_dtype, sides.a.dtype), lesser(b.logits_dtype, sides.b.dtype)
    weights = lesser(a.weights_dtype, sides.a.dtype), lesser(b.weights_dtype, sides.b.dtype)

    def round_both(formula: Formula) -> Formula:
        return replace(formula, logits_dtype=b.logits_dtype, weights_dtype=b.weights_dtype, own=b.own)

    if logits[0] != logits[1] and weights == logits:
        yield _suspicion("weights", *logits, of_formula(round_both), "the logits and the weights")
        return
    if logits[0] != logits[1]:
        round_logits = of_formula(lambda formula: replace(formula, logits_dtype=b.logits_dtype, own=b.own))
        yield _suspicion("weights", *logits, round_logits, "the logits")
    if weights[0] != weights[1]:
        round_weights = of_formula(lambda formula: replace(formula, weights_dtype=b.weights_dtype, own=b.own))
        yield _suspicion("weights", *weights, round_weights, "the weights")


def lesser(dtype: str | None, own: torch.dtype) -> str | None:
    """The dtype that values are rounded to, None where it is as fine as the side's own.

    Example:
        >>> lesser("torch.float16", torch.float32), lesser("float32", torch.float32)
        ('float16', None)
    """
    if dtype is None or torch.finfo(dtype_of(dtype)).eps <= torch.finfo(own).eps:
        return None
    return dtype.removeprefix("torch.")


def _of_way(name: str, a: Way, b: Way, sides: Sides) -> Iterator[Suspicion]:
    here, there = _roundings(a, sides.a.dtype), _roundings(b, sides.b.dtype)
    if here == there:
        return

    def change(program: Program) -> Program:
        way: Way = getattr(program, name)
        way = replace(way, steps=_rounded_at(way, there))
        if name == "query":
            return replace(program, query=way)
        return replace(program, key=way) if name == "key" else replace(program, value=way)

    said_a, said_b = (", ".join(step.dtype for _, step in found) or None for found in (here, there))
    yield _suspicion(name, said_a, said_b, change, name)


def _roundings(way: Way, own: torch.dtype) -> tuple[tuple[int, Rounded], ...]:
    """Each rounding, and after how many norms and rotations it is."""
    found, others = [], 0
    for step in way.steps:
        if not isinstance(step, Rounded):
            others += 1
        elif (dtype := lesser(step.dtype, own)) is not None:
            found.append((others, replace(step, dtype=dtype)))
    return tuple(found)


def _rounded_at(way: Way, roundings: tuple[tuple[int, Rounded], ...]) -> tuple[Change, ...]:
    """The steps of a way with these roundings and no others."""
    steps: list[Change] = [step for step in way.steps if not isinstance(step, Rounded)]
    for place, step in reversed(roundings):
        steps.insert(min(place, len(steps)), step)
    return tuple(steps)


def _suspicion(stage: str, a: str | None, b: str | None, change: Callable[[Program], Program], what: str) -> Suspicion:
    if b is None:
        text = f"does not round {what} to {a}"
    else:
        text = f"rounds {what} to {b}" + (f", not to {a}" if a else "")
        if a == b:
            text = f"rounds {what} to {b} at another place"
    return Suspicion(NAME, stage, a or NONE, b or NONE, change, text)
