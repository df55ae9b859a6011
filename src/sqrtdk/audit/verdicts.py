"""The verdict on each call's scale: exact, declared, unexplained (with the name of the mistake), or unmeasured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sqrtdk.audit.attribute_verdict import Follows, attribute_verdict, heads_agree
from sqrtdk.audit.attributes import ScaleAttribute, holders, scale_attributes
from sqrtdk.audit.channels import channel_rule, unruled
from sqrtdk.audit.configs import module_at
from sqrtdk.audit.declared import Declaration, declared
from sqrtdk.audit.governing import config_at
from sqrtdk.audit.input_gains import gained_by_inputs, gained_by_rows, gains_text, without_input_gains
from sqrtdk.audit.layers import layer_of, layer_pattern, ranks, siblings_text, strangers
from sqrtdk.audit.learned_gain import gain_text, learned_gain, mistake_beside_gain
from sqrtdk.audit.mistakes import UNKNOWN, name_mistake
from sqrtdk.audit.norms import cosine_gain, divided_cosine, norm_rule
from sqrtdk.audit.probe import Key, Probe
from sqrtdk.audit.proportional import by_argument
from sqrtdk.audit.records import JudgedCall
from sqrtdk.audit.tolerance import SCALE_TOLERANCE, close, inverse_root, matches
from sqrtdk.tracing.records import WITHOUT_PRODUCT, AttentionCall

ROUNDS = 3  # runs that ask which attribute a call follows: a module that has more which hold one value is not met


def _agrees(effective: tuple[float, ...], declaration: Declaration) -> bool:
    if declaration.interval:
        low = min(declaration.values) * (1 - SCALE_TOLERANCE)
        high = max(declaration.values) * (1 + SCALE_TOLERANCE)
        return all(low <= value <= high for value in effective)
    return any(matches(effective, (value,)) for value in declaration.values)


def _unmeasured(call: AttentionCall) -> str | None:
    scale = call.scale
    if call.head_dim < 1:
        told = scale.reason if call.unknown or call.score in WITHOUT_PRODUCT else None
        return told or "a head of q has no dimensions: there is no q . k to scale"
    if scale.agree is False:
        return scale.reason or f"the readings disagree: symbolic {scale.symbolic}, numeric {scale.numeric}"
    if scale.effective is None or scale.ratio is None:
        return scale.reason or "the scale could not be read"
    if not (abs(scale.effective) < float("inf")):
        return scale.reason or f"the scale reads as {scale.effective}"
    return None


def judge(
    call: AttentionCall,
    module: nn.Module | None = None,
    config: Any = None,
    layer: int | None = None,
    *,
    layered: str | None = None,
    follows: Follows = lambda attribute: None,
) -> JudgedCall:
    """Judge the scale of one call.

    Args:
        call: the record.
        module: the module at its site; its attributes are weak declarations.
        config: what governs the module, an object or a mapping.
        layer: 0-based layer number, for rules by layer.
        layered: how the scale follows the number of the layer, see `layer_pattern`.
        follows: whether the run's scale changes with an attribute, where that was tried.

    Returns:
        Verdict `exact` (ratio 1 within 1%, and no mere cosine), `declared`, `unexplained` with a mistake, or
        `unmeasured` with the reason.
    """
    problem = _unmeasured(call)
    if call.unlike_blocks and not call.unknown:
        return JudgedCall(call, "unexplained", expected=inverse_root(call.head_dim), reason=problem)
    if call.head_dim < 1:
        return JudgedCall(call, "unmeasured", reason=problem)
    if gained_by_inputs(call):
        rest = without_input_gains(call)
        if rest is not None:
            return _beside_input_gains(call, judge(rest, module, config, layer, layered=layered, follows=follows))
        lost = f"what stands beside {gains_text(call)} could not be read"
        return JudgedCall(
            call, "unmeasured", reason=f"{lost}: {problem or call.scale.reason or ', '.join(call.unknown)}"
        )
    declaration = declared(call, module, config, layer)
    if problem is not None:
        return _unreadable(call, declaration, problem)
    assert call.scale.effective is not None
    effective = call.scale.per_head or (call.scale.effective,)
    judged = _by_declaration(call, effective, declaration) or _by_own_factors(call, effective)
    if judged is not None:
        return judged
    if declaration is not None:  # of a family whose scale is learned: it names no value
        return JudgedCall(call, "declared", declared_by=declaration.by)
    return _by_module(call, effective, module, layered if layer else None, follows)


def _unreadable(call: AttentionCall, declaration: Declaration | None, problem: str) -> JudgedCall:
    """No reading of the scale: a learned gain whose value alone is not known is a rule all the same."""
    learned = learned_gain(call)
    readable = call.scale.agree is not False and call.scale.numeric is None
    if learned is not None and learned.value is None and readable and mistake_beside_gain(call) is None:
        return JudgedCall(call, "declared", declared_by=f"{gain_text(learned)} (learned)", reason="value not read")
    expected = declaration.values[0] if declaration and declaration.values else None
    return JudgedCall(call, "unmeasured", expected=expected or inverse_root(call.head_dim), reason=problem)


def _by_declaration(
    call: AttentionCall, effective: tuple[float, ...], declaration: Declaration | None
) -> JudgedCall | None:
    """Config or family name values: the run has one of them, or none; a learned gain may have left them."""
    if declaration is None or not declaration.values:
        return None
    if _agrees(effective, declaration):
        exact = matches(effective, (inverse_root(call.head_dim),))
        return JudgedCall(call, "exact" if exact else "declared", None, declaration.by, declaration.values[0])
    return _contradiction(call, effective, declaration) if learned_gain(call) is None else None


def _by_own_factors(call: AttentionCall, effective: tuple[float, ...]) -> JudgedCall | None:
    """The textbook's scale, or a learned gain with what stands beside it."""
    textbook, learned = inverse_root(call.head_dim), learned_gain(call)
    if matches(effective, (textbook,)):
        if divided_cosine(call):
            return JudgedCall(call, "unexplained", "cosine", expected=math.sqrt(call.head_dim))
        return JudgedCall(call, "exact", expected=textbook)
    if learned is None:
        return None
    fault = mistake_beside_gain(call)
    if fault is None:
        return JudgedCall(call, "declared", declared_by=f"{gain_text(learned)} (learned)")
    return JudgedCall(call, "unexplained", fault, None, textbook, f"in the factors beside {gain_text(learned)}")


