"""SDPA's unfused path multiplies q and k by the root of its scale each, and turns masks into floats."""

from __future__ import annotations

from dataclasses import replace

from sqrtdk.tracing.read.masks import as_passed
from sqrtdk.tracing.read.side import Side
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import Scale, Step

SAFE_SOFTMAX = "aten._safe_softmax"  # of that path alone


def merge_scale(query: Side, key: Side, steps: tuple[Step, ...]) -> tuple[Side, Side, tuple[Step, ...]]:
    """The two factors as one of the call, and its masks in the form in which it got them."""
    steps = as_passed(steps)
    if not query.factors or not key.factors:
        return query, key, steps
    left, right = query.factors[-1].value, key.factors[-1].value
    if left is None or left != right:
        return query, key, steps
    merged = Scale(Factor(left * right, "op", "sdpa scale"), at=query.factors[-1].at)
    return _without_last_scale(query), _without_last_scale(key), (merged, *steps)


def _without_last_scale(side: Side) -> Side:
    last = max(i for i, stage in enumerate(side.stages) if stage.name == "scale")
    return replace(side, factors=side.factors[:-1], stages=(*side.stages[:last], *side.stages[last + 1 :]))
