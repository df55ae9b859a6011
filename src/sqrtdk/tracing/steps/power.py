"""A power of a distance: |q - k| squared, or the root of |q - k|^2."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps._step import Step
from sqrtdk.tracing.steps.expression import Expression


@dataclass(frozen=True, slots=True)
class Power(Step):
    """The logits so far to the power of `exponent`."""

    exponent: float

    def write(self, expression: Expression) -> None:
        expression.power(self.exponent)

    def stage(self) -> Stage:
        return Stage("logits", "power", f"{self.exponent:g}")
