"""Which steps are sampled."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.monitor.schedule import Every, Logarithmic, When, schedule_of


def steps(schedule: Any, most: int = 1000, worsening: bool = False) -> list[int]:
    return [step for step in range(1, most + 1) if schedule.due(step, worsening)]


@pytest.mark.parametrize("schedule", [Every(7), Logarithmic(3), When(lambda step: False)])
def test_the_first_step_is_always_one(schedule: Any) -> None:
    assert schedule.due(1)


@pytest.mark.parametrize("n", [1, 2, 100])
def test_every(n: int) -> None:
    assert steps(Every(n), 400) == sorted({1, *range(n, 401, n)})


def test_every_is_urgent_while_a_trend_is_bad_and_leaves_out_none_of_its_own() -> None:
    urgent = Every(100, urgent=30)
    assert steps(urgent, 200) == [1, 100, 200]
    assert steps(urgent, 200, worsening=True) == [1, 30, 60, 90, 100, 120, 150, 180, 200]
    assert steps(Every(100), 200, worsening=True) == [1, 100, 200]


@pytest.mark.parametrize("a_decade", [1, 4, 10, 50])
def test_logarithmic_is_even_on_the_scale_of_the_logarithm(a_decade: int) -> None:
    wanted = {round(10 ** (i / a_decade)) for i in range(5 * a_decade + 1)}
    assert steps(Logarithmic(a_decade), 100_000) == sorted(wanted)


def test_logarithmic_goes_on_without_end() -> None:
    assert Logarithmic(10).due(10**15)
    assert not Logarithmic(10).due(10**15 + 1)
    assert math.isclose(len(steps(Logarithmic(10), 10_000)), 36, abs_tol=4)


def test_what_every_stands_for() -> None:
    own = When(lambda step: step == 5)
    assert schedule_of(5) == Every(5)
    assert schedule_of(own) is own
    assert steps(schedule_of(lambda step: step % 3 == 0), 7) == [1, 3, 6]

    class Own:
        def due(self, step: int, worsening: bool = False) -> bool:
            return step == 9

    assert steps(schedule_of(Own()), 20) == [9]


@pytest.mark.parametrize("every", [0, -1, True, False])
def test_numbers_out_of_range(every: Any) -> None:
    with pytest.raises(InvalidValueError, match="whole number from 1 on"):
        schedule_of(every)


@pytest.mark.parametrize("every", [None, 2.5, "100", (1, 2), Every])
def test_what_is_no_schedule(every: Any) -> None:
    with pytest.raises(InvalidTypeError, match="a number of steps, a schedule, or a function"):
        schedule_of(every)


@pytest.mark.parametrize("make", [lambda: Every(2.0), lambda: Every(5, urgent=0), lambda: Logarithmic(0)])  # type: ignore[arg-type]
def test_schedules_refuse_what_is_out_of_range(make: Any) -> None:
    with pytest.raises(InvalidValueError):
        make()
