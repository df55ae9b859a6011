"""Every cause planted in small models of every style: found, named, proven; and nothing named where nothing is."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from kernel_here import unable
from port_config import BASES
from port_pairs import Case, complaints, pairs_of_causes
from port_planted import HARMLESS, case_name, cases, cross_section
from port_styles import STYLES
from ports import build, inputs
from sqrtdk.compare.diff import diff
from sqrtdk.compare.records import DiffReport

TWO = 20  # pairs of two causes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HERE = tuple(style for style in STYLES if style != "cpu" or unable() is None)


def alarms(report: DiffReport) -> list[str]:
    """What is said of two sides that are the same."""
    said = [
        f"{pair.site_a}: same is {pair.same}, {pair.reason or [(cause.name, cause.text) for cause in pair.causes]}, "
        f"{pair.difference} of {pair.allowed}"
        for pair in report.pairs
        if pair.same is not True or pair.causes or pair.follows_from
    ]
    if report.same is not True or report.unpaired_a or report.unpaired_b or len(report.pairs) != 3:
        said.append(f"same is {report.same} of {len(report.pairs)} pairs")
    return said


def tell(capsys: pytest.CaptureFixture[str], what: str, count: int, wrong: Sequence[str], fault: str) -> None:
    with capsys.disabled():
        print(f"\n{what}: {count} cases, {len(wrong)} {fault}")
    assert not wrong, "\n".join(wrong)


def judge(every: Sequence[Case]) -> list[str]:
    wrong = []
    for case in every:
        a, b, tokens = case.sides()
        wrong += [f"{case.name}: {said}" for said in complaints(diff(a, b, tokens), case)]
    return wrong


def same(base: str, style: str, dtype: torch.dtype, **more: Any) -> list[str]:
    """Alarms of a base against itself in another style."""
    batch, common = more.pop("batch", 2), more
    a, b = build(base, dtype=dtype, common=common), build(base, dtype=dtype, common={**common, "style": style})
    said = alarms(diff(a, b, inputs(base, batch=batch, **common)))
    return [f"{base}, {style}, {dtype}, batch {batch}, {common}: {one}" for one in said]


PART = [Case(base, ((cause, planting),)) for cause, planting, base in cross_section()]


@pytest.mark.parametrize("case", PART, ids=[case.name for case in PART])
def test_a_planted_cause_is_named_and_proven(case: Case) -> None:
    assert not judge([case])


@pytest.mark.slow
def test_every_cause_on_every_base_is_named_and_proven(capsys: pytest.CaptureFixture[str]) -> None:
    every = [Case(base, ((cause, planting),)) for cause, planting, base in cases()]
    tell(capsys, "one cause", len(every), judge(every), "complaints")


BOTH = list(pairs_of_causes(TWO))


@pytest.mark.parametrize("case", BOTH, ids=[case.name for case in BOTH])
def test_two_causes_at_once_are_both_named(case: Case) -> None:
    assert not judge([case])


@pytest.mark.slow
def test_many_pairs_of_causes_are_both_named(capsys: pytest.CaptureFixture[str]) -> None:
    every = list(pairs_of_causes(10 * TWO, seed=1))
    tell(capsys, "two causes", len(every), judge(every), "complaints")


def test_styles_of_one_model_raise_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    """A fixed part of what follows, every base and every style in it."""
    draw = random.Random(0)
    grid = [(base, style, dtype) for base in BASES for style in HERE for dtype in DTYPES]
    part = [one for number, one in enumerate(draw.sample(grid, len(grid))) if number % 6 == 0]
    tell(capsys, "nothing planted", len(part), [said for one in part for said in same(*one)], "false alarms")


@pytest.mark.slow
def test_no_style_dtype_or_batch_raises_an_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    count, wrong = 0, []
    for base in BASES:
        for style in HERE:
            for dtype in DTYPES:
                for batch, padded in ((1, None), (2, "left"), (3, "right")):
                    wrong += same(base, style, dtype, batch=batch, padded=padded)
                    count += 1
    tell(capsys, "nothing planted", count, wrong, "false alarms")


def test_what_is_written_otherwise_raises_no_alarm(capsys: pytest.CaptureFixture[str]) -> None:
    count, wrong = 0, []
    for turn, planting in enumerate(HARMLESS):
        for base in (planting.bases[turn % len(planting.bases)], planting.bases[-1 - turn % len(planting.bases)]):
            common = planting.shared(base)
            b = build(base, common=common, **planting.changes(base))
            report = diff(build(base, common=common), b, inputs(base, **common))
            count += 1
            wrong += [
                f"{case_name('harmless', planting, base)}: {pair.site_a}: {pair.same}, {pair.causes}, {pair.reason}"
                for pair in report.pairs
                if pair.same is not True
            ]
    tell(capsys, "written otherwise", count, wrong, "false alarms")
