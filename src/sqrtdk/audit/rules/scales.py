"""Rules on scales that nothing explains, contradict a declaration, or differ between blocks, and on the softmax's axis.

`audit.explanations` says what explains a call's scale; the rules turn its verdict into findings.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from torch import nn

from sqrtdk.audit.attributes import is_flag
from sqrtdk.audit.context import Context
from sqrtdk.audit.gains import without_input_gains
from sqrtdk.audit.mistakes import UNKNOWN_MISTAKE, Mistake, told_of
from sqrtdk.audit.records import Finding, JudgedCall, with_calls_named
from sqrtdk.audit.sources import join_lines, of_scale
from sqrtdk.audit.tolerance import heads_agree, inverse_root, is_close, scales_of
from sqrtdk.audit.verdicts import siblings_text, strangers
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.records import AttentionCall, CallFault

SCALE_RULES = ("scale_ledger", "declared_vs_actual")
_TEXTBOOK_SOURCE = "sources.threshold.textbook"
_DECLARED_SOURCE = "sources.threshold.declaration"
_BLOCKS_SOURCE = "sources.threshold.blocks"
_SOFTMAX_SOURCE = "sources.threshold.softmax"

_NAME_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")  # GroupViTAssign, slot_attention
_MEANT = frozenset((
    "slot", "slots", "slotattention", "cluster", "clusters", "clustering", "grouping", "assign", "assignment",
    "assignments", "capsule", "capsules", "compete", "competing", "competition", "competitive",
))  # fmt: skip
_MEANT_TOGETHER = (  # words that mean something only together: routing also chooses windows of keys
    (frozenset(("memory", "memories")), frozenset(("write", "writes", "writer", "writing"))),
    (frozenset(("dynamic", "agreement")), frozenset(("routing",))),
)
_AXIS_MESSAGES: dict[CallFault, str] = {
    "over_queries": "rules.softmax_axis.rows",
    "other_axis": "rules.softmax_axis.other",
}


def on_scales(model: nn.Module, calls: tuple[JudgedCall, ...], mode: str) -> Iterator[Finding]:
    """Yield the findings of `scale_ledger` and `declared_vs_actual` for the calls of an exported graph.

    Args:
        model: The modules that the graph names.
        calls: Its judged calls.
        mode: "static" or "dynamic".
    """
    context = Context(model, calls, mode, compare="never")
    sites = [judged.site for judged in calls]
    yield from with_calls_named((*scale_ledger(context), *declared_vs_actual(context)), sites)


def scale_ledger(context: Context) -> Iterable[Finding]:
    """Report every scale that nothing declares, with the mistake's name; and layers that follow another rule.

    Formula: r = effective scale * sqrt(head_dim). Threshold: |r - 1| <= 1%, and no declaration (Vaswani et al. 2017,
    section 3.2.1; `audit.tolerance` explains the 1%). A config field, the family's rule or the user declares; a number
    of the module does not, because it is what the code does (`self.scale = heads ** -0.5`). A value that is a mistake's
    fails, and so does a scale of zero or below; another value is odd, which may be meant: warn. A switch of the module
    that says False (`use_scale`) is a warning as well. Each says how to declare the value in one line. A note names an
    unscaled score of recurrent states, which is Luong's.
    """
    different = strangers(context.calls)
    for place, judged in enumerate(context.calls):
        call, mistake, severity = judged.call, None, "fail"
        message: str
        fix: str
        if call.unlike_blocks:
            continue
        if judged.verdict == "unexplained" and judged.declared_by is None:
            mistake = told_of(judged.mistake or UNKNOWN_MISTAKE, [call])
            severity = _severity(judged)
            message, fix = _unexplained(judged, mistake)
        elif place in different:
            siblings = siblings_text(different[place])
            message = Message("rules.scale_ledger.unlike_siblings", size=_size(call), siblings=siblings)
            severity, fix = "warn", Message("rules.scale_ledger.fix_unlike_siblings")
        elif judged.declared_by is not None and judged.declared_as == "recurrent":
            message = Message(
                "rules.scale_ledger.by_rule", scale=f"{call.scale.effective:.6g}", rule=judged.declared_by
            )
            severity, fix = "note", Message("rules.scale_ledger.fix_recurrent")
        else:
            continue
        at, source = of_scale(call, mistake.name if mistake else None), Message(_TEXTBOOK_SOURCE)
        yield Finding("scale_ledger", severity, call.site, call.scale.ratio, 1.0, message, fix, source, at, call.index)


def _severity(judged: JudgedCall) -> str:
    """Return how severe a scale is that nothing declares."""
    if is_flag(judged.attribute or ""):
        return "warn"
    named = judged.mistake not in (None, UNKNOWN_MISTAKE)
    return "fail" if named or min(scales_of(judged.call), default=0.0) <= 0 else "warn"


def _unexplained(judged: JudgedCall, mistake: Mistake) -> tuple[str, str]:
    """Return what is said of a scale that nothing declares, and how to mend or declare it."""
    size, why, attribute = _size(judged.call), mistake.happened, judged.attribute or ""
    if mistake.known:
        why = Message("rules.mistakes.named", mistake=mistake.name, happened=why)
    message: str = Message("rules.scale_ledger.unexplained", size=size, why=why)
    if is_flag(attribute):
        message = Message("rules.scale_ledger.attribute_alone", size=size, attribute=attribute)
    message = joined([message, judged.reason]) if judged.reason else message
    values = scales_of(judged.call)
    if min(values, default=0.0) <= 0 or not heads_agree(values):
        return message, mistake.fix
    return message, joined([mistake.fix, Message("rules.scale_ledger.fix_trained_so", value=f"{values[0]:.6g}")])


def _size(call: AttentionCall) -> str:
    """Return a text that compares the scale with the textbook's."""
    # A factor of the data is no part of the fixed scale.
    call = without_input_gains(call) or call
    ratio, textbook = call.scale.ratio, inverse_root(call.head_dim)
    if call.scale.effective is not None and call.scale.per_head is None and is_close(call.scale.effective, textbook):
        return Message("rules.scale_ledger.textbook", scale=f"{call.scale.effective:.6g}", d=call.head_dim)
    of = {"scale": f"{call.scale.effective:.6g}", "d": str(call.head_dim), "textbook": f"{textbook:.4g}"}
    if ratio is None or ratio <= 0:
        return Message("rules.scale_ledger.other", **of)
    if ratio > 1:
        return Message("rules.scale_ledger.too_large", ratio=f"{ratio:.4g}", **of)
    return Message("rules.scale_ledger.too_small", ratio=f"{1 / ratio:.4g}", **of)


