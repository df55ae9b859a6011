"""A softmax over another axis than the keys: the weights of a row do not sum to 1.

`softmax(dim=-2)` of q @ k.mT normalises over the rows, `softmax(dim=1)` of (B, H, L, S) over the heads, as old calls of
`F.softmax` without a dimension did. Threshold: any, fail. Slot attention means it: its slots compete for the inputs,
and the weights are then divided by their sum over the inputs (Locatello et al. 2020). Where that division was followed
the weights do sum to 1, and where the module is named for what it does (slots, clusters, a memory that is written to)
nothing is said here: that its scale was not judged is `unmeasured`'s. Names are compared by whole words:
`GroupedQueryAttention` groups no tokens, and `MemoryEfficientAttention` writes to no memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from sqrtdk.audit.context import Context
from sqrtdk.audit.records import Finding
from sqrtdk.tracing.classify.contract import OTHER_AXIS, QUERIES
from sqrtdk.tracing.records import AttentionCall

SOURCE = "Vaswani et al. 2017, section 3.2.1: the weights on the values of a query are a softmax over the keys"
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")  # GroupViTAssign, slot_attention
_MEANT = frozenset((
    "slot", "slots", "slotattention", "cluster", "clusters", "clustering", "grouping", "assign", "assignment",
    "assignments", "capsule", "capsules", "compete", "competing", "competition", "competitive",
))  # fmt: skip
_MEANT_TOGETHER = (  # words of which each alone says nothing: routing chooses windows of keys as well
    (frozenset(("memory", "memories")), frozenset(("write", "writes", "writer", "writing"))),
    (frozenset(("dynamic", "agreement")), frozenset(("routing",))),
)
_MESSAGES = {
    QUERIES: "the softmax runs over the rows, not over the keys: the weights of a row do not sum to 1",
    OTHER_AXIS: "the softmax runs over another axis than the keys, as the heads': the weights of a row do not sum to 1",
}
_FIX = "softmax(dim=-1), over the keys: the last axis of q @ k.mT"


def _wrong_axis(call: AttentionCall) -> str | None:
    """What is said of a call whose softmax runs over another axis than its keys, and is not meant to; else None."""
    if _is_meant(call) or any("sum over the queries" in step for step in call.unknown):
        return None
    return next((message for fault, message in _MESSAGES.items() if fault in call.unknown), None)


def _is_meant(call: AttentionCall) -> bool:
    """Whether the words of the module's class or path say that the rows compete for the keys."""
    words = {word.lower() for word in _WORD.findall(f"{call.module_class} {call.site}")}
    return bool(words & _MEANT) or any(words & one and words & other for one, other in _MEANT_TOGETHER)


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call whose softmax runs over another axis than its keys."""
    for judged in context.calls:
        call = judged.call
        message = _wrong_axis(call)
        if message is not None:
            yield Finding("softmax_axis", "fail", call.site, None, None, message, _FIX, SOURCE, call.softmax_at)
