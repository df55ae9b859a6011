"""Alarms from which others follow: a layer that is unlike its neighbours, an update that is too large.

- `layer_logits`: the logits of an attention deviate over 100 times as much within a row as those of the attentions
  before and after it; a warning. Layers are initialised alike, so a layer that is so from the first sample on is a
  slip: weights drawn with a deviation of 0.5 in place of 0.02, which q and k multiply to 625, or a norm that one layer
  lacks. Trained layers differ by a factor of ten. A layer that becomes so later is one whose own logits grew tenfold or
  more: beside neighbours whose logits merely vanish it is not at fault. A neighbour whose logits are all equal is no
  measure.
- `update`: the relative step of a weight of q and k (`monitor.updates`) is above 3, a warning. Then the learning rate
  is far too high, whatever the logits are: at a rate of 10, Adam's first step moves weights of 0.02 by 500 times their
  size, where a rate of 0.001 moves them by a twentieth. Weights that begin at zero are the reason for a bar above 1: in
  a warm-up the second step is twice as large as the first, and moves them by twice their size. Between two samples the
  drift is judged: above 10, and above 3 times what as many steps like the sampled ones at both ends could move it by.
  Steps that each replace less are too large if they go on: in three samples in a row at least 1%, and meanwhile the
  largest logit, as 1/sqrt(head_dim) would give it, has grown tenfold and passed 100. Either alone is no sign: weights
  drawn with a deviation of 0.02 move by 2% a step under Adam at a healthy rate of 0.001, and a wrong scale makes large
  logits at any rate. `docs/en/watch.md` has the runs that were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from sqrtdk.messages import Message
from sqrtdk.monitor.alarms.trend import first_of, largest_of_column
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample

LARGEST_RATIO = 100.0
LEAST_GROWTH = 10.0  # of the logits of a layer that becomes unlike its neighbours
LARGEST_RELATIVE_STEP = 3.0
LARGEST_DRIFT = 10.0
MOST_EXPLAINED = 3.0  # times what steps like the sampled ones move a weight by
SUSTAINED_STEP = 0.01  # relative step of each of `SUSTAINED_SAMPLES` samples in a row
SUSTAINED_SAMPLES = 3
SUSTAINED_LOGIT = 100.0  # the bar of `max_logit` for a warning
SUSTAINED_GROWTH = 10.0  # of the largest logit since the first sample


def layer_logits_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm for each attention whose logits deviate far more than those of its neighbours.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.

    Example:
        >>> calls = [CallSample(f"h.{i}", 0, 1, {"std_logit": [std]}, 1.0, "") for i, std in enumerate((0.2, 60, 0.3))]
        >>> print(*(alarm.text for alarm in layer_logits_alarm((), StepSample(1, tuple(calls)))))
        the logits of h.1 are 200 times its neighbours' at step 1 (standard deviation within a row: 60)
    """
    for place, (call, size, ratio) in _beside(now).items():
        if ratio <= LARGEST_RATIO:
            continue
        step, (_, size_then, ratio_then) = next(
            ((sample.step, found[place]) for sample in before if place in (found := _beside(sample))),
            (now.step, (call, size, ratio)),
        )
        values: dict[str, str | int] = {"call": call.name, "value": f"{size:.3g}", "step": now.step}
        if ratio_then > LARGEST_RATIO:
            text = Message("alarms.layer_logits.unlike", **values, times=_plain(ratio))
        elif size >= LEAST_GROWTH * size_then:
            then: dict[str, str | int] = {
                "before": step,
                "value_then": f"{size_then:.3g}",
                "times_then": _plain(ratio_then),
            }
            text = Message("alarms.layer_logits.became", **values, times=_plain(ratio), **then)
        else:
            continue
        source = Message("alarms.source.layers")
        yield Alarm("layer_logits", "warn", now.step, text, source, call.site, call.index, None, ratio, LARGEST_RATIO)


