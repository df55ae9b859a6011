"""Which change of the backward pass of one process gives the gradients of several ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_parameters
from sqrtdk.audit.guard import eval_mode
from sqrtdk.laws.backward.handles import Reached
from sqrtdk.laws.backward.operands import read_pairs
from sqrtdk.laws.backward.traced import noted
from sqrtdk.laws.processes.backward_changes import (
    BackwardChange,
    backward_changes,
    can_be_changed,
    changed_backward,
)
from sqrtdk.laws.processes.gradients import GradientsBeside, gradients_beside
from sqrtdk.laws.processes.runs import loss_of
from sqrtdk.laws.processes.shards import TokenPlaces
from sqrtdk.tracing.tape.stance import fast_path_off

SECONDS_OF_TRIALS = 100.0  # that all changes together may take; a third of what the child has


def names_of_backward(
    module: nn.Module, forward: Callable[[], Any], cotangents: Mapping[str, Tensor | None],
    hypotheses: Sequence[TokenPlaces], ranks: Sequence[Mapping[str, Tensor]], beside: GradientsBeside,
) -> list[BackwardChange]:  # fmt: skip
    """Return the changes that explain the gradients of all parameters, the first of each name; empty if none does.

    Args:
        module: The model on one process.
        forward: Runs it.
        cotangents: Of each output.
        hypotheses: Where the tokens of each rank may stand.
        ranks: The gradients of each rank by parameter.
        beside: How they differ from those of one process.
    """
    assert beside.fault is not None
    until = time.monotonic() + SECONDS_OF_TRIALS
    trained = {name: one for name, one in named_parameters(module) if one.requires_grad}
    with fast_path_off(), eval_mode(module), torch.enable_grad():
        with noted(module) as run:
            returned = forward()
        loss = loss_of(returned, cotangents)
        if loss is None:
            return []
        reached = [one for _, one in read_pairs(run) if one is not None]
        for places in hypotheses:
            able = [one for one in reached if can_be_changed(one, places)]
            for attentions in _scopes(able, beside.fault.parameters[-1]):
                found: dict[str, BackwardChange] = {}
                for change in backward_changes(places):
                    if time.monotonic() > until:
                        return [*found.values()]
                    grads = _changed(loss, trained, attentions, places, change)
                    other = gradients_beside(grads, ranks)
                    if other.fault is None and other.factor == beside.factor:
                        found.setdefault(change.name, change)
                if found:
                    return [*found.values()]
    return []


def _scopes(able: Sequence[Reached], parameter: str) -> Iterator[list[Reached]]:
    """Yield all attentions, and the one that is nearest to the parameter by its path."""
    if not able:
        return
    yield [*able]
    if len(able) > 1:
        yield [max(able, key=lambda one: len(_common(one.call.site.split("."), parameter.split("."))))]


def _common(one: Sequence[str], other: Sequence[str]) -> list[str]:
    found: list[str] = []
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        found.append(a)
    return found


def _changed(
    loss: Tensor, trained: Mapping[str, Tensor], attentions: Sequence[Reached], places: TokenPlaces,
    change: BackwardChange,
) -> dict[str, Tensor]:  # fmt: skip
    with ExitStack() as hooks:
        changed_backward(attentions, places, change, hooks)
        grads = torch.autograd.grad(loss, [*trained.values()], retain_graph=True, allow_unused=True)
    return {name: grad.detach() for name, grad in zip(trained, grads, strict=True) if grad is not None}
