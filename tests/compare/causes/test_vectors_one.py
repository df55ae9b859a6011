"""One change of q, k or v: one suspicion, the right one, which makes A's program B's and without which it is not."""

from __future__ import annotations

import random

import pytest
import torch

from sqrtdk.compare.causes import CAUSES
from sqrtdk.compare.suspect import STAGES
from tests.compare.causes.vector_plants import cases, planted, style_of
from tests.compare.causes.vector_programs import EXACT, STYLES, differ, entering, outputs_differ, program, sides


@pytest.mark.parametrize(("name", "style"), cases())
def test_the_planted_cause_is_the_only_one_and_explains_all(name: str, style: str) -> None:
    plant, a, entered = planted(name), program(style_of(style)), entering()
    b = plant.change(a)
    assert outputs_differ(a, b, entered)
    suspicions = [suspicion for suspect in CAUSES.values() for suspicion in suspect(sides(a, b))]
    assert [(s.name, s.text) for s in suspicions if s.name != plant.cause] == []
    (suspicion,) = suspicions
    assert differ(suspicion.change(a), b, entered) < EXACT
    assert suspicion.stage in STAGES
    assert plant.a is None or (suspicion.a, suspicion.b) == (plant.a, plant.b)
    assert suspicion.text
    assert "{}" not in suspicion.text


def _check_backwards(name: str, style: str) -> None:
    plant, b, entered = planted(name), program(style_of(style)), entering()
    a = plant.change(b)
    suspicions = [suspicion for suspect in CAUSES.values() for suspicion in suspect(sides(a, b))]
    assert {s.name for s in suspicions} == {plant.cause}
    (suspicion,) = suspicions
    assert differ(suspicion.change(a), b, entered) < EXACT
    assert plant.a is None or (suspicion.a, suspicion.b) == (plant.b, plant.a)


@pytest.mark.parametrize(("name", "style"), random.Random(0).sample(cases(), 60))
def test_the_other_way_round(name: str, style: str) -> None:
    """What is missing in B is added then, and what was added is left out."""
    _check_backwards(name, style)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "style"), cases())
def test_every_one_the_other_way_round(name: str, style: str) -> None:
    _check_backwards(name, style)


@pytest.mark.parametrize("style", STYLES)
def test_equal_programs_are_not_accused(style: str) -> None:
    torch.manual_seed(1)
    a = program(style_of(style))
    torch.manual_seed(1)
    b = program(style_of(style))
    assert [s.name for suspect in CAUSES.values() for s in suspect(sides(a, b))] == []
