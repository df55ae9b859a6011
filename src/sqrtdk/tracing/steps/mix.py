"""Logits mixed over the heads by a matrix (talking heads, Shazeer et al. 2020, arXiv:2003.02436)."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps._step import Step
from sqrtdk.tracing.steps.expression import Expression
from sqrtdk.tracing.steps.sample import Sample

_ROUNDING = 0.05  # relative error of the unmixed logits at which their slope still stands, as it averages over hundreds


@dataclass(frozen=True, slots=True, eq=False)
class Mix(Step):
    """Head g of the mixed logits is the sum over h of matrix[g, h] times head h.

    Attributes:
        matrix: (H mixed, H), float64; None where its values are not known.
    """

    matrix: Tensor | None = None

    def write(self, expression: Expression) -> None:
        expression.settle(masks=True)  # what was hidden before is mixed as well
        expression.wrap("mix")

    def stage(self) -> Stage:
        return Stage("logits", "mix", "over the heads")

    def undo(self, sample: Sample) -> Sample:
        """Heads are the second axis of the sample; a number that was added to a whole head stays one."""
        if self.matrix is None:
            return sample
        return replace(sample, logits=torch.einsum("hg,bgm->bhm", torch.linalg.inv(self.matrix), sample.logits))

    def fixed(self, heads: int, eps: float) -> str | None:
        """Why it can't be undone in logits of `heads` heads that were rounded to `eps`; None where it can."""
        if self.matrix is None:
            return "the matrix that mixes the heads is not known"
        if self.matrix.shape != (heads, heads):
            return "the heads are not as many as the matrix mixes"
        if not bool(torch.linalg.cond(self.matrix) * eps < _ROUNDING):
            return "the mixing of the heads can't be undone"
        return None
