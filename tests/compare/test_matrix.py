"""Every cause planted in small models of every style: found, named, proven; and nothing named where nothing is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.compare.ports.answers import alarms
from tests.compare.ports.built import build
from tests.compare.ports.config import BASES
from tests.compare.ports.pairs import Case, compare, judge, near_pairs, pairs_of_causes
from tests.compare.ports.planted import HARMLESS, cases, cross_section
from tests.compare.ports.planting import Planting, case_name
from tests.compare.ports.styles import STYLES
from tests.support.kernel_here import unable

TWO = 20  # pairs of two causes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HERE = tuple(style for style in STYLES if style != "cpu" or unable() is None)
BATCHES = ((1, None), (2, "left"), (3, "right"))  # and where the last sequence has padding


def tell(capsys: pytest.CaptureFixture[str], what: str, count: int, wrong: Sequence[Sequence[str]], fault: str) -> None:
    """Prints how many cases there are and how many of them are wrong, and asks that none is."""
    with capsys.disabled():
        print(f"\n{what}: {count} cases, {count - len(wrong)} right, {len(wrong)} {fault}")
    assert not wrong, "\n".join(line for case in wrong for line in case)


def judged(every: Sequence[Case]) -> list[list[str]]:
    return [wrong for case in every if (wrong := judge(case))]


def same(base: str, style: str, dtype: torch.dtype, batch: int = 2, **common: Any) -> list[str]:
    """Alarms of a base against itself in another style."""
    b = build(base, dtype=dtype, common={**common, "style": style})
    said = alarms(compare(base, b, dtype=dtype, batch=batch, **common), BASES[base].layers)
    return [f"{base}, {style}, {dtype}, batch {batch}, {common}: {one}" for one in said]


def written_otherwise(planting: Planting, base: str) -> list[str]:
    """Alarms of a base against itself with something harmless."""
    common = planting.shared(base)
    report = compare(base, build(base, common=common, **planting.changes(base)), **common)
    return [f"{case_name('harmless', planting, base)}: {one}" for one in alarms(report, BASES[base].layers)]


PART = [Case(base, ((cause, planting),)) for cause, planting, base in cross_section()]


@pytest.mark.parametrize("case", PART, ids=[case.name for case in PART])
def test_a_planted_cause_is_named_and_proven(case: Case) -> None:
    assert not judge(case)


@pytest.mark.slow
def test_every_cause_on_every_base_is_named_and_proven(capsys: pytest.CaptureFixture[str]) -> None:
    every = [Case(base, ((cause, planting),)) for cause, planting, base in cases()]
    tell(capsys, "one cause", len(every), judged(every), "wrong")


BOTH = list(pairs_of_causes(TWO))


@pytest.mark.parametrize("case", BOTH, ids=[case.name for case in BOTH])
def test_two_causes_at_once_are_both_named(case: Case) -> None:
    assert not judge(case)


@pytest.mark.slow
def test_many_pairs_of_causes_are_both_named(capsys: pytest.CaptureFixture[str]) -> None:
    every = list(pairs_of_causes(10 * TWO, seed=1))
    tell(capsys, "two causes", len(every), judged(every), "wrong")


@pytest.mark.slow
def test_two_causes_of_one_group_are_both_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Scale and softcap, base and layout of a rotation, a window and padding."""
    every = [case for seed in range(3) for case in near_pairs(seed)]
    tell(capsys, "two causes of one group", len(every), judged(every), "wrong")


def test_styles_of_one_model_raise_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    """A fixed part of what follows, every base and every style in it."""
    draw = random.Random(0)
    grid = [(base, style, dtype) for base in BASES for style in HERE for dtype in DTYPES]
    part = [one for number, one in enumerate(draw.sample(grid, len(grid))) if number % 8 == 0]
    tell(capsys, "nothing planted", len(part), [said for one in part if (said := same(*one))], "false alarms")


@pytest.mark.slow
def test_no_style_dtype_or_batch_raises_an_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    count, wrong = 0, []
    for base in BASES:
        for dtype in DTYPES:
            for batch, padded in BATCHES:
                for style in HERE:
                    wrong.append(same(base, style, dtype, batch=batch, padded=padded))
                    count += 1
    tell(capsys, "nothing planted", count, [said for said in wrong if said], "false alarms")


def test_what_is_written_otherwise_raises_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    """One base each of what follows."""
    every = [(planting, planting.bases[turn % len(planting.bases)]) for turn, planting in enumerate(HARMLESS)]
    wrong = [said for one in every if (said := written_otherwise(*one))]
    tell(capsys, "written otherwise", len(every), wrong, "false alarms")


@pytest.mark.slow
def test_nothing_written_otherwise_raises_an_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    every = [(planting, base) for planting in HARMLESS for base in planting.bases]
    wrong = [said for one in every if (said := written_otherwise(*one))]
    tell(capsys, "written otherwise", len(every), wrong, "false alarms")
