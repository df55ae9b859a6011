"""A tensor added to the logits: a position bias, or a further term of the score."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps._step import Step
from sqrtdk.tracing.steps.expression import Expression
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.steps.sample import Sample

ZERO_ONE = "zero-one mask"  # 0 and 1 where a mask has them: one that was meant to be bool


@dataclass(frozen=True, slots=True)
class Bias(Step):
    """What was added.

    Attributes:
        name: "alibi", "relative", "disentangled", `ZERO_ONE` or "bias".
        addend: the values, None where they are not known. Entries that hide their key as well, a mask in the same
            tensor, are a `Hide` besides.
        content: how many products with the content of q or k it sums; it belongs to the score then.
    """

    name: str
    addend: Placed | None
    content: int = 0

    def write(self, expression: Expression) -> None:
        expression.add(self.name)

    def stage(self) -> Stage:
        return Stage("logits", "bias", self.name)

    def undo(self, sample: Sample) -> Sample:
        return sample if self.addend is None else sample.without(self.addend)
