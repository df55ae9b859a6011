"""What is wrong with the scale of an attention from the first sample on, judged as `sqrtdk.check` judges it.

A scale that a model's config or a rule explains is no fault. The alarm `ledger` is about a scale that changes later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from torch import nn

from sqrtdk.audit.proportional import Arguments, watch_base_lengths
from sqrtdk.audit.records import without_call
from sqrtdk.audit.rules.scales import on_scales
from sqrtdk.audit.verdicts import judge_all
from sqrtdk.errors import kind_and_text
from sqrtdk.messages import Message
from sqrtdk.monitor.samples import ScaleFault
from sqrtdk.tracing.records import AttentionCall

Place = tuple[str, int]


class ScaleFaults:
    """The faults of the scales of a model's attentions, by site and index.

    Args:
        model: The model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._faults: dict[Place, tuple[ScaleFault, ...]] = {}
        self._lengths: Mapping[str, Arguments] = {}

    @contextmanager
    def watching(self, looks: bool) -> Iterator[None]:
        """Return a context for a forward pass, and whether its calls are to be judged."""
        if not looks:
            self._lengths = {}
            yield
            return
        with watch_base_lengths(self._model) as self._lengths:
            yield

    def judge(self, calls: Sequence[AttentionCall]) -> list[str]:
        """Judge the attentions of a forward pass; return why they could not be judged, if they could not."""
        try:
            judged = judge_all(calls, self._model, self._lengths)
            faults = {(call.site, call.index): list[ScaleFault]() for call in calls}
            for found in on_scales(self._model, judged, "dynamic"):
                if found.severity != "note":
                    text, place = without_call(found.message), (found.site, found.call or 0)
                    faults[place].append(ScaleFault(found.rule, found.severity, text, found.source, found.at or ""))
            self._faults |= {place: tuple(each) for place, each in faults.items()}
        except Exception as error:  # an observer never stops the run
            return [Message("alarms.unmeasured.scales", error=kind_and_text(error))]
        return []

    def of(self, call: AttentionCall) -> tuple[ScaleFault, ...]:
        """Return the faults of an attention; () if it has none, or was not judged."""
        return self._faults.get((call.site, call.index), ())
