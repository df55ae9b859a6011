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
from sqrtdk.audit.mistakes import MISTAKES, UNKNOWN
from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.audit.sources import listed, of_scale
from sqrtdk.audit.tolerance import close, inverse_root
from sqrtdk.audit.verdicts import by_attribute, siblings_text, strangers
from sqrtdk.messages import id_of, mentions
from sqrtdk.tracing.lower.contract import OTHER_AXIS, OVER_QUERIES
from sqrtdk.tracing.lower.weights import OTHER_SUM
from sqrtdk.tracing.records import AttentionCall

SCALE_RULES = ("scale_ledger", "declared_vs_actual")
_TEXTBOOK_SOURCE = "Vaswani et al. 2017, section 3.2.1; tolerance 1% for bf16 constants"
_DECLARED_SOURCE = "the model's own declaration; tolerance 1% for bf16 constants"
_BLOCKS_SOURCE = "Milakov & Gimelshein 2018, arXiv:1805.02867: blocks under one softmax are parts of one product"
_SOFTMAX_SOURCE = "Vaswani et al. 2017, section 3.2.1: the weights on the values of a query are a softmax over the keys"
TRAINED_SO = "if the weights were trained with it, declare softmax_scale ="  # a field that any config may have

_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+|[A-Z]+")  # GroupViTAssign, slot_attention
_MEANT = frozenset((
    "slot", "slots", "slotattention", "cluster", "clusters", "clustering", "grouping", "assign", "assignment",
    "assignments", "capsule", "capsules", "compete", "competing", "competition", "competitive",
))  # fmt: skip
_MEANT_TOGETHER = (  # words that mean something only together: routing also chooses windows of keys
    (frozenset(("memory", "memories")), frozenset(("write", "writes", "writer", "writing"))),
    (frozenset(("dynamic", "agreement")), frozenset(("routing",))),
)
_AXES = {
    OVER_QUERIES: "the softmax runs over the rows, not over the keys: the weights of a row do not sum to 1",
    OTHER_AXIS: "the softmax runs over another axis than the keys, as the heads': the weights of a row do not sum to 1",
}


def on_scales(model: nn.Module, calls: tuple[JudgedCall, ...], mode: str) -> Iterator[Finding]:
    """Yield the findings of both rules on scales, for calls of a graph."""
    context = Context(model, calls, mode, compare="never")
    yield from scale_ledger(context)
    yield from declared_vs_actual(context)


def scale_ledger(context: Context) -> Iterable[Finding]:
    """Report every scale that nothing explains, with the mistake's name, or that only a doubtful attribute declares.

    Formula: r = effective scale * sqrt(head_dim). Threshold: |r - 1| <= 1%, and no declaration (Vaswani et al. 2017,
    section 3.2.1; `audit.tolerance` explains the 1%). An attribute that holds the mistake itself
    (`self.scale = heads ** -0.5`) declares nothing: the finding fails, names it, and says how to declare the value if
    the weights were trained with it. Two cases are warnings: a scale of 1 that the run takes from an attribute (a note
    if a switch like `use_scale` says False), and a layer whose attribute differs from its siblings'.
    """
    different = strangers(context.calls)
    for place, judged in enumerate(context.calls):
        call, mistake, severity = judged.call, None, "fail"
        if call.unlike_blocks:
            continue
        if judged.verdict == "unexplained" and judged.declared_by is None:
            mistake = MISTAKES[judged.mistake or UNKNOWN]
            said = f": {mistake.name}, {mistake.happened}" if mistake.known else f": {mistake.happened}"
            said += f"; {judged.reason}" if judged.reason else ""
            fix = mistake.fix
            if judged.attribute is not None and mistake.excuse == "nothing":
                fix += f"; {TRAINED_SO} {call.scale.effective:.6g} in the config"
        elif place in different:
            said = f", by attribute {judged.attribute}: differs from its {siblings_text(different[place])}"
            severity, fix = "warn", "give this layer the scale of the others, or declare it in the config"
        elif by_attribute(judged) and judged.expected is not None and close(judged.expected, 1.0):
            said, fix = f": nothing but attribute {judged.attribute} says so", MISTAKES["missing"].fix
            severity = "note" if judged.attribute is not None and is_flag(judged.attribute) else "warn"
        elif by_attribute(judged) and judged.reason is not None:
            said = f", by attribute {judged.attribute}: {judged.reason}"
            severity, fix = "note", MISTAKES[UNKNOWN].fix
        else:
            continue
        at = of_scale(call, mistake.name if mistake else None)
        message = f"{_size(call)}{said}"
        yield Finding("scale_ledger", severity, call.site, call.scale.ratio, 1.0, message, fix, _TEXTBOOK_SOURCE, at)


