"""Heads that went flat or one-hot, and were not so at a sample before.

Flat: entropy above .999 log n and logits within a row that deviate by less than 0.1, over 16 keys or more (the audit's
rule `flat`). One-hot: a mean largest weight above .99. "Not so before": ten times as far from 1, so that a head that
moves about a bar is not told. A head is a note, one dead or parked head harms nobody; more than half of the heads are a
warning for the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk.audit.rules.statistics import (
    FLAT_FRACTION,
    FLAT_SOURCE,
    FLAT_STD,
    LEAST_KEYS,
    PEAK_SOURCE,
    SATURATED_HEADS,
)
from sqrtdk.monitor.alarms.history import same_place
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample
from sqrtdk.stats.heads import SATURATED

NAME = "collapsed"
CLEARLY = 10.0  # times the distance from 1
LOOKED_AT = 64  # samples of the past, evenly spread: a long run is not gone through again at every sample


def judge(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """A note for each such head, and a warning where they are most of the model's."""
    looked_at = before[:: 1 + len(before) // LOOKED_AT]
    notes: list[Alarm] = []
    for call in now.calls:
        suspects = [(head, kind) for head in range(call.heads) if (kind := _kind(call, head)) is not None]
        old = list(same_place(looked_at, call)) if suspects else []
        for head, (word, column, bar, source) in suspects:
            value, clear = call.columns[column][head], 1.0 - CLEARLY * (1.0 - bar)
            step = next((step for step, one in old if _value(one, column, head) < clear), None)
            if step is None:
                continue
            text = f"{call.name}: head {head} went {word} by step {now.step} ({column} {value:.4g}), not so at {step}"
            notes.append(Alarm(NAME, "note", now.step, text, source, call.site, call.index, head, value, bar))
    yield from notes
    heads = sum(call.heads for call in now.calls)
    if len(notes) > SATURATED_HEADS * heads:
        text = f"{len(notes)} of {heads} heads went flat or one-hot by step {now.step}; first: {notes[0].text}"
        yield Alarm(NAME, "warn", now.step, text, notes[0].source, value=len(notes) / heads, bar=SATURATED_HEADS)


def _kind(call: CallSample, head: int) -> tuple[str, str, float, str] | None:
    """What a head is, the column that says so, its bar and source; None: neither flat nor one-hot."""
    if not _value(call, "keys", head) >= LEAST_KEYS:
        return None
    if _value(call, "entropy_fraction", head) > FLAT_FRACTION and _value(call, "std_logit", head) < FLAT_STD:
        return "flat", "entropy_fraction", FLAT_FRACTION, FLAT_SOURCE
    return ("one-hot", "peak", SATURATED, PEAK_SOURCE) if _value(call, "peak", head) > SATURATED else None


def _value(call: CallSample, column: str, head: int) -> float:
    """NaN, which no bar is passed by, where it was not measured."""
    values = call.columns.get(column, ())
    return values[head] if head < len(values) else float("nan")
