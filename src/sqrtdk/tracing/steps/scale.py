"""A factor on the logits: the scale, or a part of it."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.records import Factor, Stage
from sqrtdk.tracing.steps._step import Step
from sqrtdk.tracing.steps.expression import Expression
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.steps.sample import Sample


@dataclass(frozen=True, slots=True)
class Scale(Step):
    """The logits times a factor.

    Attributes:
        factor: as the record tells it.
        by: its values, where they are no single number: one a row, say; None where they are not known or not needed.
    """

    factor: Factor
    by: Placed | None = None

    def write(self, expression: Expression) -> None:
        expression.scale(self.factor)

    def stage(self) -> Stage:
        return Stage("logits", "scale", self.factor.text())

    def undo(self, sample: Sample) -> Sample:
        return sample.under(self.factor.value)