def _by_module(
    call: AttentionCall, effective: tuple[float, ...], module: nn.Module | None, layered: str | None, follows: Follows
) -> JudgedCall:
    """Normalised q and k, proportional attention, an attribute; and a gain on a cosine that nothing else explains."""
    attributes = scale_attributes(module, call.heads)
    rule = norm_rule(call, effective, attributes) or by_argument(call, module) or channel_rule(call, effective)
    if rule is None:
        judged = attribute_verdict(call, effective, attributes, layered, follows)
        rule = cosine_gain(call, effective) if judged.mistake == UNKNOWN else None
        reason = unruled(call, effective) if judged.verdict == "unexplained" else None
        if rule is None:
            return judged if reason is None else JudgedCall(call, "unmeasured", reason=reason)
    return JudgedCall(call, "declared", declared_by=rule, expected=effective[0])


def _beside_input_gains(call: AttentionCall, fixed: JudgedCall) -> JudgedCall:
    """The verdict where a factor is of the data: no mistake is named on it, only on what stands beside it."""
    if fixed.verdict in ("exact", "declared"):
        by = f"{gains_text(call)}, beside {fixed.declared_by or '1/sqrt(head_dim)'}"
        return JudgedCall(call, "declared", declared_by=by)
    if fixed.mistake == "missing" and gained_by_rows(call):
        lost = "a factor for each row may hold the scale: its values are not judged"
        return JudgedCall(call, "unmeasured", expected=fixed.expected, reason=lost)
    beside = f"in the factors beside {gains_text(call)}"
    reason = "; ".join(filter(None, (fixed.reason, beside)))
    return replace(fixed, call=call, reason=reason, attribute=None)


