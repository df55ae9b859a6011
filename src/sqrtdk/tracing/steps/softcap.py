"""cap * tanh(logits / cap): no logit is larger than the cap (Gemma 2, arXiv:2408.00118)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps._step import Step
from sqrtdk.tracing.steps.expression import Expression
from sqrtdk.tracing.steps.sample import Sample


@dataclass(frozen=True, slots=True)
class Softcap(Step):
    """A softcap; None where the number could not be read."""

    cap: float | None = None

    def write(self, expression: Expression) -> None:
        expression.cap(self.cap)

    def stage(self) -> Stage:
        return Stage("logits", "softcap", "" if self.cap is None else f"{self.cap:.4g}")

    def undo(self, sample: Sample) -> Sample:
        if not self.cap:
            return sample
        within = (sample.logits / self.cap).clamp(-1 + 1e-12, 1 - 1e-12)
        return replace(sample, logits=self.cap * torch.atanh(within))
