"""Rounds run every way once, in turn; ratios are taken within a round."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from timing import Spread, ratio, rounds


def _clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """A clock that stands still but for what it is told."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def pass_by(seconds: float) -> None:
        now[0] += seconds

    return pass_by


def test_every_round_runs_all_ways_in_turn_and_the_first_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_by, ran = _clock(monkeypatch), []
    costs = {"a": iter([9.0, 1.0, 2.0]), "b": iter([9.0, 3.0, 4.0])}

    def way(name: str) -> Callable[[], None]:
        def work() -> None:
            ran.append(name)
            pass_by(next(costs[name]))

        return work

    times = rounds({name: way(name) for name in costs}, 2)
    assert "".join(ran) == "ababab"
    assert times == {"a": [1.0, 2.0], "b": [3.0, 4.0]}


def test_calls_in_a_row_are_averaged(monkeypatch: pytest.MonkeyPatch) -> None:
    pass_by, ran = _clock(monkeypatch), []

    def work(name: str) -> Callable[[], None]:
        return lambda: (ran.append(name), pass_by(0.5))[1]

    times = rounds({name: work(name) for name in "ab"}, 1, calls=3)
    assert "".join(ran) == "aaabbb" * 2
    assert times == {"a": [0.5], "b": [0.5]}


def test_a_drift_of_the_machine_is_not_in_the_ratios() -> None:
    base = [1.0, 2.0, 4.0, 8.0]
    assert ratio([3.0 * seconds for seconds in base], base) == Spread(3.0, 3.0, 3.0)
    assert Spread.of(base) == Spread(3.0, 1.0, 8.0)


def test_ratios_are_of_pairs_and_not_of_medians() -> None:
    assert ratio([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == Spread(1.0, 1 / 3, 3.0)
    assert ratio([4.0, 2.0, 9.0], [1.0, 2.0, 3.0]).median == 3.0  # of medians it would be 2
    with pytest.raises(ValueError, match="shorter"):
        ratio([1.0, 2.0], [1.0])


def test_percentiles_are_values_that_were_measured() -> None:
    assert Spread.of([float(n) for n in range(21)]) == Spread(10.0, 2.0, 18.0)
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0)
