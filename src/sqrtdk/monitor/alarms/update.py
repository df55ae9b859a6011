"""Alarm on the training itself: one step replaces the weights that give q and k.

- `update`: the relative step of such a weight (`monitor.updates`) is above 3, a warning. Then the learning rate is far
  too high, whatever the logits are: at a rate of 10, Adam's first step moves weights of 0.02 by 500 times their size,
  where a rate of 0.001 moves them by a twentieth. Weights that begin at zero are the reason for a bar above 1: in a
  warm-up the second step is twice as large as the first, and moves them by twice their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sqrtdk.messages import Message
from sqrtdk.monitor.samples import Alarm, StepSample

LARGEST_RELATIVE_STEP = 3.0


def update_alarm(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm if the optimizer changed a projection by more than `LARGEST_RELATIVE_STEP` of its norm."""
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
