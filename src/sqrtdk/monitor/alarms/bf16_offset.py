"""Rows of stored logits that lie far off zero: bfloat16 has 8 significand bits, from 32 on steps of 0.25.

Bar on the largest |mean of a row|: 50; a warning where the logits are stored in bfloat16, a note where they would move
if they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk.audit.rules.numbers import BF16_OFFSET, BF16_SOURCE
from sqrtdk.monitor.alarms.history import largest
from sqrtdk.monitor.samples import Alarm, StepSample
from sqrtdk.theory import spacing

NAME = "bf16_offset"


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """At most one alarm for each attention, at its worst head."""
    for call in now.calls:
        value, head = largest(call, "row_offset")
        if not call.stored or value <= BF16_OFFSET:
            continue
        half = call.logits_dtype == "bfloat16"
        moves = "stored in bfloat16, it moves" if half else "in bfloat16 it would move"
        text = (
            f"{call.name}: head {head} has a row of logits {value:.4g} off zero at step {now.step}; "
            f"{moves} in steps of {spacing(value, 'bfloat16'):.3g}"
        )
        severity = "warn" if half else "note"
        yield Alarm(NAME, severity, now.step, text, BF16_SOURCE, call.site, call.index, head, value, BF16_OFFSET)
