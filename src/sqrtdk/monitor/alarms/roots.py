"""Alarms from which others follow: a layer that was made unlike its neighbours, an update that is too large.

- `layer_logits`: at the first sample, the logits of an attention deviate over 100 times as much within a row as those
  of the attentions before and after it; a warning. Layers are initialised alike, so such a layer is a slip: weights
  drawn with a deviation of 0.5 in place of 0.02, which q and k multiply to 625, or a norm that one layer lacks. Trained
  layers differ by a factor of ten. A neighbour whose logits are all equal is not a measure.
- `update`: the relative step of such a weight (`monitor.updates`) is above 3, a warning. Then the learning rate is far
  too high, whatever the logits are: at a rate of 10, Adam's first step moves weights of 0.02 by 500 times their size,
  where a rate of 0.001 moves them by a twentieth. Weights that begin at zero are the reason for a bar above 1: in a
  warm-up the second step is twice as large as the first, and moves them by twice their size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from sqrtdk.messages import Message
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample

LARGEST_RATIO = 100.0
LARGEST_RELATIVE_STEP = 3.0


def layer_logits_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm for each attention whose logits deviate far more than those of its neighbours.

    Only the first sample is judged, as such a layer was initialised so.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.

    Example:
        >>> calls = [CallSample(f"h.{i}", 0, 1, {"std_logit": [std]}, 1.0, "") for i, std in enumerate((0.2, 60, 0.3))]
        >>> print(*(alarm.text for alarm in layer_logits_alarm((), StepSample(1, tuple(calls)))))
        the logits of h.1 are 200 times its neighbours' at step 1 (standard deviation within a row: 60)
    """
    if any(sample.calls for sample in before):
        return
    sizes = [(call, size) for call in now.calls if (size := _deviation(call)) > 0]
    for at, (call, size) in enumerate(sizes):
        beside = [other for _, other in (*sizes[max(0, at - 1) : at], *sizes[at + 1 : at + 2])]
        if not beside or size <= LARGEST_RATIO * max(beside):
            continue
        ratio = size / max(beside)
        times = f"{float(f'{ratio:.3g}'):g}"  # 3900, where three digits alone are 3.9e+03
        text = Message("alarms.layer_logits.unlike", call=call.name, value=f"{size:.3g}", step=now.step, times=times)
        source = Message("alarms.source.layers")
        yield Alarm("layer_logits", "warn", now.step, text, source, call.site, call.index, None, ratio, LARGEST_RATIO)


def _deviation(call: CallSample) -> float:
    """Return the median over heads of the logits' deviation within a row; 0 if no head has a finite one."""
    return median([value for value in call.columns.get("std_logit", ()) if math.isfinite(value)] or [0.0])


def update_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm if the optimizer changed a projection by more than `LARGEST_RELATIVE_STEP` of its norm.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    ratio = now.relative_step
    if ratio is None or ratio <= LARGEST_RELATIVE_STEP:
        return
    values: dict[str, str | int] = {"step": now.step, "times": f"{ratio:.3g}"}
    if now.learning_rate is None:
        text = Message("alarms.update.large", **values)
    else:
        text = Message("alarms.update.large_at_rate", **values, rate=f"{now.learning_rate:.3g}")
    source = Message("alarms.source.update")
    yield Alarm("update", "warn", now.step, text, source, value=ratio, bar=LARGEST_RELATIVE_STEP)
