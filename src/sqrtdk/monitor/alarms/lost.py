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

from sqrtdk.audit.tolerance import SCALE_TOLERANCE, is_close
from sqrtdk.messages import Message, joined
from sqrtdk.monitor.alarms.trend import first_of
from sqrtdk.monitor.samples import STEP_UNMEASURED, Alarm, StepSample, reason_unmeasured, with_place

UNMEASURED_ALARM_SOURCE = "alarms.source.unmeasured"


def lost(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm for attentions that were measured in earlier samples and are missing in this one.

    It is one alarm for the whole model, or one for each missing site and attention.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    if not now.calls:
        text = Message("alarms.lost.all", step=now.step, reasons=joined((now.how, *now.not_measured[:3])))
        yield Alarm("lost", "warn", now.step, text, Message(UNMEASURED_ALARM_SOURCE))
        return
    start = next((sample for sample in before if sample.calls), None)
    if start is not None and len(before) > 1:
        sites = {call.site for sample in (before[-1], now) for call in sample.calls}
        for site in dict.fromkeys(call.site for call in start.calls if call.site not in sites):
            place = site or Message("alarms.place.model")
            text = Message("alarms.lost.site", site=place, step=now.step, before=start.step)
            yield Alarm("lost", "warn", now.step, text, Message(UNMEASURED_ALARM_SOURCE), site)
    for call in now.calls:
        first = first_of(before, call)
        if call.reason is not None and first is not None and first.reason is None:
            text = Message("alarms.lost.statistics", call=call.name, step=now.step, reason=call.reason)
            yield Alarm("lost", "warn", now.step, text, Message(UNMEASURED_ALARM_SOURCE), call.site, call.index)


def unmeasured_alarms(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield a note for each attention without statistics, and for each other reason in `now.not_measured`.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    for call in now.calls:
        if call.reason is not None:
            text = with_place(call.name, call.reason)
            yield Alarm(
                STEP_UNMEASURED, "note", now.step, text, Message(UNMEASURED_ALARM_SOURCE), call.site, call.index
            )
    whole = reason_unmeasured(now.how)
    besides = now.not_measured if whole is None or whole in now.not_measured else (whole, *now.not_measured)
    for text in besides:
        yield Alarm(STEP_UNMEASURED, "note", now.step, text, Message(UNMEASURED_ALARM_SOURCE))


def ledger_alarms(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm for each attention whose scale ratio or factors differ from those of its first sample.

    A changed ratio is a warning; the same ratio from other factors is a note. Learned scales may change without an
    alarm.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    for call in now.calls:
        first = first_of(before, call)
        if first is None:
            continue
        old, new = first.scale_ratio, call.scale_ratio
        known = old is not None and new is not None and first.fixed_scale and call.fixed_scale
        if known and not is_close(new or 0.0, old or 0.0):
            severity, id, values = "warn", "alarms.ledger.ratio", (f"{new:.4g}", f"{old:.4g}")
        elif first.factors != call.factors:
            severity, id, values = "note", "alarms.ledger.factors", (_listed(call.factors), _listed(first.factors))
        else:
            continue
        text = Message(
            id,
            call=call.name,
            new=values[0],
            old=values[1],
            step=now.step,
            formula=call.formula,
            first=first.formula,
        )
        source = Message("alarms.source.ledger")
        yield Alarm("ledger", severity, now.step, text, source, call.site, call.index, None, new, SCALE_TOLERANCE)


def _listed(factors: Sequence[str]) -> str:
    return joined(factors, "comma") if factors else Message("alarms.ledger.none")
