"""A tensor that meets the logits at one step, and logits at a few places, from which the steps are taken off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import replay, spread
from sqrtdk.tracing.tape.node import Node


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Values that broadcast to the logits' `shape` at a step, and the `views` that follow it, innermost first."""

    value: Tensor
    views: tuple[Node, ...]
    shape: tuple[int, ...]

    def at_softmax(self) -> Tensor:
        """The values in the softmax's layout."""
        return to_softmax(self.value.expand(self.shape), self.views)


def to_softmax(value: Tensor, views: Iterable[Node]) -> Tensor:
    """Bring a tensor from an earlier layout of the logits into the softmax's, by the same views, innermost first."""
    for view in views:
        if view.op == "cat":  # a sink column: it carries nothing of `value`
            dim = int(view.args[1]) % value.dim() if len(view.args) > 1 else 0
            column = value.narrow(dim, 0, 1).expand(
                *[view.shape[dim] - n if d == dim else n for d, n in enumerate(value.shape)]
            )
            value = torch.cat([value, column], dim)
        elif view.op == "overwrite":
            value = spread(view, value)
        elif view.op in ops.CONTRACTIONS:  # heads mixed into more or fewer: none of them is one of `value`
            axis = -1 if view.shape[:-1] == value.shape[:-1] else -2
            value = value.narrow(axis, 0, 1).expand(view.shape)
        else:
            value = replay(view, value)
    return value


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampled logits on their way back to the product."""

    logits: Tensor  # float64, of any shape
    pick: Callable[[Placed], Tensor]  # the values that a tensor of an earlier step has at the same places, float64
    outer: float = 1.0  # product of the factors of the steps that were taken off; NaN where one is not known

    def without(self, addend: Placed) -> Sample:
        """Take off what was added, which the later factors multiplied."""
        by = self.outer if math.isfinite(self.outer) else 1.0
        return replace(self, logits=self.logits - self.pick(addend) * by)

    def under(self, factor: float | None) -> Sample:
        """What was added before this factor is multiplied by it; the factor itself stays, for the slope to show."""
        return replace(self, outer=self.outer * (math.nan if factor is None else factor))