def _beside(sample: StepSample) -> dict[tuple[str, int], tuple[CallSample, float, float]]:
    """Return each attention with the deviation of its logits, and that divided by the larger one of its neighbours."""
    sizes = [(call, size) for call in sample.calls if (size := _deviation(call)) > 0]
    found = {}
    for at, (call, size) in enumerate(sizes):
        beside = [other for _, other in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2])]
        if beside:
            found[call.site, call.index] = call, size, size / max(beside)
    return found


def _plain(ratio: float) -> str:
    return f"{float(f'{ratio:.3g}'):g}"  # 3900, where three digits alone are 3.9e+03


def _deviation(call: CallSample) -> float:
    """Return the median over heads of the logits' deviation within a row; 0 if no head has a finite one."""
    return median([value for value in call.columns.get("std_logit", ()) if math.isfinite(value)] or [0.0])


def update_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm if a step, or the steps since the last sample, changed a weight of q and k far too much.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    source = Message("alarms.source.update")
    if before and (between := _drifted(before[-1], now)) is not None:
        drift, bar = between
        values: dict[str, str | int] = {"step": now.step, "before": before[-1].step, "times": _plain(drift)}
        text = Message("alarms.update.between", **values, expected=_plain(bar / MOST_EXPLAINED))
        yield Alarm("update", "warn", now.step, text, source, value=drift, bar=bar)
    ratio = now.relative_step
    if ratio is None or ratio <= LARGEST_RELATIVE_STEP:
        yield from _sustained(before, now)
        return
    values = {"step": now.step, "times": f"{ratio:.3g}"}
    if now.learning_rate is None:
        text = Message("alarms.update.large", **values)
    else:
        text = Message("alarms.update.large_at_rate", **values, rate=f"{now.learning_rate:.3g}")
    yield Alarm("update", "warn", now.step, text, source, value=ratio, bar=LARGEST_RELATIVE_STEP)


def _sustained(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm if large steps went on until logits are large."""
    window = [*before[1 - SUSTAINED_SAMPLES :], now]
    steps = [sample.relative_step or 0.0 for sample in window]
    if len(window) < SUSTAINED_SAMPLES or min(steps) < SUSTAINED_STEP:
        return
    grown = [found for call in now.calls if (found := _growth(before, call)) is not None]
    if not grown:
        return
    size, first = max(grown)
    values: dict[str, str | int] = {"step": now.step, "before": window[0].step, "least": f"{100 * min(steps):.2g}%"}
    values |= {"first": f"{first:.3g}", "start": before[0].step, "size": f"{size:.3g}"}
    text = Message("alarms.update.sustained", **values)
    if now.learning_rate is not None:
        text = Message("alarms.update.sustained_at_rate", **values, rate=f"{now.learning_rate:.3g}")
    source = Message("alarms.source.update_sustained")
    yield Alarm("update", "warn", now.step, text, source, value=min(steps), bar=SUSTAINED_STEP)


def _growth(before: Sequence[StepSample], call: CallSample) -> tuple[float, float] | None:
    """Return the largest logit of an attention, now and at first, if it has grown large; None if it has not."""
    start = first_of(before, call)
    if start is None:
        return None
    size, first = (largest_of_column(one, "max_logit")[0] for one in (call, start))
    # a scale that is too large makes large logits at any learning rate
    large = size / max(1.0, call.scale_ratio or 1.0) > SUSTAINED_LOGIT
    return (size, first) if large and size >= SUSTAINED_GROWTH * first else None


def _drifted(last: StepSample, now: StepSample) -> tuple[float, float] | None:
    """Return the drift between two samples and the bar that it passed; None if it passed none, or is not known."""
    steps, drift = now.step - last.step - 1, now.drift
    if drift is None or last.relative_step is None or now.relative_step is None or steps < 1:
        return None
    # a step of now is relative to a weight that may have grown by the drift since
    usual = max(last.relative_step, now.relative_step * (1.0 + drift))
    bar = max(LARGEST_DRIFT, MOST_EXPLAINED * steps * usual)
    return (drift, bar) if drift > bar else None
