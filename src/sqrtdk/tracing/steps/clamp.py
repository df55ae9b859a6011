"""A clamp that can bite: logits beyond its bounds are cut off."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps._step import Step
from sqrtdk.tracing.steps.expression import Expression


@dataclass(frozen=True, slots=True)
class Clamp(Step):
    """`bounds` are lowest and largest, as text; an empty one is none."""

    bounds: str

    def write(self, expression: Expression) -> None:
        expression.wrap("clamp", self.bounds)

    def stage(self) -> Stage:
        return Stage("logits", "clamp", self.bounds)
