"""A row's own maximum, taken off before the softmax, which does not see it."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.steps._step import Step
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.steps.sample import Sample


@dataclass(frozen=True, slots=True)
class Offset(Step):
    """What was added to a whole row; None where the values are not known."""

    addend: Placed | None

    def undo(self, sample: Sample) -> Sample:
        return sample if self.addend is None else sample.without(self.addend)
