"""Two changes at once: asked in the order of the table, the causes find both, and each is needed."""

from __future__ import annotations

import itertools

import pytest
from vector_plants import Plant, plants, style_of
from vector_programs import EXACT, differ, entering, outputs_differ, program, sides

from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.program import Program
from sqrtdk.compare.suspect import Suspicion

STYLES = ("qwen3", "gpt-j", "hunyuan", "cohere", "bert")
# one of these is gone, or can't be told, where the other is there
UNDONE = {
    "rope_missing": {"rope_base", "rope_layout", "rope_partial", "positions", "length_factor", "qk_norm_order"},
    "qk_norm": {"qk_norm_eps", "qk_norm_axis", "qk_norm_order"},
    "weights": {"head_order"},  # rows that are others stand in no order
    "rope_partial": {"qk_norm_order"},
}
BY_TABLE = {"positions", "rope_base", "length_factor", "rope_partial"}  # planted as a whole table: the last one stays


def _together(one: Plant, two: Plant) -> bool:
    if one.cause == two.cause:
        return False
    if {one.cause, two.cause} <= BY_TABLE:
        return False
    return two.cause not in UNDONE.get(one.cause, ()) and one.cause not in UNDONE.get(two.cause, ())


def pairs(style: str) -> list[tuple[str, str]]:
    fitting = [plant for plant in plants() if style in plant.fits]
    return [(one.name, two.name) for one, two in itertools.combinations(fitting, 2) if _together(one, two)]


def greedy(a: Program, b: Program) -> list[Suspicion]:
    """Each cause is asked once what is left, in the order of the table, and what it says is done."""
    found = []
    for suspect in CAUSES.values():
        for suspicion in list(suspect(sides(a, b))):
            a = suspicion.change(a)
            found.append(suspicion)
    return found


def applied(a: Program, suspicions: list[Suspicion]) -> Program:
    for suspicion in suspicions:
        a = suspicion.change(a)
    return a


@pytest.mark.parametrize("style", STYLES)
def test_both_are_found_and_both_are_needed(style: str) -> None:
    known = {plant.name: plant for plant in plants()}
    a, entered, complaints = program(style_of(style)), entering(), []
    for one, two in pairs(style):
        b = known[two].change(known[one].change(a))
        found = greedy(a, b)
        names = [suspicion.name for suspicion in found]
        if set(names) != {known[one].cause, known[two].cause}:
            complaints.append(f"{one} and {two}: {names}")
        elif differ(applied(a, found), b, entered) > EXACT:
            complaints.append(f"{one} and {two}: off by {differ(applied(a, found), b, entered):.2g}")
        elif any(not outputs_differ(applied(a, found[:i] + found[i + 1 :]), b, entered) for i in range(len(found))):
            complaints.append(f"{one} and {two}: one is not needed")
    assert complaints == []
    assert len(pairs(style)) > 20
