"""What a watch no longer sees: no attention in a sampled step, a site of the first sample, statistics of a site.

Bar: 0. A site is told at the second sample without it: a layer that is dropped at random is missing now and then. Why
something is not measured, now or ever, is a note of its own: `unmeasured`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk.monitor.alarms.history import first_of
from sqrtdk.monitor.samples import Alarm, StepSample

NAME = "lost"
SOURCE = "what is not measured may not look fine"


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """One alarm for the model, or for each site and attention that was lost."""
    if not now.calls:
        reasons = "; ".join((now.how, *now.not_measured[:3]))
        yield Alarm(NAME, "warn", now.step, f"no attention was seen at step {now.step} ({reasons})", SOURCE)
        return
    start = next((sample for sample in before if sample.calls), None)
    if start is not None and len(before) > 1:
        sites = {call.site for sample in (before[-1], now) for call in sample.calls}
        for site in dict.fromkeys(call.site for call in start.calls if call.site not in sites):
            text = f"{site or 'the model'}: no attention was seen at step {now.step}, there was one at {start.step}"
            yield Alarm(NAME, "warn", now.step, text, SOURCE, site)
    for call in now.calls:
        first = first_of(before, call)
        if call.reason is not None and first is not None and first.reason is None:
            text = f"{call.name}: not measured any more at step {now.step}: {call.reason}"
            yield Alarm(NAME, "warn", now.step, text, SOURCE, call.site, call.index)
