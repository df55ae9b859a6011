"""Two sides of two dtypes: nothing is named where nothing is planted, and what is planted is."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch

from sqrtdk.compare.diff import sides_diff
from sqrtdk.compare.records import DiffReport
from tests.compare.ports.answers import alarms
from tests.compare.ports.built import build, inputs
from tests.compare.ports.config import BASES
from tests.compare.ports.pairs import run, side_a
from tests.compare.test_matrix import DTYPES, HERE, tell

PAIRS = tuple(itertools.permutations(DTYPES, 2))
ROTATED = tuple(base for base, port in BASES.items() if port.rope)
Way = tuple[str, torch.dtype, torch.dtype]


def compare(way: Way, **fields: Any) -> DiffReport:
    """What is said of a base in one dtype, which is A, and of B in another."""
    base, dtype, other = way
    return sides_diff(side_a(base, dtype, 2, ()), run(build(base, dtype=other, **fields), "B", inputs(base, batch=2)))


def said_of(way: Way, style: str) -> list[str]:
    """Alarms of a base against itself in another style."""
    return [f"{way}, {style}: {one}" for one in alarms(compare(way, common={"style": style}), BASES[way[0]].layers)]


def planted(base: str) -> dict[str, dict[str, Any]]:
    """Fields of B, by the name of the cause that they are."""
    port = BASES[base]
    changes: dict[str, dict[str, Any]] = {"scale": {"scale": 1.5 * port.factor}}
    if port.causal:
        changes["mask_offset"] = {"offset": 1}
    return changes | ({"rope_base": {"rope_base": 1000.0}} if port.rope else {})


def missed(way: Way, name: str, **fields: Any) -> list[str]:
    """Pairs of which something else is said than that they differ by one cause, and what came of it before them."""
    found = [(pair.same, {cause.name for cause in pair.causes} - {"input"}) for pair in compare(way, **fields).pairs]
    return [f"{way}, {fields}: {one}" for one in found if one != (False, {name})]


EVERY = [(base, *dtypes, style) for base in BASES for dtypes in PAIRS for style in HERE]


def test_two_dtypes_raise_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    """A part of what follows."""
    part = random.Random(3).sample(EVERY, 6)
    wrong = [said for *way, style in part if (said := said_of(tuple(way), style))]
    tell(capsys, "two dtypes, nothing planted", len(part), wrong, "false alarms")


@pytest.mark.parametrize(("dtype", "other"), PAIRS, ids=str)
def test_what_is_planted_is_found_between_two_dtypes(dtype: torch.dtype, other: torch.dtype) -> None:
    base = ROTATED[PAIRS.index((dtype, other)) % len(ROTATED)]
    for name, fields in planted(base).items():
        assert not missed((base, dtype, other), name, **fields)


@pytest.mark.slow
def test_no_two_dtypes_raise_an_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [said for *way, style in EVERY if (said := said_of(tuple(way), style))]
    tell(capsys, "two dtypes, nothing planted", len(EVERY), wrong, "false alarms")


@pytest.mark.slow
def test_everything_planted_is_found_between_two_dtypes(capsys: pytest.CaptureFixture[str]) -> None:
    every = [((base, *two), *one) for base in BASES for two in PAIRS for one in planted(base).items()]
    wrong = [said for way, name, fields in every if (said := missed(way, name, **fields))]
    tell(capsys, "two dtypes, one cause", len(every), wrong, "wrong")
