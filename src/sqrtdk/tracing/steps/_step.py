"""What every step can do, and what most do not."""

from __future__ import annotations

from dataclasses import dataclass, field

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps.expression import Expression
from sqrtdk.tracing.steps.sample import Sample


@dataclass(frozen=True, slots=True)
class Step:
    """One step; a new kind overrides what it does.

    Attributes:
        at: file and line; None where they are those of the softmax, or of the kernel.
    """

    at: str | None = field(default=None, kw_only=True)

    def write(self, expression: Expression) -> None:
        """Add the step to the formula, inside out; most that leave the softmax as it is are not written."""

    def stage(self) -> Stage | None:
        """The stage of the record, None where there is none."""
        return None

    def undo(self, sample: Sample) -> Sample:
        """The sampled logits without the step, as far as it is no factor; called from the softmax inwards."""
        return sample
