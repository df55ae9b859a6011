"""The verdict on each call's scale: exact, declared, unexplained (with the name of the mistake), or unmeasured."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from sqrtdk.audit.attributes import ScaleAttribute, holding, scale_attributes
from sqrtdk.audit.configs import config_at, field, module_at
from sqrtdk.audit.declared import Declaration, declared
from sqrtdk.audit.mistakes import NOT_EXCUSED, name_mistake, root_factors
from sqrtdk.audit.norms import cosine_gain, norm_rule, normalised
from sqrtdk.audit.records import JudgedCall
from sqrtdk.audit.tolerance import SCALE_TOLERANCE, close, inverse_root, matches
from sqrtdk.trace.records import AttentionCall, Factor


def template(site: str) -> str:
    """The site with its numbers replaced, so that the same place in all layers has one name.

    >>> template("model.layers.11.self_attn")
    'model.layers.#.self_attn'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "#", site)


def layer_of(module: nn.Module | None, rank: int) -> int:
    """0-based layer number: the module's own `layer_idx` (or alike) where it has one, else its rank among its like."""
    for name in ("layer_idx", "layer_id", "layer_index"):
        value = field(module, name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return rank


def ranks(calls: Iterable[AttentionCall]) -> dict[str, int]:
    """For every site its 0-based place among the sites of the same template, in order of running."""
    seen: dict[str, list[str]] = {}
    for call in calls:
        sites = seen.setdefault(template(call.site), [])
        if call.site not in sites:
            sites.append(call.site)
    return {site: rank for sites in seen.values() for rank, site in enumerate(sites)}


def layer_pattern(calls: Sequence[AttentionCall], layers: dict[str, int]) -> frozenset[str]:
    """The sites whose scale ratio follows 1/(layer + 1), or its inverse, over at least two layers of their like."""
    groups: dict[tuple[str, int], dict[str, float]] = {}
    for call in calls:
        if call.scale.ratio is not None and call.scale.ratio > 0:
            groups.setdefault((template(call.site), call.index), {})[call.site] = call.scale.ratio
    found: set[str] = set()
    for sites in groups.values():
        if len({layers[site] for site in sites}) < 2:
            continue
        for power in (1, -1):
            levels = [ratio * (layers[site] + 1) ** power for site, ratio in sites.items()]
            if all(close(level, levels[0]) for level in levels):
                found.update(sites)
    return frozenset(found)


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
    in_pattern: bool = False,
) -> JudgedCall:
    """Judge the scale of one call.

    Args:
        call: the record.
        module: the module at its site; its attributes are weak declarations.
        config: what governs the module, an object or a mapping.
        layer: 0-based layer number, for rules by layer.
        in_pattern: the call's layers follow 1/(layer + 1), see `layer_pattern`.

    Returns:
        Verdict `exact` (ratio 1 within 1%), `declared`, `unexplained` with a mistake, or `unmeasured` with the reason.
    """
    problem = _unmeasured(call)
    if call.head_dim < 1:
        return JudgedCall(call, "unmeasured", reason=problem)
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
            return _contradiction(call, effective, declaration, layer)
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
    judged = _by_attribute(call, effective, attributes, layer if in_pattern else None)
    if judged.mistake == "unknown" and (rule := cosine_gain(call, effective)):
        return JudgedCall(call, "declared", declared_by=rule, expected=effective[0])
    return judged


def _name(factor: Factor) -> str:
    return factor.source if factor.source.startswith("parameter") else f"parameter {factor.source}"


def _contradiction(
    call: AttentionCall, effective: tuple[float, ...], declaration: Declaration, layer: int | None
) -> JudgedCall:
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
    call: AttentionCall, effective: tuple[float, ...], attributes: tuple[ScaleAttribute, ...], layer: int | None
) -> JudgedCall:
    textbook = inverse_root(call.head_dim)
    held = holding(attributes, effective, call.head_dim)
    if not _equal(effective):
        if held is not None:
            return JudgedCall(call, "declared", declared_by=f"attribute {held[1]} (per head)")
        low, high = min(effective), max(effective)
        reason = f"heads differ, from {low:.6g} to {high:.6g}, and nothing declares it"
        return JudgedCall(call, "unexplained", "unknown", None, textbook, reason)
    mistake, how = name_mistake(call, effective[0], layer=layer)
    excused = mistake not in NOT_EXCUSED and mistake != "layer_index"
    excused = excused and not (mistake == "twice" and root_factors(call) >= 2)
    if held is not None and excused:
        text = f"attribute {held[1]} = {effective[0]:.6g}"
        text += " (learned)" if held[0].learned else ""
        return JudgedCall(call, "declared", None, text, effective[0], how if mistake == "twice" else None)
    if held is not None and mistake in NOT_EXCUSED:
        held_text = f"attribute {held[1]} holds the value of {mistake}"
        how = f"{held_text}; {how}" if how else held_text
    return JudgedCall(call, "unexplained", mistake, None, textbook, how)


def held_by_attribute(judged: JudgedCall, model: nn.Module) -> str | None:
    """The attribute that holds the effective scale of an unexplained call, as text, or None."""
    call = judged.call
    if call.scale.effective is None or judged.mistake not in NOT_EXCUSED:
        return None
    found = holding(
        scale_attributes(module_at(model, call.site), call.heads),
        call.scale.per_head or (call.scale.effective,),
        call.head_dim,
    )
    return None if found is None else found[1]


def judge_all(calls: Sequence[AttentionCall], model: nn.Module) -> tuple[JudgedCall, ...]:
    """Judge every call of a run; the calls together show patterns over the layers that none shows alone."""
    rank = ranks(calls)
    layers = {site: layer_of(module_at(model, site), place) for site, place in rank.items()}
    pattern = layer_pattern(calls, layers)
    judged = []
    for call in calls:
        module = module_at(model, call.site)
        judged.append(
            judge(call, module, config_at(model, call.site), layers[call.site], in_pattern=call.site in pattern)
        )
    return tuple(judged)
