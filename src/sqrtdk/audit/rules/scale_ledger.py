"""Every scale that nothing explains, with the name of the mistake.

Formula: r = effective scale * sqrt(head_dim). Threshold: |r - 1| <= 1%, and no declaration (Vaswani et al. 2017,
section 3.2.1; the 1% is `audit.tolerance`). An attribute that holds the mistake itself (`self.scale = heads ** -0.5`)
declares nothing: the finding fails, names it, and says how to declare the value if the weights were trained so. A
warning are a scale of 1 that the run takes from an attribute (a note where a switch like `use_scale` says False), and a
layer whose attribute declares another scale than its siblings have. Contradicted declarations are
`declared_vs_actual`'s, unlike scales of blocks of keys `blocks`'.
"""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.audit.attributes import is_flag
from sqrtdk.audit.context import Context
from sqrtdk.audit.gains import without_input_gains
from sqrtdk.audit.layers import by_attribute, siblings_text, strangers
from sqrtdk.audit.mistakes import MISTAKES, UNKNOWN
from sqrtdk.audit.places import of_scale
from sqrtdk.audit.records import Finding
from sqrtdk.audit.tolerance import close, inverse_root
from sqrtdk.tracing.records import AttentionCall

SOURCE = "Vaswani et al. 2017, section 3.2.1; tolerance 1% for bf16 constants"
TRAINED_SO = "if the weights were trained with it, declare softmax_scale ="  # a field that every config may have


def _size(call: AttentionCall) -> str:
    """The scale beside the textbook's, as a person would put it."""
    call = without_input_gains(call) or call
    ratio, textbook = call.scale.ratio, inverse_root(call.head_dim)
    if call.scale.effective is not None and call.scale.per_head is None and close(call.scale.effective, textbook):
        return f"scale {call.scale.effective:.6g} = 1/sqrt({call.head_dim})"
    text = f"scale {call.scale.effective:.6g} instead of 1/sqrt({call.head_dim}) = {textbook:.4g}"
    if ratio is None or ratio <= 0:
        return text
    return text + (f", {ratio:.4g} times too large" if ratio > 1 else f", {1 / ratio:.4g} times too small")


def check(context: Context) -> Iterable[Finding]:
    """One finding for each call whose scale is unexplained, or is declared by nothing but a doubtful attribute."""
    different = strangers(context.calls)
    for place, judged in enumerate(context.calls):
        call = judged.call
        if call.unlike_blocks:
            continue
        if judged.verdict == "unexplained" and judged.declared_by is None:
            mistake = MISTAKES[judged.mistake or UNKNOWN]
            named = f"{mistake.name}, {mistake.happened}" if mistake.known else mistake.happened
            message = f"{_size(call)}: {named}" + (f"; {judged.reason}" if judged.reason else "")
            fix = mistake.fix
            if judged.attribute is not None and mistake.excuse == "nothing":
                fix += f"; {TRAINED_SO} {call.scale.effective:.6g} in the config"
            yield _finding(call, "fail", message, fix, mistake.name)
        elif place in different:
            message = (
                f"{_size(call)}, by attribute {judged.attribute}: differs from its {siblings_text(different[place])}"
            )
            yield _finding(
                call, "warn", message, "give this layer the scale of the others, or declare it in the config"
            )
        elif by_attribute(judged) and judged.expected is not None and close(judged.expected, 1.0):
            message = f"{_size(call)}: nothing but attribute {judged.attribute} says so"
            written = judged.attribute is not None and is_flag(judged.attribute)
            yield _finding(call, "note" if written else "warn", message, MISTAKES["missing"].fix)
        elif by_attribute(judged) and judged.reason is not None:
            message = f"{_size(call)}, by attribute {judged.attribute}: {judged.reason}"
            yield _finding(call, "note", message, MISTAKES[UNKNOWN].fix)


def _finding(call: AttentionCall, severity: str, message: str, fix: str, mistake: str | None = None) -> Finding:
    at = of_scale(call, mistake)
    return Finding("scale_ledger", severity, call.site, call.scale.ratio, 1.0, message, fix, SOURCE, at)
