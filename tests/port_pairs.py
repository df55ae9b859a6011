"""Pairs of small models with something planted on side B, and what an answer about them must say."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from port_config import BASES, Port
from port_planted import PLANTED, Planting, case_name
from ports import build, inputs, port_of
from sqrtdk.compare.records import Cause, DiffReport, PairDiff

ENOUGH = 0.99  # of the difference that a cause must explain
NUMBER = re.compile(r"-?(?:inf|\d+(?:\.\d+)?(?:e[-+]?\d+)?)")
# Two of one group may be one and the same change under two names, or hide one another.
GROUPS = (
    {"mask_offset", "mask_alignment", "window", "padding", "mask_magnitude"},
    {"scale", "length_factor", "softcap", "softcap_order", "bias_scaled"},
    {"bias", "bias_scaled", "softcap_order"},
    {"rope_missing", "rope_base", "rope_layout", "rope_partial", "positions", "length_factor", "qk_norm_order"},
    {"qk_norm", "qk_norm_order", "qk_norm_eps", "qk_norm_axis", "kv_scale"},
    {"group_order", "head_order", "weights", "projection_bias"},
)
ALONE = {"input", "unknown"}


@dataclass(frozen=True, slots=True)
class Case:
    """One pair: a base, and one planting or more, each with the name of its cause."""

    base: str
    planted: tuple[tuple[str, Planting], ...]

    @property
    def name(self) -> str:
        return " + ".join(case_name(cause, planting, self.base) for cause, planting in self.planted)

    @property
    def common(self) -> dict[str, Any]:
        """Fields that both sides have."""
        return {name: value for _, one in self.planted for name, value in one.shared(self.base).items()}

    @property
    def changes(self) -> dict[str, Any]:
        """Fields that B has otherwise."""
        return {name: value for _, one in self.planted for name, value in one.changes(self.base).items()}

    def sides(self) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
        """A, B and what runs through both."""
        only = self.planted[0][1].only
        a = build(self.base, common=self.common)
        return a, build(self.base, common=self.common, only=only, **self.changes), inputs(self.base, **self.common)

    def ports(self) -> tuple[Port, Port]:
        """The descriptions of A and of a layer of B in which something is planted."""
        a = port_of(self.base, **self.common)
        return a, replace(a, **self.changes)

    def layers(self, planting: Planting) -> tuple[int, ...]:
        """Those in which a planting makes attention another."""
        a, b = self.ports()
        every = range(a.layers) if planting.only is None else planting.only
        if set(planting.changes(self.base)) == {"windows"}:
            every = [layer for layer in every if a.windows[layer] != b.windows[layer]]
        return tuple(layer for layer in every if layer >= planting.first)


def says(actual: object, expected: float | str | None) -> bool:
    """Whether an answer, a number or words, is what is expected: a number to 1%, words as part of it."""
    if expected is None:
        return True
    if isinstance(expected, str):
        return expected in str(actual)
    if isinstance(actual, float | int):
        return abs(actual - expected) <= 0.01 * abs(expected)
    return any(says(float(number), expected) for number in NUMBER.findall(str(actual)))


def complaints(report: DiffReport, case: Case) -> list[str]:
    """What is wrong with the answer about a case; nothing where all is right."""
    port, _ = case.ports()
    if report.unpaired_a or report.unpaired_b or len(report.pairs) != port.layers:
        return [f"{len(report.pairs)} pairs, {len(report.unpaired_a)} and {len(report.unpaired_b)} without a partner"]
    if report.same is not False:
        return [f"same is {report.same}"]
    planted = {
        layer: [(cause, planting) for cause, planting in case.planted if layer in case.layers(planting)]
        for layer in range(port.layers)
    }
    first = min(layer for layer, those in planted.items() if those)
    wrong = []
    for layer, pair in enumerate(report.pairs):
        about = f"layer {layer}: "
        if layer < first:
            faults = (
                [] if pair.same and not pair.causes and not pair.follows_from else [f"is not the same: {pair.causes}"]
            )
        elif {cause for cause, _ in planted[layer]} == {"input"}:
            faults = _of_input(pair, layer == first, report.pairs[first].site_a)
        elif planted[layer]:
            faults = _of_planted(pair, planted[layer])
        else:
            faults = _of_what_follows(pair, report.pairs[first].site_a)
        wrong += [about + fault for fault in faults]
    return wrong


def _of_input(pair: PairDiff, first: bool, site: str) -> list[str]:
    if not first and pair.follows_from == site:
        return []
    names = [cause.name for cause in pair.causes]
    if names == ["input"] and pair.first_stage == "input":
        return []
    return [f"{names} at {pair.first_stage}, follows from {pair.follows_from}"]


def _of_what_follows(pair: PairDiff, site: str) -> list[str]:
    if pair.causes or pair.follows_from != site:
        return [f"follows from {pair.follows_from}, {[cause.name for cause in pair.causes]}"]
    return []


def _of_planted(pair: PairDiff, planted: list[tuple[str, Planting]]) -> list[str]:
    if pair.same is not False:
        return [f"same is {pair.same}: {pair.reason}"]
    found = {cause.name: cause for cause in pair.causes}
    names = sorted(name for name, _ in planted)
    if sorted(found) != names:
        return [f"{sorted(found)} instead of {names}"]
    wrong = [fault for name, planting in planted for fault in _of_cause(found[name], planting)]
    if "unknown" in found:
        return wrong
    if pair.explained is None or pair.explained < ENOUGH:
        wrong.append(f"explained is {pair.explained}")
    if pair.residue is None or pair.allowed is None or not pair.residue <= pair.allowed:
        wrong.append(f"{pair.residue} is left, {pair.allowed} is allowed")
    return wrong


def _of_cause(cause: Cause, planting: Planting) -> list[str]:
    wrong = [
        f"{side} of {cause.name} is {actual!r}, not {expected!r}"
        for side, actual, expected in (("a", cause.a, planting.a), ("b", cause.b, planting.b))
        if not says(actual, expected)
    ]
    if not cause.stage.startswith(planting.stage):
        wrong.append(f"stage of {cause.name} is {cause.stage!r}, not {planting.stage!r}")
    if cause.name != "unknown" and not cause.explained >= ENOUGH:
        wrong.append(f"{cause.name} explains {cause.explained}")
    return wrong


def pairs_of_causes(count: int, seed: int = 0) -> Iterator[Case]:
    """Cases of two causes that have nothing to do with one another, drawn at random."""
    draw = random.Random(seed)
    everything = [
        (cause, one) for cause, those in PLANTED.items() for one in those if cause not in ALONE and not one.only
    ]
    made: set[str] = set()
    while len(made) < count:
        one, two = draw.sample(everything, 2)
        case = Case(draw.choice(tuple(BASES)), (one, two))
        if case.name not in made and _fit(case):
            made.add(case.name)
            yield case


def _fit(case: Case) -> bool:
    (cause, one), (other, two) = case.planted
    if cause == other or one.first or two.first or any({cause, other} <= group for group in GROUPS):
        return False
    if case.base not in one.bases or case.base not in two.bases:
        return False
    sides = [(planting.shared(case.base), planting.changes(case.base)) for planting in (one, two)]
    (common, changes), (common_2, changes_2) = sides
    if set(changes) & (set(common_2) | set(changes_2)) or set(changes_2) & set(common):
        return False
    return all(common[name] == common_2[name] for name in set(common) & set(common_2))
