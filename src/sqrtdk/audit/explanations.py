"""Why a scale is what it is: all explanations of a ratio in one ordered table. The first that applies is the verdict.

The order of `EXPLANATIONS`, and why:

1. Calls without a scale, or with one that can't be read, come first, so that no later row looks at a missing number.
   A factor that is computed from the data is taken out, and the whole table judges the remaining factors.
2. Config and family come before the textbook: a model that declares `query_pre_attn_scalar = 144` and runs
   `1/sqrt(128)` contradicts itself, though the textbook would call it exact. Beside a learned gain the declaration is
   not contradicted, because training may have moved the gain away from the declared value.
3. The textbook comes before a learned gain, which may be 1. A cosine has another textbook: `q.k / |q||k| / sqrt(d)` is
   at most `1/sqrt(d)`, and the softmax nearly uniform.
4. Rules of the computation (normalised q and k, a length, channels, recurrent states) come next. In a family of
   transformers they explain a user's own attention only: in the family's own attention the family's rule holds, and
   Qwen3 with `scaling = 1.0` has lost its scale, though its q and k are normalised.
5. A mistake comes last: it is named only if nothing else explains the number. A number that the module holds declares
   nothing, since `self.scale = heads ** -0.5` is the mistake itself; only a parameter is a rule, as it was trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from sqrtdk.audit.attributes import holders, is_flag, scale_attributes
from sqrtdk.audit.configs import is_transformers, model_type
from sqrtdk.audit.declared import Declaration, declared_scale
from sqrtdk.audit.families import by_default_rule
from sqrtdk.audit.gains import (
    ComputedRule,
    cosine_gain,
    divided_cosine,
    gain_text,
    gained_by_inputs,
    gained_by_rows,
    learned_gain,
    mistake_beside_gain,
    norm_rule,
    of_recurrent_states,
    without_input_gains,
)
from sqrtdk.audit.mistakes import UNKNOWN_MISTAKE, name_mistake
from sqrtdk.audit.proportional import NO_ARGUMENTS, Arguments, by_scale
from sqrtdk.audit.records import UNMEASURED, DeclaredAs, JudgedCall
from sqrtdk.audit.tolerance import SCALE_TOLERANCE, are_close, heads_agree, inverse_root, scales_of
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.records import WITHOUT_PRODUCT, AttentionCall


@dataclass(frozen=True, slots=True)
class Evidence:
    """The facts about one call: the arguments of `judge_scale`, and what follows from them."""

    call: AttentionCall
    module: nn.Module | None
    config: Any
    layer: int | None
    layered: str | None  # None for the first layer, whose factor 1/(layer + 1) is 1
    arguments: Arguments
    declaration: Declaration | None  # of config, family or arguments
    problem: str | None  # why the scale can't be read

    @property
    def effective(self) -> tuple[float, ...]:
        """The scale that ran: one value for all heads, or one for each head; empty if it was not read."""
        return scales_of(self.call)

    @property
    def textbook(self) -> float:
        """1/sqrt(head_dim)."""
        return inverse_root(self.call.head_dim)

    @property
    def runs_textbook(self) -> bool:
        """Whether the scale that ran is 1/sqrt(head_dim)."""
        return are_close(self.effective, (self.textbook,))

    @property
    def of_family(self) -> bool:
        """Whether the call belongs to a family of transformers, whose rule is known."""
        return is_transformers(self.config) and bool(model_type(self.config))

    @property
    def declared_as(self) -> DeclaredAs | None:
        """The kind of the declaration: "family" if the model's family alone declares the scale, else None."""
        return "family" if self.declaration is not None and self.declaration.of_family else None

    @property
    def in_own_attention(self) -> bool:
        """Whether the family's own attention ran, and no module of the user's in its place."""
        return self.of_family and type(self.module).__module__.startswith("transformers.models.")

    def unexplained(self, mistake: str, reason: str | None, attribute: str | None = None) -> JudgedCall:
        """Return the verdict "unexplained" with a mistake (a key of `MISTAKES`); 1/sqrt(head_dim) is expected."""
        return JudgedCall(self.call, "unexplained", mistake, None, self.textbook, reason, attribute)


Explanation = Callable[[Evidence], JudgedCall | None]