def _contradiction(call: AttentionCall, effective: tuple[float, ...], declaration: Declaration) -> JudgedCall:
    """The run does not apply what was declared: say which part of the declaration was dropped, if one fits."""
    expected = declaration.values[0]
    actual = f"declared {expected:.6g}, the run applied {effective[0]:.6g}"
    if declaration.layer_factor != 1.0 and matches(effective, (expected / declaration.layer_factor,)):
        return JudgedCall(call, "unexplained", "layer_index", declaration.by, expected, f"{actual}: no layer factor")
    if declaration.length not in (0.0, 1.0) and any(
        matches(effective, (value / declaration.length,)) for value in declaration.values
    ):
        reason = f"{actual}: the length factor {declaration.length:.4g} is missing"
        return JudgedCall(call, "unexplained", "length_factor", declaration.by, expected, reason)
    if matches(effective, (inverse_root(call.head_dim),)):
        return JudgedCall(
            call, "unexplained", UNKNOWN, declaration.by, expected, f"{actual}, which is 1/sqrt(head_dim)"
        )
    if not heads_agree(effective):
        return JudgedCall(call, "unexplained", UNKNOWN, declaration.by, expected, f"{actual}; heads differ")
    mistake, how = name_mistake(call, effective[0], declaration.length)
    return JudgedCall(call, "unexplained", mistake, declaration.by, expected, f"{actual}; {how}" if how else actual)


def judge_all(calls: Sequence[AttentionCall], model: nn.Module, probe: Probe | None = None) -> tuple[JudgedCall, ...]:
    """Judge every call of a run; the calls together show patterns over the layers that none shows alone.

    `probe` runs the model once more and tells which calls follow the attributes that hold their scale.
    """
    rank = ranks(calls)
    layers = {site: layer_of(module_at(model, site), place) for site, place in rank.items()}
    pattern = layer_pattern(calls, layers)
    known: dict[tuple[Key, str], bool] = {}

    def verdict(call: AttentionCall) -> JudgedCall:
        return judge(
            call,
            module_at(model, call.site),
            config_at(model, call.site),
            layers[call.site],
            layered=pattern.get(call.site),
            follows=lambda attribute: known.get(((call.site, call.index), attribute.path)),
        )

    judged = [verdict(call) for call in calls]
    for _ in range(ROUNDS if probe else 0):
        asked = _unasked(judged, model, known)
        answers = probe(asked) if probe and asked else {}
        if not answers:
            break
        known.update({(key, asked[key].path): answer for key, answer in answers.items()})
        judged = [verdict(call) for call in calls]
    return tuple(_alone(judged))


def _unasked(
    judged: Sequence[JudgedCall], model: nn.Module, known: Mapping[tuple[Key, str], bool]
) -> dict[Key, ScaleAttribute]:
    """For each call whose verdict leans on an attribute: that attribute, unless the probe knows it already."""
    asked: dict[Key, ScaleAttribute] = {}
    for entry in judged:
        call, key = entry.call, (entry.call.site, entry.call.index)
        if entry.attribute is None or call.scale.effective is None:
            continue
        effective = call.scale.per_head or (call.scale.effective,)
        attributes = scale_attributes(module_at(model, call.site), call.heads)
        held = next((a for a, text in holders(attributes, effective, call.head_dim) if text == entry.attribute), None)
        if held is not None and (key, held.path) not in known:
            asked[key] = held
    return asked


def _alone(judged: Sequence[JudgedCall]) -> list[JudgedCall]:
    """The verdicts, with a scale of 1 that an attribute of one layer alone declares turned into a missing one."""
    told = list(judged)
    for place, siblings in strangers(judged).items():
        entry = judged[place]
        if entry.expected is not None and close(entry.expected, 1.0):
            reason = f"attribute {entry.attribute} differs from its {siblings_text(siblings)}"
            told[place] = JudgedCall(
                entry.call, "unexplained", "missing", None, inverse_root(entry.call.head_dim), reason, entry.attribute
            )
    return told
