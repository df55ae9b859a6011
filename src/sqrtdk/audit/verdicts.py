"""The verdict on each call's scale: exact, declared, unexplained (with the name of the mistake), or unmeasured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from sqrtdk.audit.attributes import ScaleAttribute, holders, names_the_scale, scale_attributes
from sqrtdk.audit.configs import module_at
from sqrtdk.audit.declared import Declaration, declared
from sqrtdk.audit.governing import config_at
from sqrtdk.audit.input_gains import gained_by_inputs, without_input_gains
from sqrtdk.audit.layers import layer_of, layer_pattern, ranks, siblings_text, strangers
from sqrtdk.audit.mistakes import NOT_EXCUSED, name_mistake, root_factors
from sqrtdk.audit.norms import cosine_gain, norm_rule, normalised
from sqrtdk.audit.probe import Key, Probe
from sqrtdk.audit.proportional import by_argument
from sqrtdk.audit.records import JudgedCall
from sqrtdk.audit.tolerance import SCALE_TOLERANCE, close, inverse_root, matches
from sqrtdk.tracing.records import AttentionCall, Factor

Follows = Callable[[ScaleAttribute], bool | None]  # whether the call's scale changes with it; None: not known
ROUNDS = 3  # runs that ask which attribute a call follows: a module that has more which hold one value is not met


def _learned(call: AttentionCall) -> Factor | None:
    return next((factor for factor in call.scale.factors if factor.learned), None)


def _fixed_mistake(call: AttentionCall) -> str | None:
    """A mistake in the fixed factors that stand beside a learned gain.

    Two that no gain is meant to undo; and, where the gain is 1 and so explains nothing, every one that nobody intends.
    """
    fixed, idle = 1.0, True
    for factor in call.scale.factors:
        if factor.learned:
            idle = idle and factor.value is not None and matches(factor.per_head or (factor.value,), (1.0,))
        elif factor.value is None:
            return None
        else:
            fixed *= factor.value
            idle = idle and factor.per_head is None
    if root_factors(call) >= 2 and close(fixed, inverse_root(call.head_dim) ** 2):
        return "twice"
    if normalised(call) != "l2" and call.head_dim > 1 and close(fixed, call.head_dim**0.5):
        return "inverted"
    named = name_mistake(call, fixed)[0] if idle else None
    return named if named in ("model_dim", "head_count", "padded_head") else None


def _agrees(effective: tuple[float, ...], declaration: Declaration) -> bool:
    if not declaration.values:
        return True
    if declaration.interval:
        low = min(declaration.values) * (1 - SCALE_TOLERANCE)
        high = max(declaration.values) * (1 + SCALE_TOLERANCE)
        return all(low <= value <= high for value in effective)
    return any(matches(effective, (value,)) for value in declaration.values)


def _unmeasured(call: AttentionCall) -> str | None:
    scale = call.scale
    if call.head_dim < 1:
        told = scale.reason if call.unknown or call.score == "additive" else None
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
        Verdict `exact` (ratio 1 within 1%), `declared`, `unexplained` with a mistake, or `unmeasured` with the reason.
    """
    problem = _unmeasured(call)
    if call.head_dim < 1:
        return JudgedCall(call, "unmeasured", reason=problem)
    if gained_by_inputs(call):
        rest = without_input_gains(call)
        if rest is not None:
            return _beside_input_gains(call, judge(rest, module, config, layer, layered=layered, follows=follows))
        lost = "what stands beside a factor computed from the data could not be read"
        return JudgedCall(
            call, "unmeasured", reason=f"{lost}: {problem or call.scale.reason or ', '.join(call.unknown)}"
        )
    declaration = declared(call, module, config, layer)
    learned = _learned(call)
    textbook = inverse_root(call.head_dim)
    expected = declaration.values[0] if declaration and declaration.values else None
    if problem is not None:
        readable = call.scale.agree is not False and call.scale.numeric is None
        if learned is not None and learned.value is None and readable and _fixed_mistake(call) is None:
            return JudgedCall(call, "declared", declared_by=f"{_name(learned)} (learned)", reason="value not read")
        return JudgedCall(call, "unmeasured", declared_by=None, expected=expected or textbook, reason=problem)
    assert call.scale.effective is not None
    effective = call.scale.per_head or (call.scale.effective,)

    if declaration is not None and declaration.values:
        if _agrees(effective, declaration):
            exact = matches(effective, (textbook,))
            return JudgedCall(call, "exact" if exact else "declared", None, declaration.by, expected)
        if learned is None:
            return _contradiction(call, effective, declaration)
    if matches(effective, (textbook,)):
        return JudgedCall(call, "exact", expected=textbook)
    if learned is not None:
        fault = _fixed_mistake(call)
        if fault is None:
            return JudgedCall(call, "declared", declared_by=f"{_name(learned)} (learned)")
        return JudgedCall(call, "unexplained", fault, None, textbook, f"in the factors beside {_name(learned)}")
    if declaration is not None and not declaration.values:
        return JudgedCall(call, "declared", declared_by=declaration.by)
    attributes = scale_attributes(module, call.heads)
    if rule := norm_rule(call, effective, attributes):
        return JudgedCall(call, "declared", declared_by=rule, expected=effective[0])
    if rule := by_argument(call, module):
        return JudgedCall(call, "declared", declared_by=rule, expected=effective[0])
    judged = _by_attribute(call, effective, attributes, layered if layer else None, follows)
    if judged.mistake == "unknown" and (rule := cosine_gain(call, effective)):
        return JudgedCall(call, "declared", declared_by=rule, expected=effective[0])
    return judged


