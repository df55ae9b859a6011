"""Logits at a few places, from which the steps are taken off one by one, outermost first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from sqrtdk.tracing.steps.placed import Placed


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampled logits on their way back to the product.

    Attributes:
        logits: float64, of any shape.
        pick: the values that a tensor of an earlier step has at the same places, in float64.
        outer: product of the factors of the steps that were taken off; NaN where one is not known.
    """

    logits: Tensor
    pick: Callable[[Placed], Tensor]
    outer: float = 1.0

    def without(self, addend: Placed) -> Sample:
        """Take off what was added, which the later factors multiplied."""
        by = self.outer if math.isfinite(self.outer) else 1.0
        return replace(self, logits=self.logits - self.pick(addend) * by)

    def under(self, factor: float | None) -> Sample:
        """What was added before this factor is multiplied by it; the factor itself stays, for the slope to show."""
        return replace(self, outer=self.outer * (math.nan if factor is None else factor))
