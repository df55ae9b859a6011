"""Alarms on what a watch no longer sees, could not measure, or sees changed.

- `lost`: a sampled step without any attention, or a site or its statistics that the first sample had. A missing site is
  an alarm at the second sample without it, because a layer that is dropped at random is missing now and then.
- `unmeasured`: an attention without statistics, gradients, passes or the whole step. A note, once for each place and
  reason, because it was not judged.
- `ledger`: the applied scale differs from the first sample by more than 1%, the tolerance of the ledger; a warning. A
  scale that is learned, or computed from the data or for each row, moves by design and is not judged. Other factors
  with the same ratio (another kernel took over) are a note. The rest of the formula is not compared, because masks may
  differ from batch to batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk.audit.tolerance import SCALE_TOLERANCE, close
from sqrtdk.monitor.alarms.trend import first_of
from sqrtdk.monitor.samples import NOT_MEASURED, UNMEASURED, Alarm, StepSample

SOURCE = "what is not measured may not look fine"


def lost(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield one alarm for the model, or one for each lost site and attention."""
    if not now.calls:
        reasons = "; ".join((now.how, *now.not_measured[:3]))
        yield Alarm("lost", "warn", now.step, f"no attention was seen at step {now.step} ({reasons})", SOURCE)
        return
    start = next((sample for sample in before if sample.calls), None)
    if start is not None and len(before) > 1:
        sites = {call.site for sample in (before[-1], now) for call in sample.calls}
        for site in dict.fromkeys(call.site for call in start.calls if call.site not in sites):
            text = f"{site or 'the model'}: no attention was seen at step {now.step}, there was one at {start.step}"
            yield Alarm("lost", "warn", now.step, text, SOURCE, site)
    for call in now.calls:
        first = first_of(before, call)
        if call.reason is not None and first is not None and first.reason is None:
            text = f"{call.name}: not measured any more at step {now.step}: {call.reason}"
            yield Alarm("lost", "warn", now.step, text, SOURCE, call.site, call.index)


def unmeasured(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield one alarm for each attention without statistics, and for each other entry of `not_measured`."""
    for call in now.calls:
        if call.reason is not None:
            text = f"{call.name}: {call.reason}"
            yield Alarm(UNMEASURED, "note", now.step, text, SOURCE, call.site, call.index)
    whole = now.how.removeprefix(NOT_MEASURED)
    besides = now.not_measured if whole in (now.how, *now.not_measured) else (whole, *now.not_measured)
    for text in besides:
        yield Alarm(UNMEASURED, "note", now.step, text, SOURCE)


LEDGER_SOURCE = "tolerance of the scale ledger: a scale held in bfloat16 is off by up to 0.4%"


def ledger(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield at most one alarm for each attention."""
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
        yield Alarm(
            "ledger", severity, now.step, text, LEDGER_SOURCE, call.site, call.index, None, new, SCALE_TOLERANCE
        )


def _listed(factors: Sequence[str]) -> str:
    return ", ".join(factors) or "none"
