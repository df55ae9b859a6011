"""A tensor that is combined with the logits at one step, and a sample of logits from which steps are removed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import extended_block, replay
from sqrtdk.tracing.tape.node import Node


@dataclass(frozen=True, slots=True, eq=False)
class StepTensor:
    """A tensor that is combined with the logits at one step.

    Attributes:
        value: its values, which broadcast to `shape`.
        views: the views of the logits after the step, innermost first.
        shape: shape of the logits at the step.
    """

    value: Tensor
    views: tuple[Node, ...]
    shape: tuple[int, ...]

    def at_softmax(self) -> Tensor:
        """Return the values in the shape and order of axes that the logits have at the softmax."""
        return to_softmax(self.value.expand(self.shape), self.views)


def to_softmax(value: Tensor, views: Iterable[Node]) -> Tensor:
    """Return a tensor moved from an earlier layout of the logits to the softmax's, by the same views.

    Args:
        value: the tensor, of the shape that the logits had.
        views: nodes of the views, innermost first. A column of sinks that is added gets arbitrary values.

    Raises:
        RuntimeError: a view can't be run on the tensor.
        IndexError: the same.
    """
    for view in views:
        if view.op == "cat":
            value = _beside_columns(view, value)
        elif view.op == "overwrite":
            value = extended_block(view, value)
        elif view.op in ops.CONTRACTIONS:  # heads mixed into another number of heads: `value` is taken from the first
            axis = -1 if view.shape[:-1] == value.shape[:-1] else -2
            value = value.narrow(axis, 0, 1).expand(view.shape)
        else:
            value = replay(view, value)
    return value


def _beside_columns(view: Node, value: Tensor) -> Tensor:
    """Return a tensor at the place of the logits in `cat([logits, sinks], -1)`, or in `cat([sinks, logits], -1)`.

    The columns of the sinks are filled with any values.
    """
    dim, before = int(view.args[1]) % value.dim() if len(view.args) > 1 else 0, columns_before(view)
    column = value.narrow(dim, 0, 1)
    counts = before, view.shape[dim] - value.shape[dim] - before
    left, right = (column.expand(*[count if d == dim else n for d, n in enumerate(value.shape)]) for count in counts)
    return torch.cat([left, value, right], dim)


def columns_before(view: Node) -> int:
    """Return how many columns lie before the logits: 1 in `cat([sinks, logits], -1)`, 0 for sinks behind them."""
    dim = int(view.args[1]) if len(view.args) > 1 else 0
    parents, main = list(view.parents()), view.main()
    return sum(parent.shape[dim] for parent in parents[: next(at for at, p in enumerate(parents) if p is main)])


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampled logits from which steps are removed, from the softmax back to the product."""

    logits: Tensor  # float64, of any shape
    pick: Callable[[StepTensor], Tensor]  # returns a step's values at the sampled places, float64
    outer: float = 1.0  # product of the factors of the steps visited so far; NaN if one is unknown

    def without(self, addend: StepTensor) -> Sample:
        """Return the sample minus an addend, which is first multiplied by the factors applied after it."""
        by = self.outer if math.isfinite(self.outer) else 1.0
        return replace(self, logits=self.logits - self.pick(addend) * by)

    def under(self, factor: float | None) -> Sample:
        """Return the sample with one more factor in `outer`; None is an unknown factor.

        The logits keep the factor, because the slope of the regression must show it.
        """
        return replace(self, outer=self.outer * (math.nan if factor is None else factor))