def judge_scale(
    call: AttentionCall,
    module: nn.Module | None = None,
    config: Any = None,
    layer: int | None = None,
    *,
    layered: str | None = None,
    arguments: Arguments = NO_ARGUMENTS,
) -> JudgedCall:
    """Judge the scale of one call by the first of `EXPLANATIONS` that applies.

    `module` is the module at the call's site, `config` the config that governs it, and `layer` its 0-based number.
    `layered` says how the scale follows the layer number (`layer_pattern`); `arguments` are those that the module was
    called with.

    Returns:
        Verdict `exact` (ratio 1 within 1%, and not of a cosine), `declared`, `unexplained` with a mistake, or
        `unmeasured` with the reason.
    """
    declaration = declared_scale(call, module, config, layer, arguments)
    layered = layered if layer else None
    evidence = Evidence(call, module, config, layer, layered, arguments, declaration, _unreadable(call))
    return next(judged for explain in EXPLANATIONS.values() if (judged := explain(evidence)) is not None)


def _unreadable(call: AttentionCall) -> str | None:
    """Return why the scale of a call can't be read, or None."""
    scale = call.scale
    if call.head_dim < 1:
        reason = scale.reason if call.unknown or call.score in WITHOUT_PRODUCT else None
        return reason or Message("rules.verdict.no_dimensions")
    if scale.agree is False:
        readings = {"symbolic": str(scale.symbolic), "numeric": str(scale.numeric)}
        return scale.reason or Message("rules.verdict.readings_disagree", **readings)
    if scale.effective is None or scale.ratio is None:
        return scale.reason or Message("rules.verdict.not_read")
    if not (abs(scale.effective) < float("inf")):  # NaN as well
        return scale.reason or Message("rules.verdict.not_finite", scale=str(scale.effective))
    return None


def _unlike_blocks(e: Evidence) -> JudgedCall | None:
    if not e.call.unlike_blocks or e.call.unknown:
        return None
    return JudgedCall(e.call, "unexplained", expected=e.textbook, reason=e.problem)


def _data_factor(e: Evidence) -> JudgedCall | None:
    """Judge the factors beside one computed from the data; no mistake is named on that factor itself."""
    call = e.call
    if not gained_by_inputs(call):
        return None
    gains = Message("sources.declared.factor_of_rows" if gained_by_rows(call) else "sources.declared.factor_of_data")
    rest = without_input_gains(call)
    if rest is None:
        why = e.problem or call.scale.reason or joined(call.unknown, "comma")
        return JudgedCall(call, UNMEASURED, reason=Message("rules.verdict.beside_not_read", gains=gains, why=why))
    fixed = judge_scale(rest, e.module, e.config, e.layer, layered=e.layered, arguments=e.arguments)
    if fixed.verdict in ("exact", "declared"):
        others = fixed.declared_by or "1/sqrt(head_dim)"
        return JudgedCall(call, "declared", declared_by=Message("sources.declared.beside", gains=gains, rest=others))
    if fixed.mistake == "missing" and gained_by_rows(call):
        hidden = Message("rules.verdict.rows_may_hold_it")
        return JudgedCall(call, UNMEASURED, expected=fixed.expected, reason=hidden)
    reasons = [*filter(None, [fixed.reason]), Message("rules.verdict.beside", gains=gains)]
    return replace(fixed, call=call, reason=joined(reasons), attribute=None)


def _learned_gain_without_value(e: Evidence) -> JudgedCall | None:
    """Accept a learned gain as the rule even if its value is unknown, as on the meta device."""
    gain, scale = learned_gain(e.call), e.call.scale
    if e.problem is None or gain is None or gain.value is not None:
        return None
    if scale.agree is False or scale.numeric is not None or mistake_beside_gain(e.call) is not None:
        return None
    by, reason = Message("sources.declared.learned", what=gain_text(gain)), Message("rules.verdict.value_not_read")
    return JudgedCall(e.call, "declared", declared_by=by, reason=reason)


def _not_read(e: Evidence) -> JudgedCall | None:
    if e.problem is None:
        return None
    expected = e.declaration.values[0] if e.declaration and e.declaration.values else None
    return JudgedCall(e.call, UNMEASURED, expected=expected or e.textbook, reason=e.problem)


def _as_declared(e: Evidence) -> JudgedCall | None:
    if e.declaration is None or not e.declaration.values:
        return None
    values, effective = e.declaration.values, e.effective
    if e.declaration.interval:
        low, high = min(values) * (1 - SCALE_TOLERANCE), max(values) * (1 + SCALE_TOLERANCE)
        agrees = all(low <= value <= high for value in effective)
    else:
        agrees = any(are_close(effective, (value,)) for value in values)
    if not agrees:
        return None
    verdict = "exact" if e.runs_textbook else "declared"
    return JudgedCall(e.call, verdict, None, e.declaration.by, values[0], declared_as=e.declared_as)


