"""A scale that config or family declare and the run does not apply.

Formula: |effective / declared - 1| <= 1%. Threshold and its reason: `audit.tolerance`. A real case: the textbook scale
on a 27B model with query_pre_attn_scalar 144 and head_dim 128 is off by 5.7%.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.mistakes import MISTAKES, UNKNOWN
from sqrtdk.audit.places import of_scale
from sqrtdk.audit.records import Finding

SOURCE = "the model's own declaration; tolerance 1% for bf16 constants"


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call that contradicts its declaration."""
    for judged in context.calls:
        if judged.verdict != "unexplained" or judged.declared_by is None:
            continue
        mistake = MISTAKES[judged.mistake or UNKNOWN]
        named = f" ({mistake.name})" if mistake.known else ""
        yield Finding(
            rule="declared_vs_actual",
            severity="fail",
            site=judged.call.site,
            value=judged.call.scale.effective,
            threshold=judged.expected,
            message=f"{judged.declared_by}, but {judged.reason}{named}",
            fix=mistake.fix_declared or mistake.fix,
            source=SOURCE,
            at=of_scale(judged.call, judged.mistake),
        )
