"""The rules of an audit in one literal table; each is a function from the context to findings."""

from __future__ import annotations

from sqrtdk.audit.context import Rule
from sqrtdk.audit.rules import eager_vs_sdpa, masks, numbers, scales, statistics, unmeasured, unused, windows

RULES: dict[str, Rule] = {
    "nonfinite": numbers.nonfinite,
    "scale_ledger": scales.scale_ledger,
    "blocks": scales.unlike_blocks,
    "declared_vs_actual": scales.declared_vs_actual,
    "softmax_axis": scales.softmax_axis,
    "unmeasured": unmeasured.unmeasured,
    "mask_audit": masks.mask_audit,
    "sliding_window": windows.sliding_window,
    "padding": masks.padding,
    "unused": unused.unused,
    "dropout": unused.dropout,
    "max_logit": statistics.max_logit,
    "range_forecast": numbers.logits_out_of_range,
    "saturation": statistics.saturation,
    "entropy": statistics.entropy,
    "flat": statistics.flat,
    "responsiveness": unused.responsiveness,
    "eager_vs_sdpa": eager_vs_sdpa.compare_eager_sdpa,
}
