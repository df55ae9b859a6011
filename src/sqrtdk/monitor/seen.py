"""What the forward passes of one sampled step gave, before anything is divided: of one process, or of all of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sqrtdk.audit.gains import norm_sigma
from sqrtdk.monitor.samples import Alarm, CallSample, CallTraits, FirstNonfinite
from sqrtdk.monitor.sums import HeadSums, table
from sqrtdk.tracing import CallRows

UNMEASURED = "its rows were not measured"
UNTOLD = CallTraits()


@dataclass(frozen=True, slots=True, eq=False)
class SeenCall:
    """One attention, so far.

    Attributes:
        site: module path.
        index: 0-based count of the attentions at this site.
        heads: of q.
        ratio: effective scale times sqrt(head_dim); None where it could not be read.
        formula: that reached the softmax.
        sums: over the rows of each head; None where they could not be measured.
        reason: why there are none.
        rows: those that were summed up, of each forward pass, where they are asked for.
        traits: what is known of it beside its formula.
    """

    site: str
    index: int
    heads: int
    ratio: float | None
    formula: str
    sums: HeadSums | None
    reason: str | None = None
    rows: tuple[CallRows, ...] = ()
    traits: CallTraits = UNTOLD

    @property
    def place(self) -> tuple[str, int]:
        """Site and index."""
        return self.site, self.index


@dataclass(frozen=True, slots=True, eq=False)
class SeenStep:
    """All attentions of one sampled step.

    Attributes:
        calls: in the order of running.
        how: the step ran, as in `StepSample`.
        missed: what could not be measured, and why.
        loss: that `step()` was told.
        alarms: that do not come from the numbers, and that every process is to know of.
        first: output of a module that is not finite.
        modules: whose outputs were looked at.
    """

    calls: tuple[SeenCall, ...]
    how: str
    missed: tuple[str, ...] = ()
    loss: float | None = None
    alarms: tuple[Alarm, ...] = ()
    first: FirstNonfinite | None = None
    modules: int = 0

    def samples(self) -> tuple[CallSample, ...]:
        """The statistics of every call; they leave the device in one transfer."""
        known = [call for call in self.calls if call.sums is not None]
        with torch.no_grad():
            tables = table([call.sums for call in known if call.sums is not None])
        columns = {call.place: one for call, one in zip(known, tables, strict=True)}
        return tuple(_sample(call, columns.get(call.place, {})) for call in self.calls)


def _sample(call: SeenCall, columns: dict[str, list[float]]) -> CallSample:
    known = call.traits
    return CallSample(
        site=call.site,
        index=call.index,
        heads=call.heads,
        columns=columns,
        scale_ratio=call.ratio,
        formula=call.formula,
        reason=call.reason,
        logits_dtype=known.logits_dtype,
        stored=known.stored,
        factors=known.factors,
        fixed_scale=known.fixed_scale,
        norm_sigma=norm_sigma(call.ratio, known.norm_size),
        dtype=known.dtype,
    )
