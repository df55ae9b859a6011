"""What a sampled step could not measure: each attention without statistics, gradients, passes, the whole step.

Bar: 0. A note, once for each place and reason: it was not judged. What was measured before and no longer is has a
warning besides, `lost`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk.monitor.alarms.lost import SOURCE
from sqrtdk.monitor.samples import NOT_MEASURED, UNMEASURED, Alarm, StepSample

NAME = UNMEASURED


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """One alarm for each attention without statistics, and for each entry of what was not measured besides."""
    for call in now.calls:
        if call.reason is not None:
            text = f"{call.name}: {call.reason}"
            yield Alarm(NAME, "note", now.step, text, SOURCE, call.site, call.index)
    whole = now.how.removeprefix(NOT_MEASURED)
    besides = now.not_measured if whole in (now.how, *now.not_measured) else (whole, *now.not_measured)
    for text in besides:
        yield Alarm(NAME, "note", now.step, text, SOURCE)
