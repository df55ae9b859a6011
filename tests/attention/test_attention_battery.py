"""The battery: every case on every implementation against the float64 oracle; then the laws of the operation."""

from __future__ import annotations

from functools import lru_cache
from itertools import combinations, product

import pytest

from sqrtdk.errors import UnsupportedError
from tests.attention.cases import CASES, CORE, FEW_CASES, LONG_CASES, TABLES, Case, possible
from tests.attention.judging import IMPLEMENTATIONS, Expected, expect, judge, judge_at_once
from tests.attention.parts import DTYPES, SHAPES
from tests.support.kernel_here import unable
from tests.support.triton_here import needs_triton

TRITON_CASES = [case for case in CASES if case.triton_can]


@lru_cache(maxsize=4)
def expected_of(case: Case) -> Expected:
    return expect(case)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in CORE else pytest.mark.sampled(6), id=case.id) for case in CASES],
)
def test_case_agrees_with_the_oracle(case: Case) -> None:
    expected = expected_of(case)
    refusing, wrong = [], []
    for impl in IMPLEMENTATIONS:
        if impl == "triton" and case.triton_can:
            continue  # in the interpreter it takes long: below
        try:
            wrong += [f"{impl}: {text}" for text in judge(case, impl, expected)]
        except UnsupportedError:
            refusing.append(impl)
    can = {"cpu": case.cpu_can, "fused": case.fused_can, "triton": case.triton_can}
    assert refusing == [impl for impl in IMPLEMENTATIONS if not can.get(impl, True)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif("cpu" not in IMPLEMENTATIONS, reason=f"no compiled kernel: {unable()}")
@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", LONG_CASES, ids=lambda case: case.id)
def test_compiled_kernel_agrees_with_the_oracle_over_many_tiles(case: Case) -> None:
    wrong = judge(case, "cpu", expect(case))
    assert not wrong, "\n".join(wrong)


@needs_triton
@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", FEW_CASES, ids=lambda case: case.id)
def test_triton_kernel_agrees_with_the_oracle(case: Case) -> None:
    wrong = judge_at_once(case, "triton", expect(case))
    assert not wrong, "\n".join(wrong)


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("case", TRITON_CASES, ids=lambda case: case.id)
def test_triton_kernel_agrees_with_the_oracle_in_every_case(case: Case) -> None:
    wrong = judge(case, "triton", expect(case))
    assert not wrong, "\n".join(wrong)


def test_number_of_cases() -> None:
    assert len(CASES) >= 500
    assert sum(case.fused_can for case in CASES) >= 150
    assert sum(case.cpu_at_once for case in CASES) >= 300
    assert len(TRITON_CASES) >= 500


def test_every_two_values_meet_that_may() -> None:
    values = {"shape": SHAPES, "dtype": DTYPES} | TABLES
    for (a, xs), (b, ys) in combinations(values.items(), 2):
        met = {(getattr(case, a), getattr(case, b)) for case in CASES}
        assert met == {(x, y) for x, y in product(xs, ys) if possible({a: x, b: y})}, (a, b)


def test_few_cases_hold_every_value() -> None:
    can = {name: {getattr(case, name) for case in TRITON_CASES} for name in ("shape", "dtype", *TABLES)}
    assert {name: {getattr(case, name) for case in FEW_CASES} for name in can} == can
    met = {(case.mask, case.dtype) for case in FEW_CASES}
    assert met == set(product(can["mask"], can["dtype"]))


def test_the_core_holds_every_value_that_an_implementation_takes() -> None:
    takes = {"dense": CASES, "fused": [case for case in CASES if case.fused_can]}
    takes["cpu"] = [case for case in CASES if case.cpu_at_once]
    for impl, cases in takes.items():
        for name in ("shape", "dtype", *TABLES):
            held = {getattr(case, name) for case in CORE if case in cases}
            assert held == {getattr(case, name) for case in cases}, (impl, name)
