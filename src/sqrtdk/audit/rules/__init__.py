"""The rules of an audit: one check a file, each a pure function of the context, all of them in one literal table."""

from __future__ import annotations

from sqrtdk.audit.context import Rule
from sqrtdk.audit.rules import (
    blocks,
    declared_vs_actual,
    dropout,
    eager_vs_sdpa,
    entropy,
    flat,
    mask_audit,
    max_logit,
    nonfinite,
    padding,
    range_forecast,
    responsiveness,
    saturation,
    scale_ledger,
    sliding_window,
    softmax_axis,
    unmeasured,
    unused,
)

RULES: dict[str, Rule] = {
    "nonfinite": nonfinite.check,
    "scale_ledger": scale_ledger.check,
    "blocks": blocks.check,
    "declared_vs_actual": declared_vs_actual.check,
    "softmax_axis": softmax_axis.check,
    "unmeasured": unmeasured.check,
    "mask_audit": mask_audit.check,
    "sliding_window": sliding_window.check,
    "padding": padding.check,
    "unused": unused.check,
    "dropout": dropout.check,
    "max_logit": max_logit.check,
    "range_forecast": range_forecast.check,
    "saturation": saturation.check,
    "entropy": entropy.check,
    "flat": flat.check,
    "responsiveness": responsiveness.check,
    "eager_vs_sdpa": eager_vs_sdpa.check,
}
