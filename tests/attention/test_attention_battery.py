"""The battery: every case on every implementation against the float64 oracle; then the laws of the operation."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, product

import pytest
from cases import CASES, LONG_CASES, TABLES, Case, possible
from judging import IMPLEMENTATIONS, Expected, expect, judge
from parts import DTYPES, SHAPES

from kernel_here import unable
from sqrtdk.errors import UnsupportedError


@lru_cache(maxsize=4)
def expected_of(case: Case) -> Expected:
    return expect(case)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_case_agrees_with_the_oracle(case: Case) -> None:
    expected = expected_of(case)
    refusing, wrong = [], []
    for impl in IMPLEMENTATIONS:
        try:
            wrong += [f"{impl}: {text}" for text in judge(case, impl, expected)]
        except UnsupportedError:
            refusing.append(impl)
    can = {"cpu": case.cpu_can, "fused": case.fused_can}
    assert refusing == [impl for impl in IMPLEMENTATIONS if not can.get(impl, True)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif("cpu" not in IMPLEMENTATIONS, reason=f"no compiled kernel: {unable()}")
@pytest.mark.parametrize("case", LONG_CASES, ids=lambda case: case.id)
def test_compiled_kernel_agrees_with_the_oracle_over_many_tiles(case: Case) -> None:
    wrong = judge(case, "cpu", expect(case))
    assert not wrong, "\n".join(wrong)


def test_number_of_cases(capsys: pytest.CaptureFixture[str]) -> None:
    fused = [case for case in CASES if case.fused_can]
    compiled = [case for case in CASES if case.cpu_can]
    with capsys.disabled():
        there = f"{len(compiled)}" if "cpu" in IMPLEMENTATIONS else f"not measured: {unable()}"
        print(
            f"\nattention battery: {len(CASES)} cases; dense and tiled run all, fused {len(fused)} "
            f"(it refuses {len(CASES) - len(fused)}), cpu {there}"
        )
    assert len(CASES) >= 500
    assert len(fused) >= 150
    assert len(compiled) >= 300


def test_every_two_values_meet_that_may() -> None:
    values = {"shape": SHAPES, "dtype": DTYPES} | TABLES
    for (a, xs), (b, ys) in combinations(values.items(), 2):
        met = {(getattr(case, a), getattr(case, b)) for case in CASES}
        assert met == {(x, y) for x, y in product(xs, ys) if possible({a: x, b: y})}, (a, b)