def _size(call: AttentionCall) -> str:
    """Return a text that compares the scale with the textbook's."""
    # A factor of the data is no part of the fixed scale.
    call = without_input_gains(call) or call
    ratio, textbook = call.scale.ratio, inverse_root(call.head_dim)
    if call.scale.effective is not None and call.scale.per_head is None and close(call.scale.effective, textbook):
        return f"scale {call.scale.effective:.6g} = 1/sqrt({call.head_dim})"
    text = f"scale {call.scale.effective:.6g} instead of 1/sqrt({call.head_dim}) = {textbook:.4g}"
    if ratio is None or ratio <= 0:
        return text
    return text + (f", {ratio:.4g} times too large" if ratio > 1 else f", {1 / ratio:.4g} times too small")


def declared_vs_actual(context: Context) -> Iterable[Finding]:
    """Report a scale that config or family declare but the run does not apply.

    Formula: |effective / declared - 1| <= 1%. A real case: the textbook scale on a 27B model with
    query_pre_attn_scalar 144 and head_dim 128 is off by 5.7%.
    """
    for judged in context.calls:
        if judged.verdict == "unexplained" and judged.declared_by is not None:
            call, mistake = judged.call, MISTAKES[judged.mistake or UNKNOWN]
            message = f"{judged.declared_by}, but {judged.reason}" + (f" ({mistake.name})" if mistake.known else "")
            fix, at = mistake.fix_declared or mistake.fix, of_scale(call, judged.mistake)
            values = call.scale.effective, judged.expected
            yield Finding("declared_vs_actual", "fail", call.site, *values, message, fix, _DECLARED_SOURCE, at)


def blocks(context: Context) -> Iterable[Finding]:
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
        message = f"{call.scale.reason}; 1/sqrt({call.head_dim}) is {inverse_root(call.head_dim):.4g}"
        fix = "scale the logits of every block by the same number, best by scaling q once before the loop"
        at = listed(factor.at for factor in factors) or call.product_at
        yield Finding("blocks", severity, call.site, ratio, 1.01, message, fix, _BLOCKS_SOURCE, at)


def softmax_axis(context: Context) -> Iterable[Finding]:
    """Report a softmax over another axis than the keys: the weights of a row do not sum to 1. Threshold: any, fail.

    `softmax(dim=-2)` of q @ k.mT normalises over the rows. `softmax(dim=1)` of (B, H, L, S) normalises over the heads,
    as old calls of `F.softmax` without a dimension did. Slot attention does the former on purpose: its slots compete
    for the inputs, and the weights are then divided by their sum over the inputs (Locatello et al. 2020). Nothing is
    reported if that division was followed, since the weights then sum to 1, or if the module's name says so (slots,
    clusters, a memory that is written to). The rule `unmeasured` reports that its scale was not judged.
    """
    fix = "softmax(dim=-1), over the keys: the last axis of q @ k.mT"
    for call in (judged.call for judged in context.calls):
        if _is_meant(call) or any(mentions(step, OTHER_SUM) for step in call.unknown):
            continue
        faults = {id_of(step) for step in call.unknown}
        message = next((message for fault, message in _AXES.items() if fault in faults), None)
        if message is not None:
            yield Finding("softmax_axis", "fail", call.site, None, None, message, fix, _SOFTMAX_SOURCE, call.softmax_at)


def _is_meant(call: AttentionCall) -> bool:
    """Return whether the words of the module's class or path say that the rows compete for the keys.

    Whole words are compared: `GroupedQueryAttention` groups no tokens, `MemoryEfficientAttention` writes no memory.
    """
    words = {word.lower() for word in _WORD.findall(f"{call.module_class} {call.site}")}
    return bool(words & _MEANT) or any(words & one and words & other for one, other in _MEANT_TOGETHER)
