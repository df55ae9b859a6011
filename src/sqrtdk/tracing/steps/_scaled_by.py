"""What the later factors make of what was added to the logits."""

from __future__ import annotations

from collections.abc import Sequence

from sqrtdk.tracing.steps._step import Step
from sqrtdk.tracing.steps.scale import Scale


def scaled_by(steps: Sequence[Step], position: int) -> float | None:
    """Product of the factors after the step at `position`; None when there is none, or it is 1."""
    factors = [step.factor.value for step in steps[position + 1 :] if isinstance(step, Scale)]
    product = 1.0
    for value in factors:
        product *= 1.0 if value is None else value
    return None if product == 1.0 else product
