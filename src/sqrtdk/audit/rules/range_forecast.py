"""Logits that do not fit the range or the spacing of the half-precision types.

fp16: the unscaled product max|q . k| = max|logit| / scale, where the scale comes after the product and the product is
stored; threshold 65504, the largest finite fp16. A fused kernel accumulates in fp32 and is not concerned.
bf16: a row's offset x (|mean logit|) with spacing 2^(floor(log2 x) - 7); threshold 50, where neighbouring logits are
0.25 apart. Softmax is blind to the offset, the stored logits are not. In another dtype both are forecasts, and so is
the second of a fused kernel, which stores none: there it is named where a large logit would be seen without its reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding, JudgedCall

FP16_MAX = 65504.0
FP16_SOURCE = "IEEE 754 binary16: largest finite value 65504"
BF16_OFFSET = 50.0
BF16_SOURCE = "bfloat16 has 8 significand bits: from 32 on neighbours are 0.25 apart, from 64 on 0.5"


def _product(judged: JudgedCall) -> float | None:
    """The largest unscaled product that was stored before a scale shrank it, or None."""
    call = judged.call
    after = 1.0
    for factor in call.scale.factors:
        if factor.where == "logits" and factor.value:
            after *= factor.value
    if call.stats is None or call.kind != "eager" or after >= 1.0 or after <= 0.0 or call.softcap is not None:
        return None
    finite = [value for value in call.stats.max_abs_logit if math.isfinite(value)]
    return max(finite) / after if finite else None


def _offset(judged: JudgedCall) -> float | None:
    """The largest row offset of logits that were stored, or that alone makes the largest logit look large; or None."""
    stats = judged.call.stats
    if stats is None or (judged.call.kind != "eager" and not any(value > BF16_OFFSET for value in stats.max_logit)):
        return None
    return max((value for value in stats.row_offset if math.isfinite(value)), default=None)


def _above(
    calls: Iterable[JudgedCall], measure: Callable[[JudgedCall], float | None], bar: float
) -> list[tuple[float, JudgedCall]]:
    """The calls whose measure is above the bar, the largest first."""
    measured = [(value, judged) for judged in calls if (value := measure(judged)) is not None and value > bar]
    return sorted(measured, key=lambda entry: -entry[0])


def spacing(value: float) -> float:
    """Distance between neighbouring bf16 numbers at `value`.

    >>> spacing(50.0), spacing(100.0)
    (0.25, 0.5)
    """
    return float(2.0 ** (math.floor(math.log2(abs(value))) - 7))


def check(context: Context) -> Iterable[Finding]:
    """At most one fp16 and one bf16 finding for each call; the largest value first."""
    for value, judged in _above(context.calls, _product, FP16_MAX):
        yield Finding(
            rule="range_forecast",
            severity="fail" if judged.call.logits_dtype == "float16" else "warn",
            site=judged.call.site,
            value=value,
            threshold=FP16_MAX,
            message=f"q . k reaches {value:.4g} before the scale: infinite in fp16{context.which(judged)}",
            fix="scale q before the product, or use a fused kernel, which accumulates in fp32",
            source=FP16_SOURCE,
        )
    for value, judged in _above(context.calls, _offset, BF16_OFFSET):
        now = judged.call.logits_dtype == "bfloat16" and judged.call.kind == "eager"
        stored = "stored in bf16, it moves" if now else "stored in bf16, it would move"
        yield Finding(
            rule="range_forecast",
            severity="warn" if now else "note",
            site=judged.call.site,
            value=value,
            threshold=BF16_OFFSET,
            message=f"a row of logits lies about {value:.4g} off zero: {stored} in steps of {spacing(value):.3g}"
            + context.which(judged),
            fix="keep the logits in fp32, or centre the keys (the softmax does not see a row's offset)",
            source=BF16_SOURCE,
        )
