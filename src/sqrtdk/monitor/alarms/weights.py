"""Alarms on how the weights are spread: heads that look at too few keys, at one key, or at all keys alike.

- `equal_logits`: in every head of an attention all logits of a row are one number, as where a buffer in front of q and
  k was erased; a warning, from the first sample on. Fresh weights give small logits, but no equal ones.

- `saturation`: heads that put more than .99 of the weight on one key in most of their rows; a note, and a warning if
  most heads do.
- `entropy`: the mean entropy of a head against the finite-n table of the audit's rule `entropy`; a note if a quarter of
  the model's heads lie below their bar, a warning if three quarters do.
- `entropy_trend`: the entropy falls towards that bar. The median over heads of log(bar / entropy) is extended to 0,
  where half of the heads lie below their bar; a note, once the median is within a factor of two.
- `collapsed`: heads that went flat or one-hot and were not so at an earlier sample. Flat: entropy above .999 log n, and
  logits within a row that deviate by less than 0.1, over 16 keys or more (the audit's rule `flat`). One-hot: a mean
  largest weight above .99. "Not so" means ten times as far from 1, so that a head that hovers at a bar raises no alarm.
  One head is a note, because one dead or parked head is harmless; more than half of the heads are a warning.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from sqrtdk.audit.rules.statistics import (
    ENTROPY_SOURCE,
    FLAT_FRACTION,
    FLAT_SOURCE,
    FLAT_STD,
    LEAST_KEYS_JUDGED,
    NOTE_FRACTION,
    PEAK_SOURCE,
    SATURATED_HEADS,
    SATURATED_ROWS,
    WARN_FRACTION,
    all_equal,
    bar_nats,
)
from sqrtdk.messages import Message
from sqrtdk.monitor.alarms.trend import WINDOW, largest_of_column, passing, same_place
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample
from sqrtdk.stats.heads import SATURATED

COLUMN = "saturated"


def saturation_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm if heads have many rows whose weight is on one key; one for the model, at the worst head.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    # NaN: no row has two keys
    fractions = [value for call in now.calls for value in call.columns.get(COLUMN, ()) if value >= 0]
    many = sum(value > SATURATED_ROWS for value in fractions)
    if not many:
        return
    call = max(now.calls, key=lambda call: largest_of_column(call, COLUMN))
    value, head = largest_of_column(call, COLUMN)
    text = Message(
        "alarms.saturation.one_key",
        count=many,
        heads=len(fractions),
        step=now.step,
        call=call.name,
        head=head,
        share=f"{100 * value:.0f}",
    )
    severity = "warn" if many > SATURATED_HEADS * len(fractions) else "note"
    yield Alarm(
        "saturation", severity, now.step, text, Message(PEAK_SOURCE), call.site, call.index, head, value, SATURATED_ROWS
    )


def equal_logits(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm for each attention whose logits are all equal, so that its weights are uniform.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    for call in now.calls:
        std = call.columns.get("std_logit", ())
        keys, largest = (call.columns.get(name) or [0.0] * len(std) for name in ("keys", "max_abs_logit"))
        if all_equal(keys, std, largest):
            text = Message("alarms.equal_logits.equal", call=call.name, step=now.step)
            yield Alarm(
                "equal_logits", "warn", now.step, text, Message(FLAT_SOURCE), call.site, call.index, None, 0.0, 0.0
            )


def entropy_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm if many heads have an entropy below their bar, in nats; one for the model, at the lowest head.

    It is a warning from `WARN_FRACTION` of the heads on, and a note from `NOTE_FRACTION`.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    heads = [(entropy / bar, entropy, bar, call, head) for call, head, entropy, bar in _heads(now)]
    low = [one for one in heads if one[0] < 1.0]
    if not low or len(low) < NOTE_FRACTION * len(heads):
        return
    _, entropy, bar, call, head = min(low, key=lambda one: one[0])
    severity = "warn" if len(low) >= WARN_FRACTION * len(heads) else "note"
    text = Message(
        "alarms.entropy.low",
        count=len(low),
        heads=len(heads),
        step=now.step,
        call=call.name,
        head=head,
        entropy=f"{entropy:.3g}",
        bar=f"{bar:.3g}",
    )
    yield Alarm("entropy", severity, now.step, text, Message(ENTROPY_SOURCE), call.site, call.index, head, entropy, bar)


def entropy_trend(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield a note if the entropy of the model is about to pass its bar.

    A line through the last `WINDOW` samples says when it will.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    newest = _depth(now)
    if newest is None or not -math.log(2.0) < newest < 0.0:
        return
    points = [(sample.step, depth) for sample in before[1 - WINDOW :] if (depth := _depth(sample)) is not None]
    points.append((now.step, newest))
    found = passing([step for step, _ in points], [depth for _, depth in points], 0.0)
    if found is not None:
        text = Message("alarms.entropy_trend.falls", when=found.message())
        yield Alarm("entropy_trend", "note", now.step, text, Message(ENTROPY_SOURCE), value=newest, bar=0.0)


def _depth(sample: StepSample) -> float | None:
    """Return the median over heads of log(bar / entropy), which is above 0 if half of the heads lie below their bar."""
    ratios = [math.log(bar / max(entropy, 1e-9)) for _, _, entropy, bar in _heads(sample)]
    return median(ratios) if ratios else None


def _heads(sample: StepSample) -> Iterator[tuple[CallSample, int, float, float]]:
    """Yield attention, head, its entropy and its bar (nats), for every head that can be judged."""
    for call in sample.calls:
        pairs = zip(call.columns.get("keys", ()), call.columns.get("entropy_nats", ()), strict=True)
        for head, (keys, entropy) in enumerate(pairs):
            if math.isfinite(entropy) and keys >= LEAST_KEYS_JUDGED:
                yield call, head, entropy, bar_nats(round(keys), call.norm_sigma)


CLEARLY = 10.0  # a head counts as healthy before if it was this many times as far from 1
EARLIER_SAMPLES_COMPARED = (
    64  # earlier samples that are compared, evenly spread: a long run is not searched whole at every sample
)


def collapsed(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield a warning if most heads of the model collapsed, and a note for each head that did.

    A collapsed head has nearly one-hot or nearly uniform weights, and was clearly different in an earlier sample.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    looked_at = before[:: 1 + len(before) // EARLIER_SAMPLES_COMPARED]
    notes: list[Alarm] = []
    for call in now.calls:
        suspects = [(head, kind) for head in range(call.heads) if (kind := _kind(call, head)) is not None]
        old = list(same_place(looked_at, call)) if suspects else []
        for head, (id, column, bar, source) in suspects:
            value, clear = call.columns[column][head], 1.0 - CLEARLY * (1.0 - bar)
            step = next((step for step, one in old if _value(one, column, head) < clear), None)
            if step is None:
                continue
            size = f"{value:.4g}"
            text = Message(id, call=call.name, head=head, step=now.step, column=column, value=size, before=step)
            notes.append(Alarm("collapsed", "note", now.step, text, source, call.site, call.index, head, value, bar))
    heads = sum(call.heads for call in now.calls)
    if len(notes) > SATURATED_HEADS * heads:  # first: `fresh` then leaves out the heads that it stands for
        text = Message("alarms.collapsed.most", count=len(notes), heads=heads, step=now.step, first=notes[0].text)
        yield Alarm("collapsed", "warn", now.step, text, notes[0].source, value=len(notes) / heads, bar=SATURATED_HEADS)
    yield from notes


def _kind(call: CallSample, head: int) -> tuple[str, str, float, str] | None:
    """Return the alarm's id, column, bar and source for a collapsed head; None if it is neither flat nor one-hot."""
    if not _value(call, "keys", head) >= LEAST_KEYS_JUDGED:
        return None
    if _value(call, "entropy_fraction", head) > FLAT_FRACTION and _value(call, "std_logit", head) < FLAT_STD:
        return "alarms.collapsed.flat", "entropy_fraction", FLAT_FRACTION, Message(FLAT_SOURCE)
    one_hot = _value(call, "peak", head) > SATURATED
    return ("alarms.collapsed.one_hot", "peak", SATURATED, Message(PEAK_SOURCE)) if one_hot else None


def _value(call: CallSample, column: str, head: int) -> float:
    """Return the value of `column` for one head; NaN, which is above no threshold, if it was not measured."""
    values = call.columns.get(column, ())
    return values[head] if head < len(values) else float("nan")