def declared_vs_actual(context: Context) -> Iterable[Finding]:
    """Report a scale that config or family declare but the run does not apply.

    Formula: |effective / declared - 1| <= 1%. A real case: the textbook scale on a 27B model with
    query_pre_attn_scalar 144 and head_dim 128 is off by 5.7%.
    """
    for judged in context.calls:
        if judged.verdict == "unexplained" and judged.declared_by is not None:
            call, mistake = judged.call, told_of(judged.mistake or UNKNOWN_MISTAKE, [judged.call])
            said = {"declaration": judged.declared_by, "why": judged.reason or Message("rules.joined.no_reason")}
            message = Message("rules.declared_vs_actual.broken", **said)
            if mistake.known:
                message = Message("rules.declared_vs_actual.mistake", mistake=mistake.name, **said)
            at, source = of_scale(call, judged.mistake), Message(_DECLARED_SOURCE)
            values = call.scale.effective, judged.expected
            fix: str = mistake.fix_declared
            if judged.declared_as == "family" and (call.scale.effective or 0.0) > 0:
                declare = Message("rules.scale_ledger.fix_trained_so", value=f"{call.scale.effective:.6g}")
                fix = joined([mistake.fix, declare]) if mistake.known else declare
            yield Finding("declared_vs_actual", "fail", call.site, *values, message, fix, source, at, call.index)


def unlike_blocks(context: Context) -> Iterable[Finding]:
    """Report blocks of keys that share one softmax but differ in scale; each block has its own product.

    Formula: the effective scale of each block (`AttentionCall.blocks`). Threshold: any two that differ by more than 1%.
    Keys with a larger scale get weight that their content does not earn: fail. If a learned factor makes the difference
    (memories with a gain of their own), it may be meant: warn.
    """
    for judged in context.calls:
        call = judged.call
        if judged.verdict != "unexplained" or not call.unlike_blocks:
            continue
        values = [abs(block.scale.effective or 0.0) for block in call.blocks]
        factors = [factor for block in call.blocks for factor in block.scale.factors]
        severity = "warn" if any(factor.learned for factor in factors) else "fail"
        ratio = max(values) / min(values) if min(values) else None
        why, textbook = call.scale.reason or Message("rules.joined.no_reason"), f"{inverse_root(call.head_dim):.4g}"
        message = joined([why, Message("rules.blocks.textbook", d=call.head_dim, textbook=textbook)])
        fix, source = Message("rules.blocks.fix"), Message(_BLOCKS_SOURCE)
        at = join_lines(factor.at for factor in factors) or call.product_at
        yield Finding("blocks", severity, call.site, ratio, 1.01, message, fix, source, at, call.index)


def softmax_axis(context: Context) -> Iterable[Finding]:
    """Report a softmax over another axis than the keys: the weights of a row do not sum to 1. Threshold: any, fail.

    `softmax(dim=-2)` of q @ k.mT normalises over the rows. `softmax(dim=1)` of (B, H, L, S) normalises over the heads,
    as old calls of `F.softmax` without a dimension did. Slot attention does the former on purpose: its slots compete
    for the inputs, and the weights are then divided by their sum over the inputs (Locatello et al. 2020). Nothing is
    reported if that division was followed, since the weights then sum to 1, or if the module's name says so (slots,
    clusters, a memory that is written to). The rule `unmeasured` reports that its scale was not judged.
    """
    fix, source = Message("rules.softmax_axis.fix"), Message(_SOFTMAX_SOURCE)
    for call in (judged.call for judged in context.calls):
        if _is_meant(call) or "other_sum" in call.faults:
            continue
        id = next((id for fault, id in _AXIS_MESSAGES.items() if fault in call.faults), None)
        if id is not None:
            at = call.softmax_at
            yield Finding("softmax_axis", "fail", call.site, None, None, Message(id), fix, source, at, call.index)


def _is_meant(call: AttentionCall) -> bool:
    """Return whether the words of the module's class or path say that the rows compete for the keys.

    Whole words are compared: `GroupedQueryAttention` groups no tokens, `MemoryEfficientAttention` writes no memory.
    """
    words = {word.lower() for word in _NAME_WORD.findall(f"{call.module_class} {call.site}")}
    return bool(words & _MEANT) or any(words & one and words & other for one, other in _MEANT_TOGETHER)
