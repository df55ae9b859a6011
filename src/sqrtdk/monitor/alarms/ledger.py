"""The scale that an attention applies is another than at the first sample.

Bar: 1% of the scale ratio, the tolerance of the ledger; a warning. A scale that is learned, or computed from the data
or for each row, moves by design and is not judged. Other factors with the same ratio (a kernel that was changed for
another) are a note. What hides keys may differ from batch to batch: the rest of the formula is not compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk.audit.tolerance import SCALE_TOLERANCE, close
from sqrtdk.monitor.alarms.history import first_of
from sqrtdk.monitor.samples import Alarm, StepSample

NAME = "ledger"
SOURCE = "tolerance of the scale ledger: a scale held in bfloat16 is off by up to 0.4%"


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """At most one alarm for each attention."""
    for call in now.calls:
        first = first_of(before, call)
        if first is None:
            continue
        old, new = first.scale_ratio, call.scale_ratio
        known = old is not None and new is not None and first.fixed_scale and call.fixed_scale
        if known and not close(new or 0.0, old or 0.0):
            severity, what = "warn", f"a scale ratio of {new:.4g}, at first {old:.4g}"
        elif first.factors != call.factors:
            severity, what = "note", f"other factors: {_listed(call.factors)}, at first {_listed(first.factors)}"
        else:
            continue
        text = f"{call.name} has {what}, at step {now.step}: {call.formula}, at first {first.formula}"
        yield Alarm(NAME, severity, now.step, text, SOURCE, call.site, call.index, None, new, SCALE_TOLERANCE)


def _listed(factors: Sequence[str]) -> str:
    return ", ".join(factors) or "none"
