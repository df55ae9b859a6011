"""An operation on the logits that could not be followed."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps._step import Step
from sqrtdk.tracing.steps.expression import Expression

ZERO_ONE_FACTOR = "mul by a 0/1 mask"


@dataclass(frozen=True, slots=True)
class Unknown(Step):
    """Its name, for a reader."""

    name: str

    def write(self, expression: Expression) -> None:
        expression.lose(self.name)

    def stage(self) -> Stage:
        return Stage("logits", "unknown", self.name)
