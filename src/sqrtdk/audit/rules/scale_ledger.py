"""Every scale that nothing explains, with the name of the mistake.

Formula: r = effective scale * sqrt(head_dim). Threshold: |r - 1| <= 1%, and no declaration (Vaswani et al. 2017,
section 3.2.1; the 1% is `audit.tolerance`). An attribute that holds the mistake itself lowers a failure to a warning:
somebody wrote that value, but it is the signature of an error. Contradicted declarations are `declared_vs_actual`'s.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.mistakes import MISTAKES
from sqrtdk.audit.records import Finding
from sqrtdk.audit.tolerance import inverse_root
from sqrtdk.audit.verdicts import held_by_attribute
from sqrtdk.trace.records import AttentionCall

SOURCE = "Vaswani et al. 2017, section 3.2.1; tolerance 1% for bf16 constants"


def _size(call: AttentionCall) -> str:
    """The scale beside the textbook's, as a person would put it."""
    ratio = call.scale.ratio
    text = f"scale {call.scale.effective:.6g} instead of 1/sqrt({call.head_dim}) = {inverse_root(call.head_dim):.4g}"
    if ratio is None or ratio <= 0:
        return text
    return text + (f", {ratio:.4g} times too large" if ratio > 1 else f", {1 / ratio:.4g} times too small")


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call whose scale is unexplained."""
    for judged in context.calls:
        if judged.verdict != "unexplained" or judged.declared_by is not None:
            continue
        call, name = judged.call, judged.mistake or "unknown"
        mistake = MISTAKES[name]
        attribute = held_by_attribute(judged, context.model)
        named = f"{name}, {mistake.happened}" if name != "unknown" else mistake.happened
        message = f"{_size(call)}: {named}" + (f"; {judged.reason}" if judged.reason else "")
        message += f"; attribute {attribute} holds that value" if attribute and attribute not in message else ""
        yield Finding(
            rule="scale_ledger",
            severity="warn" if attribute else "fail",
            site=call.site,
            value=call.scale.ratio,
            threshold=1.0,
            message=message,
            fix=mistake.fix,
            source=SOURCE,
        )
