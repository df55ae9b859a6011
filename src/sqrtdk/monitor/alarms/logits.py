"""Alarms on the size of the logits: too large, about to be, or poorly represented in half precision.

- `max_logit`: the largest logit of an attention is above a bar: 50 note, 100 warn, 1e3 fail, 1e4 critical.
- `growth`: the largest logit is about to pass the next of these bars. A line is fitted to the logarithm of the largest
  logit against the step and extended; see `trend` for the line and its interval. The alarm needs the logit to be above
  the previous bar (for the first bar: above half of it, since every logit grows fast during warm-up), and the whole
  interval to end within the span that was sampled. A forecast has the severity of its bar.
- `fp16_range`: the product q . k leaves the range of float16, or comes near, in a run that stores it before the
  softmax. The bars are on the largest |q . k| as stored, including hidden keys and factors already in q and k. Above
  65504, the largest finite float16, it is a fail if the logits are stored in float16, and otherwise a warning, as it
  would be infinite there. A product stored in float16 also raises a warning above 32768, the last binade before
  infinity, and up to four binades below 65504 if its growth passes 65504 within the horizon. A fused kernel stores no
  product.
- `bf16_offset`: rows of stored logits lie far from zero. bfloat16 has 8 significand bits, so its step is 0.25 from 32
  on. The bar on the largest |mean of a row| is 50: a warning if the logits are stored in bfloat16, otherwise a note, as
  they would move if they were.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sqrtdk.audit.rules.numbers import BF16_OFFSET, BF16_SOURCE, FP16_MAX, FP16_SOURCE
from sqrtdk.audit.rules.statistics import MAX_LOGIT_BARS
from sqrtdk.messages import Message
from sqrtdk.monitor.alarms.trend import WINDOW, largest_of_column, passing, same_place
from sqrtdk.monitor.samples import Alarm, CallSample, StepSample
from sqrtdk.theory import spacing


def max_logit_alarms(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield one alarm for each attention whose largest logit is above a bar of `MAX_LOGIT_BARS`, at its worst head.

    Args:
        before: Earlier samples, oldest first; not used.
        now: The newest sample.
    """
    for call in now.calls:
        value, head = largest_of_column(call, "max_logit")
        level = next((level for level in MAX_LOGIT_BARS if value > level[1]), None)
        if level is None:
            continue
        severity, bar, source = level
        size, limit = f"{value:.4g}", f"{bar:g}"
        text = Message("alarms.max_logit.above", call=call.name, head=head, value=size, step=now.step, bar=limit)
        yield Alarm("max_logit", severity, now.step, text, Message(source), call.site, call.index, head, value, bar)


BARS_ASCENDING = MAX_LOGIT_BARS[::-1]  # ascending


def growth(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield one alarm for each attention whose largest logit is about to pass its next bar.

    A line through the logarithms of the last `WINDOW` samples says when it will.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    for call in now.calls:
        value, head = largest_of_column(call, "max_logit")
        place = next((i for i, (_, bar, _) in enumerate(BARS_ASCENDING) if value < bar), None)
        # Below half of the first bar, logits of a healthy start grow too, and no line through them says anything.
        if place is None or value <= (BARS_ASCENDING[place - 1][1] if place else BARS_ASCENDING[0][1] / 2):
            continue
        severity, bar, source = BARS_ASCENDING[place]
        points = [
            (step, largest_of_column(one, "max_logit")[0]) for step, one in same_place(before[1 - WINDOW :], call)
        ]
        points = [(step, size) for step, size in (*points, (now.step, value)) if 0 < size < math.inf]
        found = passing([step for step, _ in points], [math.log(size) for _, size in points], math.log(bar))
        if found is not None:
            size, limit = f"{value:.4g}", f"{bar:g}"
            text = Message(
                "alarms.growth.passes", call=call.name, value=size, step=now.step, bar=limit, when=found.message()
            )
            yield Alarm("growth", severity, now.step, text, Message(source), call.site, call.index, head, value, bar)


# From here on float16 has a spacing of 32, and one more doubling overflows.
LAST_BINADE = 32768.0
# Four doublings below the limit, where a trend is still early enough to act on.
FP16_HEADROOM = FP16_MAX / 16


def fp16_range(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm for each attention whose product q.k exceeds, or is near, the range of float16 (65504).

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    for call in now.calls:
        value, half = _product(call), call.logits_dtype == "float16"
        if not value > (FP16_HEADROOM if half else FP16_MAX) or (value == math.inf and not half):
            continue  # infinite in a wider dtype: the run has numbers that are not finite, and `nonfinite` says so
        severity, bar = "warn", FP16_MAX
        values: dict[str, str | int] = {"call": call.name, "value": f"{value:.4g}", "step": now.step}
        if value > FP16_MAX:
            severity = "fail" if half else "warn"
            would_be = Message("alarms.fp16_range.would_be", **values, dtype=call.logits_dtype)
            text = Message("alarms.fp16_range.infinite", **values) if half else would_be
        elif value >= LAST_BINADE:
            bar = LAST_BINADE
            text = Message("alarms.fp16_range.last_binade", **values)
        else:
            points = [(step, _product(one)) for step, one in same_place(before[1 - WINDOW :], call)]
            points = [(step, size) for step, size in (*points, (now.step, value)) if 0 < size < math.inf]
            found = passing([step for step, _ in points], [math.log(size) for _, size in points], math.log(FP16_MAX))
            if found is None:
                continue
            text = Message("alarms.fp16_range.grows", **values, when=found.message())
        yield Alarm(
            "fp16_range", severity, now.step, text, Message(FP16_SOURCE), call.site, call.index, None, value, bar
        )


def _product(call: CallSample) -> float:
    """Return the largest stored |q . k|, which is infinite if any product is."""
    return max((value for value in call.columns.get("stored_product", ()) if not math.isnan(value)), default=-math.inf)


def bf16_offset(before: Sequence[StepSample], now: StepSample) -> Iterator[Alarm]:
    """Yield an alarm for each attention whose logits have an offset that bfloat16 can't store with precision.

    The offset of a row is the size that all its logits share. The alarm is given at the worst head.

    Args:
        before: Earlier samples of the run, oldest first.
        now: The newest sample.
    """
    for call in now.calls:
        value, head = largest_of_column(call, "row_offset")
        # A fused kernel never rounds its logits to bfloat16: they stay in float32 registers.
        if not call.stored or value <= BF16_OFFSET:
            continue
        half = call.logits_dtype == "bfloat16"
        text = Message(
            "alarms.bf16_offset.stored" if half else "alarms.bf16_offset.not_stored",
            call=call.name,
            head=head,
            value=f"{value:.4g}",
            step=now.step,
            spacing=f"{spacing(value, 'bfloat16'):.3g}",
        )
        severity = "warn" if half else "note"
        yield Alarm(
            "bf16_offset",
            severity,
            now.step,
            text,
            Message(BF16_SOURCE),
            call.site,
            call.index,
            head,
            value,
            BF16_OFFSET,
        )
