"""The backward passes of the attentions of a sampled step, held against the gradients of their formulas.

The first forward pass of the step with autograd is looked at. Its trace keeps q, k, v, the output and the terms of each
attention until the backward pass ends; then the gradients that it delivered are judged in float64, as the law
`gradient` judges those of a pass of its own (`sqrtdk.laws.backward`). Nothing is run again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from sqrtdk._sites import ROOT_NAME
from sqrtdk._wrappers import named_parameters
from sqrtdk.errors import kind_and_text
from sqrtdk.laws.backward.delivered import Delivery, followed
from sqrtdk.laws.backward.operands import at_last_output, learned_factors, read_pairs
from sqrtdk.laws.backward.traced import TracedHandles, noted
from sqrtdk.laws.backward.words import fault_text
from sqrtdk.messages import Message
from sqrtdk.monitor.samples import GradientFault, with_place

LOGITS_JUDGED = 2**22  # of all attentions of a step together; beyond it some heads of each stand for all


class BackwardCheck:
    """The attentions of one sampled step whose backward pass is judged."""

    def __init__(self, model: nn.Module, turn: int) -> None:
        """Begin a step.

        Args:
            model: The model.
            turn: Number of steps that were judged before: each looks at other heads if it can't look at all.
        """
        self._model, self._turn = model, turn
        self._deliveries: list[list[Delivery]] = []  # of each attention: at its output, and at the rescaled one
        self._failures: list[str] = []
        self._begun = False

    def waits(self) -> bool:
        """Return whether the pass that begins is the one to look at."""
        return not self._begun and torch.is_grad_enabled()

    def begin(self, **options: Any) -> AbstractContextManager[TracedHandles]:
        """Return the trace of the pass; `options` are those of `Trace`."""
        self._begun = True
        return noted(self._model, as_is=True, **options)

    def add(self, trace: TracedHandles) -> None:
        """Follow the backward passes of all attentions of the finished trace."""
        try:
            pairs, parameters = read_pairs(trace), dict(named_parameters(self._model))
            factors = [learned_factors(call, parameters) for call, _ in pairs]
            readers = Counter(name for each in factors for name in each)  # each of several has a part of the gradient
            for (call, reached), each in zip(pairs, factors, strict=True):
                alone = {name: value for name, value in each.items() if readers[name] == 1}
                ways = [reached]
                if reached is not None and reached.rescaled is not None:
                    ways.append(at_last_output(reached))
                logits = LOGITS_JUDGED // len(pairs) // len(ways)
                self._deliveries.append([followed(call, way, self._model, alone, logits, self._turn) for way in ways])
        except Exception as error:  # an observer never stops the run
            self._failures.append(Message("alarms.unmeasured.backward.failed", error=kind_and_text(error)))

    def close(self) -> tuple[tuple[GradientFault, ...], list[str]]:
        """End the step, and return the faults, and why attentions were not judged."""
        faults: list[GradientFault] = []
        deliveries = [_surest(ways) for ways in self._deliveries]
        for one in deliveries:
            for fault in one.faults:
                off, allowed = (None if math.isnan(x) else x for x in (fault.off, fault.allowed))
                text = fault_text(fault)
                rounded = fault.code.startswith("rounded_")
                faults.append(GradientFault(one.call.site, one.call.index, text, rounded, one.by, off, allowed))
        reasons = Counter(one.reason for one in deliveries if one.reason is not None)
        missed: list[str] = [
            Message("alarms.unmeasured.backward.some", count=count, of=len(self._deliveries), reason=reason)
            for reason, count in reasons.items()
        ]
        missed += [with_place(ROOT_NAME, reason) for reason in self._failures]
        self._deliveries, self._failures = [], []
        return tuple(faults), missed


def _surest(ways: Sequence[Delivery]) -> Delivery:
    """Close the deliveries of one attention, and return the first that is right, or else the last that was judged."""
    for one in ways:
        one.close()
    judged = [one for one in ways if one.reason is None] or [*ways]
    return next((one for one in judged if not one.faults), judged[-1])