def _beside_input_gains(call: AttentionCall, fixed: JudgedCall) -> JudgedCall:
    """The verdict where a factor is of the data: no mistake is named on it, only on what stands beside it."""
    if fixed.verdict in ("exact", "declared"):
        by = f"a factor computed from the data, beside {fixed.declared_by or '1/sqrt(head_dim)'}"
        return JudgedCall(call, "declared", declared_by=by)
    reason = "; ".join(filter(None, (fixed.reason, "in the factors beside one that is computed from the data")))
    return replace(fixed, call=call, reason=reason, attribute=None)


def _name(factor: Factor) -> str:
    return factor.source if factor.source.startswith("parameter") else f"parameter {factor.source}"


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
            call, "unexplained", "unknown", declaration.by, expected, f"{actual}, which is 1/sqrt(head_dim)"
        )
    if not _equal(effective):
        return JudgedCall(call, "unexplained", "unknown", declaration.by, expected, f"{actual}; heads differ")
    mistake, how = name_mistake(call, effective[0], declaration.length)
    return JudgedCall(call, "unexplained", mistake, declaration.by, expected, f"{actual}; {how}" if how else actual)


def _equal(effective: tuple[float, ...]) -> bool:
    return all(close(value, effective[0]) for value in effective)


def _by_attribute(
    call: AttentionCall,
    effective: tuple[float, ...],
    attributes: tuple[ScaleAttribute, ...],
    layered: str | None,
    follows: Follows,
) -> JudgedCall:
    """What an attribute declares, which is little: nothing where the run does not follow it, and no mistake's value."""
    textbook = inverse_root(call.head_dim)
    if min(effective) <= 0:
        reason = "a negative scale gives the weight to the keys least alike"
        if max(effective) <= 0 <= min(effective):
            reason = "at scale 0 the weights know nothing of q and k"
        return JudgedCall(call, "unexplained", "unknown", None, textbook, reason)
    holding = list(holders(attributes, effective, call.head_dim))
    held, text = next((pair for pair in holding if follows(pair[0]) is not False), (None, None))
    idle = None if held or not holding else f"attribute {holding[0][1]} holds that value, but the scale does not follow"
    if not _equal(effective):
        if held is not None:
            return JudgedCall(call, "declared", declared_by=f"attribute {text} (per head)", attribute=text)
        low, high = min(effective), max(effective)
        reason = f"heads differ, from {low:.6g} to {high:.6g}, and nothing declares it"
        return JudgedCall(call, "unexplained", "unknown", None, textbook, reason)
    mistake, how = name_mistake(call, effective[0], layered=layered)
    excused = mistake not in (*NOT_EXCUSED, "layer_index", "missing")
    excused = excused and not (mistake == "twice" and root_factors(call) >= 2)
    if held is not None and mistake == "missing":  # T5's way; alpha and temperature are 1 by default, False is written
        excused = held.flag or (follows(held) is True and names_the_scale(held))
    if held is not None and excused:
        by = f"attribute {text}" if held.flag else f"attribute {text} = {effective[0]:.6g}"
        by += " (learned)" if held.learned else ""
        return JudgedCall(call, "declared", None, by, effective[0], how if mistake == "twice" else None, text)
    if held is not None and mistake in NOT_EXCUSED:
        idle = f"attribute {text} holds the value of {mistake}"
    told = "; ".join(part for part in (idle, how) if part) or None
    return JudgedCall(call, "unexplained", mistake, None, textbook, told, text)


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
