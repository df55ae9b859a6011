"""Logits that are not finite: the first attention in the order of running, and which tensor had it first.

Bar: 0 rows. Later attentions have it from the first one, so that one is told.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sqrtdk.audit.rules.nonfinite import SOURCE
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample

NAME = "nonfinite"


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """At most one alarm, at the first attention with such rows."""
    for call in now.calls:
        counts = [sum(pair) for pair in zip(_column(call, "nan_rows"), _column(call, "inf_rows"), strict=True)]
        if not any(counts):
            continue
        head = next(head for head, count in enumerate(counts) if count)
        minus = "" if any(_column(call, "nan_rows")) else "minus "
        text = (
            f"{call.name}: {sum(counts):.0f} of {sum(_column(call, 'rows')):.0f} rows of logits hold NaN or {minus}"
            f"infinity at step {now.step}, first in head {head}; {_blame(call)}"
        )
        yield Alarm(NAME, "critical", now.step, text, SOURCE, call.site, call.index, head, sum(counts), 0.0)
        return


def _column(call: CallSample, name: str) -> Sequence[float]:
    return call.columns.get(name, [0.0] * call.heads)


def _blame(call: CallSample) -> str:
    """Which tensor it came from: q and k, or the product of both."""
    bad = {name: max(_column(call, f"{name}_nonfinite"), default=math.nan) for name in ("query", "key")}
    known = [f"{count:.0f} numbers of {name[0]}" for name, count in bad.items() if count > 0]
    if known:
        return f"not finite before the product: {' and '.join(known)}"
    if any(math.isnan(count) for count in bad.values()):
        return "whether q or k is finite was not measured"
    return "q and k are finite, the logits are the first tensor that is not"
