"""What a run did not tell: attentions that were lost, that were not found, that did not run."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from sqrtdk.models.attentions import IDLE, silent_attentions
from sqrtdk.tracing import Trace
from sqrtdk.tracing.records import DOUBTFUL, NEVER_USED, NOT_SEEN, NotMeasured

_UNUSED = (NEVER_USED, NOT_SEEN, *DOUBTFUL)


def silences(
    model: nn.Module, called: Collection[int], run: Trace
) -> tuple[tuple[NotMeasured, ...], tuple[NotMeasured, ...]]:
    """What ran and was lost or not found, and what did not run or may have been no attention.

    Args:
        model: After its run.
        called: Ids of the modules that were called, from `watch_modules`.
        run: What the trace saw.
    """
    unused = [entry.site for entry in run.not_attention if entry.reason in _UNUSED]
    accounted_for = [entry.site for entry in run.not_attention if entry.reason not in _UNUSED]
    accounted_for += [call.site for call in run.calls] + [entry.site for entry in run.not_measured]
    silent = [
        _with_softmax(NotMeasured(path, reason), run)
        for path, reason in silent_attentions(model, called, accounted_for, unused)
    ]
    idle = [entry for entry in silent if entry.reason == IDLE]
    unfound = [entry for entry in silent if entry.reason != IDLE]
    inside_unfound = tuple(f"{entry.site}." for entry in unfound)
    doubtful = [
        NotMeasured(entry.site, entry.reason, entry.formula, entry.at)
        for entry in run.not_attention
        if entry.reason in DOUBTFUL and not f"{entry.site}.".startswith(inside_unfound)
    ]
    return (*run.not_measured, *unfound), (*dict.fromkeys(doubtful), *idle)


def _with_softmax(silent: NotMeasured, run: Trace) -> NotMeasured:
    """The entry, with the first softmax of a product of activations that was lost inside the module."""
    inside = (entry for entry in run.not_attention if f"{entry.site}.".startswith(f"{silent.site}."))
    lost = next((entry for entry in inside if entry.reason in DOUBTFUL), None)
    return silent if lost is None else replace(silent, formula=lost.formula, at=lost.at)
