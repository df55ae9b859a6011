"""The layers of a model: equal places in them, their numbers, patterns over them, and the one that differs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from sqrtdk.audit.configs import field
from sqrtdk.audit.records import JudgedCall
from sqrtdk.audit.tolerance import close
from sqrtdk.tracing.records import AttentionCall

LEAST_LAYERS = 3  # any two numbers lie on some 1/(layer + 1) times a constant, or its inverse, by chance


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
    sites_of: dict[str, list[str]] = {}
    for call in calls:
        sites = sites_of.setdefault(template(call.site), [])
        if call.site not in sites:
            sites.append(call.site)
    return {site: rank for sites in sites_of.values() for rank, site in enumerate(sites)}


def layer_pattern(calls: Sequence[AttentionCall], layers: Mapping[str, int]) -> dict[str, str]:
    """How the scale ratio follows the layers' numbers, for every site where it does over three layers or more."""
    groups: dict[tuple[str, int], dict[str, float]] = {}
    for call in calls:
        if call.scale.ratio is not None and call.scale.ratio > 0:
            groups.setdefault((template(call.site), call.index), {})[call.site] = call.scale.ratio
    patterns: dict[str, str] = {}
    for sites in groups.values():
        if len({layers[site] for site in sites}) < LEAST_LAYERS:
            continue
        for power, text in ((1, "falls as 1/(layer + 1)"), (-1, "rises as layer + 1")):
            levels = [ratio * (layers[site] + 1) ** power for site, ratio in sites.items()]
            if all(close(level, levels[0]) for level in levels):
                patterns.update(dict.fromkeys(sites, f"r {text} over the layers"))
    return patterns


def strangers(judged: Sequence[JudgedCall]) -> dict[int, int]:
    """Calls whose attribute declares another scale than their siblings have: place in `judged` -> count of siblings.

    Siblings are the calls of the same class at the same place of other layers. They must agree with one another, a
    single one must have the textbook's scale, and one call alone may differ: several that differ are a design (local
    and global layers).
    """
    groups: dict[tuple[str, int, str], list[int]] = {}
    for place, entry in enumerate(judged):
        call = entry.call
        if call.scale.effective is not None and entry.verdict != "unmeasured":
            groups.setdefault((template(call.site), call.index, call.module_class), []).append(place)
    siblings: dict[int, int] = {}
    for places in groups.values():
        for place in places:
            others = [judged[other] for other in places if other != place]
            values = [other.call.scale.effective or 0.0 for other in others]
            own = judged[place].call.scale.effective or 0.0
            if not by_attribute(judged[place]) or not (len(others) > 1 or any(o.verdict == "exact" for o in others)):
                continue
            if not close(own, values[0]) and all(close(value, values[0]) for value in values):
                siblings[place] = len(values)
    return siblings


def by_attribute(judged: JudgedCall) -> bool:
    """Whether nothing but a module attribute declares the scale."""
    return judged.verdict == "declared" and judged.attribute is not None


def siblings_text(number: int) -> str:
    """The count of siblings in words."""
    return "1 sibling" if number == 1 else f"{number} siblings"
