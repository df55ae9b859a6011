"""The verdicts on all calls of a run: each call alone, with what the layers show together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from sqrtdk.audit.configs import field, module_at
from sqrtdk.audit.declared import config_at
from sqrtdk.audit.explanations import judge_scale
from sqrtdk.audit.proportional import Arguments
from sqrtdk.audit.records import JudgedCall
from sqrtdk.audit.tolerance import is_close
from sqrtdk.messages import Message
from sqrtdk.tracing.records import AttentionCall

LEAST_LAYERS = 3  # two ratios fit c / (layer + 1) or c * (layer + 1) by chance


def site_template(site: str) -> str:
    """Return a module path with its numbers replaced by "#".

    "model.layers.#.self_attn" is the same place in all layers.
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)", "#", site)


def layer_of(module: nn.Module | None, rank: int) -> int:
    """Return the 0-based layer number of a module.

    Args:
        module: The attention's module; its `layer_idx`, `layer_id` or `layer_index` comes first.
        rank: The number otherwise: the module's rank among those whose paths differ in numbers alone, see `ranks`.
    """
    for name in ("layer_idx", "layer_id", "layer_index"):
        value = field(module, name)
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return rank


def ranks(calls: Iterable[AttentionCall]) -> dict[str, int]:
    """Return for every module path its 0-based rank among the paths that differ from it in numbers alone.

    The order is that of the calls, so "layers.3.attn" of a model that runs its layers in order has rank 3.
    """
    places: dict[str, dict[str, int]] = {}
    for call in calls:
        alike = places.setdefault(site_template(call.site), {})
        alike.setdefault(call.site, len(alike))
    return {site: rank for alike in places.values() for site, rank in alike.items()}


def layer_pattern(calls: Sequence[AttentionCall], layers: Mapping[str, int]) -> dict[str, str]:
    """Return for which modules the scale falls as 1/(layer + 1), or rises as layer + 1.

    Args:
        calls: The attentions of a run.
        layers: The 0-based layer number of every site.

    Returns:
        A dict from site to a message that says so. A site is in it if it shares its path, apart from numbers, with
        sites of at least three layers that all follow the pattern within 1%.
    """
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
    """Return the calls that follow another rule than their siblings: place in `judged` -> number of siblings.

    Siblings are the calls of the same class at the same place of other layers. They must agree with one another. A
    single sibling must have the textbook's scale. Only one call may differ: several that differ are a design (local and
    global layers). A rule of the computation explains such a call by itself: 1 after a norm of q and k, where all other
    layers divide by sqrt(head_dim).
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
            by_rule = judged[place].verdict == "declared" and judged[place].declared_as == "norm"
            if not by_rule or not (len(others) > 1 or any(o.verdict == "exact" for o in others)):
                continue
            if not is_close(own, values[0]) and all(is_close(value, values[0]) for value in values):
                siblings[place] = len(values)
    return siblings


def siblings_text(number: int) -> str:
    """Return the count of siblings in words."""
    return Message("rules.scale_ledger.siblings", count=number)


def judge_all(
    calls: Sequence[AttentionCall], model: nn.Module, arguments: Mapping[str, Arguments] = {}
) -> tuple[JudgedCall, ...]:
    """Judge every attention call of a run, with regard to patterns over the layers that no single call shows.

    Args:
        calls: The calls, in running order.
        model: The model.
        arguments: By module path, the base lengths that the module was called with (`watch_base_lengths`).

    Returns:
        One judged call for each call, in the same order.
    """
    rank = ranks(calls)
    layers = {site: layer_of(module_at(model, site), place) for site, place in rank.items()}
    pattern = layer_pattern(calls, layers)
    return tuple(
        judge_scale(
            call,
            module_at(model, call.site),
            config_at(model, call.site),
            layers[call.site],
            layered=pattern.get(call.site),
            arguments=arguments.get(call.site, {}),
        )
        for call in calls
    )
