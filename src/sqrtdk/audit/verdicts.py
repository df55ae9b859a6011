"""The verdicts on all calls of a run: each call alone, then with what the probe and the other layers show."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from sqrtdk.audit.attributes import Key, Probe, ScaleAttribute, holders, scale_attributes
from sqrtdk.audit.configs import field, module_at
from sqrtdk.audit.declared import config_at
from sqrtdk.audit.explanations import judge_scale
from sqrtdk.audit.records import JudgedCall
from sqrtdk.audit.tolerance import inverse_root, is_close, scales_of
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall

LEAST_LAYERS = 3  # two ratios fit c / (layer + 1) or c * (layer + 1) by chance


def site_template(site: str) -> str:
    """Replace the numbers in a site: "model.layers.#.self_attn" is the same place in all layers."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "#", site)


def layer_of(module: nn.Module | None, rank: int) -> int:
    """Return the 0-based layer number: the module's own `layer_idx` or alike, else its rank among sites of its kind."""
    for name in ("layer_idx", "layer_id", "layer_index"):
        value = field(module, name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return rank


def ranks(calls: Iterable[AttentionCall]) -> dict[str, int]:
    """Return for every site its 0-based place among the sites of the same template, in running order."""
    places: dict[str, dict[str, int]] = {}
    for call in calls:
        alike = places.setdefault(site_template(call.site), {})
        alike.setdefault(call.site, len(alike))
    return {site: rank for alike in places.values() for site, rank in alike.items()}


def layer_pattern(calls: Sequence[AttentionCall], layers: Mapping[str, int]) -> dict[str, str]:
    """Return how the scale ratio follows the layer number, for every site where it does over at least three layers."""
    groups: dict[tuple[str, int], dict[str, float]] = {}
    for call in calls:
        if call.scale.ratio is not None and call.scale.ratio > 0:
            groups.setdefault((site_template(call.site), call.index), {})[call.site] = call.scale.ratio
    patterns: dict[str, str] = {}
    for sites in groups.values():
        if len({layers[site] for site in sites}) < LEAST_LAYERS:
            continue
        for power, pattern in ((1, "rules.alike.falls_by_layer"), (-1, "rules.alike.rises_by_layer")):
            levels = [ratio * (layers[site] + 1) ** power for site, ratio in sites.items()]
            if all(is_close(level, levels[0]) for level in levels):
                patterns.update(dict.fromkeys(sites, Message(pattern)))
    return patterns


def strangers(judged: Sequence[JudgedCall]) -> dict[int, int]:
    """Return the calls whose attribute declares another scale than their siblings': place in `judged` -> siblings.

    Siblings are the calls of the same class at the same place of other layers. They must agree with one another. A
    single sibling must have the textbook's scale. Only one call may differ: several that differ are a design (local and
    global layers).
    """
    groups: dict[tuple[str, int, str], list[int]] = {}
    for place, entry in enumerate(judged):
        call = entry.call
        if call.scale.effective is not None and entry.verdict != "unmeasured":
            groups.setdefault((site_template(call.site), call.index, call.module_class), []).append(place)
    siblings: dict[int, int] = {}
    for places in groups.values():
        for place in places:
            others = [judged[other] for other in places if other != place]
            values = [other.call.scale.effective or 0.0 for other in others]
            own = judged[place].call.scale.effective or 0.0
            if not by_attribute(judged[place]) or not (len(others) > 1 or any(o.verdict == "exact" for o in others)):
                continue
            if not is_close(own, values[0]) and all(is_close(value, values[0]) for value in values):
                siblings[place] = len(values)
    return siblings


def by_attribute(judged: JudgedCall) -> bool:
    """Return whether nothing but a module attribute declares the scale."""
    return judged.verdict == "declared" and judged.attribute is not None


def siblings_text(number: int) -> str:
    """Return the count of siblings in words."""
    return Message("rules.scale_ledger.siblings", count=number)


# Runs that ask which attribute a call follows. Each run tries one more attribute with the same value: `scale`,
# `scaling` and `norm_factor` that are all 0.125. No module with more than three of them has been seen.
MOST_PROBES = 3


def judge_all(calls: Sequence[AttentionCall], model: nn.Module, probe: Probe | None = None) -> tuple[JudgedCall, ...]:
    """Judge every call of a run; the calls together show patterns over the layers that no single call shows.

    `probe` runs the model once more and returns which calls follow the attributes that hold their scale.
    """
    rank = ranks(calls)
    layers = {site: layer_of(module_at(model, site), place) for site, place in rank.items()}
    pattern = layer_pattern(calls, layers)
    known: dict[tuple[Key, str], bool] = {}

    def verdict(call: AttentionCall) -> JudgedCall:
        return judge_scale(
            call,
            module_at(model, call.site),
            config_at(model, call.site),
            layers[call.site],
            layered=pattern.get(call.site),
            follows=lambda attribute: known.get(((call.site, call.index), attribute.path)),
        )

    judged = [verdict(call) for call in calls]
    for _ in range(MOST_PROBES if probe else 0):
        asked = _unasked(judged, model, known)
        answers = probe(asked) if probe and asked else {}
        if not answers:
            break
        known.update({(key, asked[key].path): answer for key, answer in answers.items()})
        judged = [verdict(call) for call in calls]
    return tuple(_without_lone_attribute(judged))


def _unasked(
    judged: Sequence[JudgedCall], model: nn.Module, known: Mapping[tuple[Key, str], bool]
) -> dict[Key, ScaleAttribute]:
    """Return the attribute that each verdict relies on, unless it is already known whether the call follows it."""
    asked: dict[Key, ScaleAttribute] = {}
    for entry in judged:
        call, key = entry.call, entry.key
        if entry.attribute is None or call.scale.effective is None:
            continue
        attributes = scale_attributes(module_at(model, call.site), call.heads)
        holding = holders(attributes, scales_of(call), call.head_dim)
        held = next((attribute for attribute, text in holding if text == entry.attribute), None)
        if held is not None and (key, held.path) not in known:
            asked[key] = held
    return asked


def _without_lone_attribute(judged: Sequence[JudgedCall]) -> list[JudgedCall]:
    """Return the verdicts; a scale of 1 that only one layer's attribute declares becomes a missing scale."""
    verdicts = list(judged)
    for place, siblings in strangers(judged).items():
        entry = judged[place]
        if entry.expected is not None and is_close(entry.expected, 1.0):
            reason = Message(
                "rules.verdict.unlike_siblings", attribute=entry.attribute or "", siblings=siblings_text(siblings)
            )
            verdicts[place] = JudgedCall(
                entry.call, "unexplained", "missing", None, inverse_root(entry.call.head_dim), reason, entry.attribute
            )
    return verdicts