def _against_declaration(e: Evidence) -> JudgedCall | None:
    """Report that the run does not apply the declaration, and name the part that was dropped if one fits."""
    if e.declaration is None or not e.declaration.values or learned_gain(e.call) is not None:
        return None
    effective, values, length = e.effective, e.declaration.values, e.declaration.length
    expected, factor = values[0], e.declaration.layer_factor
    numbers = {"declared": f"{expected:.6g}", "applied": f"{effective[0]:.6g}"}
    mistake = UNKNOWN_MISTAKE
    reason: str = Message("rules.verdict.against_declaration", **numbers)
    if factor != 1.0 and are_close(effective, (expected / factor,)):
        mistake, reason = "layer_index", Message("rules.verdict.no_layer_factor", **numbers)
    elif length not in (0.0, 1.0) and any(are_close(effective, (value / length,)) for value in values):
        mistake = "length_factor"
        reason = Message("rules.verdict.no_length_factor", factor=f"{length:.4g}", **numbers)
    elif e.runs_textbook:
        reason = Message("rules.verdict.textbook_instead", **numbers)
    elif not heads_agree(effective):
        reason = Message("rules.verdict.declared_for_all_heads", **numbers)
    else:
        mistake, evidence = name_mistake(e.call, effective[0], length)
        reason = joined([reason, evidence]) if evidence else reason
    return JudgedCall(e.call, "unexplained", mistake, e.declaration.by, expected, reason, declared_as=e.declared_as)


def _divided_cosine(e: Evidence) -> JudgedCall | None:
    applies = e.runs_textbook and divided_cosine(e.call)
    return JudgedCall(e.call, "unexplained", "cosine", expected=math.sqrt(e.call.head_dim)) if applies else None


def _mistake_beside_gain(e: Evidence) -> JudgedCall | None:
    gain = learned_gain(e.call)
    mistake = None if gain is None else mistake_beside_gain(e.call)
    if gain is None or mistake is None:
        return None
    return e.unexplained(mistake, Message("rules.verdict.beside", gains=gain_text(gain)))


def _learned_gain(e: Evidence) -> JudgedCall | None:
    gain = learned_gain(e.call)
    if gain is None:
        return None
    return JudgedCall(e.call, "declared", declared_by=Message("sources.declared.learned", what=gain_text(gain)))


def _learned_family(e: Evidence) -> JudgedCall | None:
    """Accept a family whose scale is learned. It has no values; a declaration with values was settled above."""
    if e.declaration is None:
        return None
    return JudgedCall(e.call, "declared", declared_by=e.declaration.by, declared_as=e.declared_as)


def _by_rule(rule: Callable[[Evidence], ComputedRule | None]) -> Explanation:
    """Return the explanation that accepts what a rule admits.

    A family's own attention has the family's rule and no other.
    """

    def explain(e: Evidence) -> JudgedCall | None:
        if e.in_own_attention or (admitted := rule(e)) is None:
            return None
        return JudgedCall(e.call, "declared", None, admitted.by, e.effective[0], declared_as=admitted.kind)

    return explain


def _normalised(e: Evidence) -> ComputedRule | None:
    return norm_rule(e.call, e.effective, scale_attributes(e.module, e.call.heads))


def _proportional(e: Evidence) -> ComputedRule | None:
    by = by_scale(e.call, e.module, e.arguments)
    return None if by is None else ComputedRule(by)


def _channels(e: Evidence) -> ComputedRule | None:
    """Attention over channels: rows and keys are features of q and k, and the product sums over positions.

    No scale is the textbook there. XCiT (El-Nouby et al. 2021, arXiv:2106.09681) and Restormer (Zamir et al. 2022,
    arXiv:2111.09881) multiply cosines by a learned temperature, which other rows explain.
    """
    if e.call.axis != "channels":
        return None
    rules = {
        1.0: "sources.declared.channels_unscaled",
        # DANet's softmax(max(energy) - energy): the row's maximum minus the product
        -1.0: "sources.declared.channels_unscaled",
        inverse_root(e.call.query_len): "sources.declared.channels_root",
        1.0 / e.call.head_dim: "sources.declared.channels_mean",
    }
    return next(
        (ComputedRule(Message(rule)) for value, rule in rules.items() if are_close(e.effective, (value,))), None
    )


def _recurrent(e: Evidence) -> ComputedRule | None:
    """Luong's dot and general score: the states of a recurrence are bounded, and their product is not scaled."""
    applies = e.call.heads == 1 and are_close(e.effective, (1.0,)) and of_recurrent_states(e.call)
    return ComputedRule(Message("sources.declared.recurrent"), "recurrent") if applies else None


def _held(e: Evidence) -> tuple[str | None, bool]:
    """Return the module's attribute that has the value of the scale, as text, and whether it is a parameter."""
    holding = holders(scale_attributes(e.module, e.call.heads), e.effective, e.call.head_dim)
    held, text = next(holding, (None, None))
    return text, held is not None and held.learned


