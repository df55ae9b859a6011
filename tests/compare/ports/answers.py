"""What an answer about two small models must say of what is planted in them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from sqrtdk.compare.inside.suspect import STAGES
from sqrtdk.compare.records import Cause, DiffReport, PairDiff
from tests.compare.ports.config import Port
from tests.compare.ports.planting import NOTHING, Planting, Says, Told

ENOUGH = 0.99  # of the difference that a cause must explain
# Of what rounding to a lesser dtype makes: a number that lies between two falls to either, by the last bit of what it
# was made of, and a step of it can be most of the difference. What is left is judged by `allowed`, as everything is.
ROUNDED = 0.5
FOUR, SIX = 5e-4, 5e-6  # off by which a number of four digits is, or of six
NUMBER = re.compile(r"-?(?:inf|\d+(?:\.\d+)?(?:e[-+]?\d+)?)")
VECTORS, NORMS, ROTATIONS = ("query", "key", "value"), ("query norm", "key norm"), ("query rotation", "key rotation")
ACTS_AT = {
    "scale": ("scale",),
    "softcap": ("softcap",),
    "softcap_order": ("softcap",),
    "bias_scaled": ("bias", "mask"),
    "mask_offset": ("mask",),
    "mask_alignment": ("mask",),
    "window": ("mask",),
    "padding": ("mask",),
    "mask_magnitude": ("mask",),
    "bias": ("bias",),
    "rope_missing": ROTATIONS,
    "rope_base": ROTATIONS,
    "rope_layout": ROTATIONS,
    "rope_partial": ROTATIONS,
    "positions": ROTATIONS,
    "length_factor": (*ROTATIONS, "scale"),
    "qk_norm": NORMS,
    "qk_norm_order": NORMS,
    "qk_norm_eps": NORMS,
    "qk_norm_axis": NORMS,
    "sinks": ("sinks",),
    "group_order": ("key",),
    "head_order": VECTORS,
    "kv_scale": ("key", "value"),
    "rounding": (*VECTORS, "weights"),
    "dropout": ("weights",),
    "projection_bias": VECTORS,
    "weights": (*VECTORS, *NORMS),
    "input": ("input",),
    "unknown": STAGES,
}
# Of which both sides may be said the same: names of parameters, a factor of each row, nothing.
UNTOLD = {"weights", "length_factor", "unknown"}


def says(actual: object, expected: Told | None) -> bool:
    """Whether an answer, a number or words, is what is expected: a number, several that stand in words, words."""
    if expected is None:
        return True
    if expected == NOTHING:
        return actual in (None, NOTHING)
    if isinstance(expected, str):
        return expected in str(actual)
    if isinstance(expected, tuple):
        return all(says(str(actual), one) for one in expected)
    if isinstance(actual, float | int):
        return actual == expected or abs(actual - expected) <= SIX * abs(expected)
    numbers = [float(number) for number in NUMBER.findall(str(actual))]
    return any(number == expected or abs(number - expected) <= FOUR * abs(expected) for number in numbers)


def complaints(report: DiffReport, a: Port, b: Port, planted: Sequence[Sequence[tuple[str, Planting]]]) -> list[str]:
    """What is wrong with a report; nothing where all is right.

    Args:
        report: of both.
        a: what A does.
        b: what B does where something is planted.
        planted: of every layer what is planted in it.
    """
    if report.unpaired_a or report.unpaired_b or len(report.pairs) != a.layers:
        return [f"{len(report.pairs)} pairs, {len(report.unpaired_a)} and {len(report.unpaired_b)} without a partner"]
    if report.same is not False:
        return [f"same is {report.same}: {report.pairs[0].reason}"]
    first = min(layer for layer, those in enumerate(planted) if those)
    site = report.pairs[first].site_a
    wrong = []
    for layer, pair in enumerate(report.pairs):
        if layer < first:
            faults = _of_same(pair)
        elif {cause for cause, _ in planted[layer]} == {"input"}:
            faults = _of_input(pair, layer == first, site)
        elif planted[layer]:
            faults = _of_planted(pair, planted[layer], (a, b), layer)
        else:
            faults = _of_what_follows(pair, site)
        wrong += [f"layer {layer}: {fault}" for fault in faults]
    return wrong


def alarms(report: DiffReport, layers: int) -> list[str]:
    """What is said of two sides that are the same."""
    said = [f"{pair.site_a}: {fault}" for pair in report.pairs for fault in _of_same(pair)]
    if report.same is not True or report.unpaired_a or report.unpaired_b or len(report.pairs) != layers:
        said.append(f"same is {report.same} of {len(report.pairs)} pairs")
    return said


def _of_same(pair: PairDiff) -> list[str]:
    causes = [(cause.name, cause.text) for cause in pair.causes]
    if pair.same is True and not causes and not pair.follows_from and not pair.reason:
        return []
    about = f"{pair.difference} of {pair.allowed}, {pair.reason or causes or pair.follows_from}"
    return [f"same is {pair.same}: {about}"]


def _of_input(pair: PairDiff, first: bool, site: str) -> list[str]:
    if not first and pair.follows_from == site and not pair.causes:
        return []
    names = [cause.name for cause in pair.causes]
    if pair.same is False and names == ["input"] and pair.first_stage == "input":
        return []
    return [f"{names} at {pair.first_stage}, follows from {pair.follows_from}"]


def _of_what_follows(pair: PairDiff, site: str) -> list[str]:
    if pair.same is False and not pair.causes and pair.follows_from == site and pair.first_stage == "input":
        return []
    names = [cause.name for cause in pair.causes]
    return [f"same is {pair.same}, {names} at {pair.first_stage}, follows from {pair.follows_from}"]


def _of_planted(
    pair: PairDiff, planted: Sequence[tuple[str, Planting]], ports: tuple[Port, Port], layer: int
) -> list[str]:
    if pair.same is not False or pair.follows_from:
        return [f"same is {pair.same}, {pair.difference} of {pair.allowed}, follows from {pair.follows_from}"]
    found = [cause.name for cause in pair.causes]
    names = sorted(name for name, _ in planted)
    if sorted(set(found)) != names:
        return [f"{sorted(found)} instead of {names}"]
    wrong = [
        fault
        for name, planting in planted
        for cause in pair.causes
        if cause.name == name
        for fault in _of_cause(cause, planting, ports, layer)
    ]
    at = [(cause.name, cause.stage) for cause in pair.causes]
    if len(set(at)) < len(at):
        wrong.append(f"twice in {at}")
    first = min((cause.stage for cause in pair.causes), key=STAGES.index)
    if pair.first_stage != first and "unknown" not in found:
        wrong.append(f"begins to differ at {pair.first_stage}, not {first}")
    return wrong if "unknown" in found else wrong + _of_what_is_left(pair, found)


def _of_what_is_left(pair: PairDiff, found: Sequence[str]) -> list[str]:
    wrong = []
    if pair.explained is None or not pair.explained >= ENOUGH:
        wrong.append(f"explained is {pair.explained}")
    if None in (pair.residue, pair.allowed, pair.difference):
        return [*wrong, f"{pair.residue} is left of {pair.difference}, {pair.allowed} is allowed"]
    assert pair.residue is not None and pair.allowed is not None and pair.difference is not None  # noqa: PT018
    if not pair.residue <= pair.allowed:
        wrong.append(f"{pair.residue} is left, {pair.allowed} is allowed")
    if not pair.residue < pair.difference:
        wrong.append(f"{pair.residue} is left of {pair.difference}")
    return wrong


def _told(says: Says, port: Port, layer: int) -> Told | None:
    return says(port, layer) if callable(says) else says


def _of_cause(cause: Cause, planting: Planting, ports: tuple[Port, Port], layer: int) -> list[str]:
    expected = _told(planting.a, ports[0], layer), _told(planting.b, ports[1], layer)
    wrong = [
        f"{side} of {cause.name} is {actual!r}, not {told!r}"
        for side, actual, told in zip("ab", (cause.a, cause.b), expected, strict=True)
        if not says(actual, told)
    ]
    if cause.a == cause.b and cause.name not in UNTOLD:
        wrong.append(f"both sides of {cause.name} are {cause.a!r}")
    if not cause.stage.startswith(planting.stage) or cause.stage not in ACTS_AT[cause.name]:
        wrong.append(f"stage of {cause.name} is {cause.stage!r}, not {planting.stage or ACTS_AT[cause.name]!r}")
    if cause.name != "unknown" and not cause.explained >= (ROUNDED if cause.name == "rounding" else ENOUGH):
        wrong.append(f"{cause.name} explains {cause.explained}")
    return wrong