def _by_mistake(e: Evidence) -> tuple[str, str | None]:
    """Return the mistake that gives the scale, and how it was distinguished from its look-alikes."""
    return name_mistake(e.call, e.effective[0], layered=e.layered)


def _learned_attribute(e: Evidence) -> JudgedCall | None:
    """Accept a parameter of the module that has the value of the scale, unless the value is a mistake's."""
    text, learned = _held(e)
    if not learned or text is None or min(e.effective) <= 0:
        return None
    if heads_agree(e.effective) and _by_mistake(e)[0] != UNKNOWN_MISTAKE:
        return None
    by = Message("sources.declared.attribute_value", name=text, value=f"{e.effective[0]:.6g}")
    if not heads_agree(e.effective):
        by = Message("sources.declared.attribute_per_head", name=text)
    by = Message("sources.declared.learned", what=by)
    return JudgedCall(e.call, "declared", None, by, e.effective[0], None, text)


def _cosine_with_gain(e: Evidence) -> ComputedRule | None:
    mistake = _by_mistake(e)[0] if heads_agree(e.effective) else UNKNOWN_MISTAKE
    return cosine_gain(e.call, e.effective) if mistake == UNKNOWN_MISTAKE else None


def _channels_without_rule(e: Evidence) -> JudgedCall | None:
    if e.call.axis != "channels":
        return None
    reason = Message("rules.verdict.channels", scale=f"{e.effective[0]:.4g}")
    return JudgedCall(e.call, UNMEASURED, reason=reason)


def _not_positive(e: Evidence) -> JudgedCall | None:
    low, high = min(e.effective), max(e.effective)
    if low > 0:
        return None
    if high <= 0 <= low:
        return e.unexplained(UNKNOWN_MISTAKE, Message("rules.verdict.zero"))
    return e.unexplained(UNKNOWN_MISTAKE, Message("rules.verdict.negative"))


def _mistake(e: Evidence) -> JudgedCall:
    """Name the mistake; in a family of transformers the number contradicts the family's rule."""
    agree = heads_agree(e.effective)
    mistake, how = _by_mistake(e) if agree else (UNKNOWN_MISTAKE, _heads(e))
    text = _held(e)[0] if agree else None
    holds = None
    if text is not None and not is_flag(text):
        holds = Message("rules.verdict.attribute_holds", attribute=text)
    by = by_default_rule(model_type(e.config)) if e.of_family else None
    numbers = {"declared": f"{e.textbook:.6g}", "applied": f"{e.effective[0]:.6g}"}
    against = Message("rules.verdict.against_declaration", **numbers) if by else None
    reasons = [*filter(None, (against, holds, how))]
    judged = JudgedCall(e.call, "unexplained", mistake, by, e.textbook, joined(reasons) if reasons else None, text)
    return judged if by is None else replace(judged, declared_as="family")


def _heads(e: Evidence) -> str:
    low, high = f"{min(e.effective):.6g}", f"{max(e.effective):.6g}"
    return Message("rules.verdict.heads_differ", low=low, high=high)


EXPLANATIONS: dict[str, Explanation] = {
    # no scale to explain, or one that can't be read
    "unlike_blocks": _unlike_blocks,  # unexplained
    "no_dimensions": lambda e: JudgedCall(e.call, UNMEASURED, reason=e.problem) if e.call.head_dim < 1 else None,
    "factor_of_the_data": _data_factor,  # the verdict of the other factors
    "learned_gain_without_a_value": _learned_gain_without_value,  # declared
    "not_read": _not_read,  # unmeasured
    # config and family
    "as_declared": _as_declared,  # exact or declared
    "against_the_declaration": _against_declaration,  # unexplained
    # the textbook, and learned gains
    "divided_cosine": _divided_cosine,  # unexplained
    "textbook": lambda e: JudgedCall(e.call, "exact", expected=e.textbook) if e.runs_textbook else None,
    "mistake_beside_a_gain": _mistake_beside_gain,  # unexplained
    "learned_gain": _learned_gain,  # declared
    "learned_family": _learned_family,  # declared
    # rules of the computation, and parameters of the module
    "normalised_q_and_k": _by_rule(_normalised),  # declared
    "proportional": _by_rule(_proportional),  # declared
    "channels": _by_rule(_channels),  # declared
    "recurrent_states": _by_rule(_recurrent),  # declared
    "learned_attribute": _learned_attribute,  # declared
    # what nothing declares
    "cosine_with_a_gain": _by_rule(_cosine_with_gain),  # declared
    "channels_without_a_rule": _channels_without_rule,  # unmeasured
    "not_positive": _not_positive,  # unexplained
    "mistake": _mistake,  # unexplained
}
