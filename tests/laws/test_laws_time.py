"""What laws cost: named laws are asked of a large model, a bound on time holds, a slow model tells its progress."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor

from sqrtdk import check, laws
from sqrtdk._progress import pass_progress_to
from sqrtdk.audit.records import KEPT, NOT_ASKED
from sqrtdk.errors import InvalidValueError
from sqrtdk.laws import LAWS, table
from sqrtdk.laws.pace import Pace
from tests.laws.head_models import Heads, x_of
from tests.support.program import called

COSTLY = "laws.asking.costly"
ALL = table.names_of("all")
SECONDS = 0.1
RUNS: list[int] = []


class Slow(Heads):
    """Takes a while, and counts its calls outside of itself: what a model holds is put back."""

    def forward(self, x: Tensor) -> Tensor:
        RUNS.append(1)
        time.sleep(SECONDS)
        return super().forward(x)


@pytest.mark.parametrize(("asked", "costly"), [("all", True), ([*ALL], False), ([*ALL][:-1], False), (["all"], True)])
def test_laws_of_a_large_model_are_asked_if_they_are_named(
    asked: Any, costly: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table, "LARGE_MODEL", 0)  # every model is large
    for answers in (laws.ask(Heads(), x_of(), asked).answers, check(Heads(), x_of(), laws=asked).laws):
        reasons = {answer.law for answer in answers if getattr(answer.reason, "id", "") == COSTLY}
        assert reasons == ({name for name in ALL if not LAWS[name].of_large_models} if costly else set())
        assert {answer.law: answer.state for answer in answers}["place"] == (NOT_ASKED if costly else KEPT)


def test_a_bound_on_the_time() -> None:
    model = Slow()
    RUNS.clear()
    whole = laws.ask(model, x_of())
    runs = len(RUNS)
    RUNS.clear()
    bounded = laws.ask(model, x_of(), seconds=2.5 * SECONDS)
    assert len(RUNS) <= 4 < runs  # the audit's own, and those that end in time
    late = {answer.law for answer in bounded.answers if "its time is up: all laws together" in answer.reason}
    assert late
    assert {answer.law for answer in bounded.answers} == {answer.law for answer in whole.answers} == {*ALL}
    assert not bounded.broken
    report = check(model, x_of(), laws="all", laws_seconds=2.5 * SECONDS)
    assert {answer.law for answer in report.laws if "its time is up" in answer.reason}


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf")])
def test_a_bound_that_is_none(seconds: float) -> None:
    for asking in (lambda: laws.ask("demo", seconds=seconds), lambda: check("demo", laws_seconds=seconds)):
        with pytest.raises(InvalidValueError, match="the laws may take"):
            asking()


def test_a_slow_model_says_how_far_it_is() -> None:
    told: list[str] = []
    with pass_progress_to(lambda text, done, total: told.append(text)):
        laws.ask(Heads(), x_of())
    assert [text for text in told if text.startswith("law ")] == [
        f"law {number} of {len(ALL)}: {name}" for number, name in enumerate(ALL, 1)
    ]
    minute = Pace(run_seconds=60.0)
    assert [LAWS[law].runs for law in ("cache", "causal", "finite")] == [11, 1, 0]
    assert [str(minute.left(runs)) for runs in (11, 1, 0)] == ["11 minutes", "1 minute", "None"]
    assert str(Pace(run_seconds=1.0).left(12)) == "12 seconds"
    assert Pace(most=5.0, run_seconds=60.0).is_up
    assert Pace(most=5.0, run_seconds=60.0).left(sum(row.runs for row in LAWS.values())) is None


def test_the_option() -> None:
    done = called("check", "demo", "--laws", "causal,place", "--laws-seconds", "1e-9", "--laws-reasons")
    assert "its time is up: all laws together may take 1e-09 s" in " ".join(done.stdout.split())
    assert "2 not asked" in done.stdout
    assert called("check", "demo", "--laws-seconds", "0").returncode == 2


def test_parameters_with_a_time_bound_are_left_alone() -> None:
    model = Slow()
    before = {name: part.detach().clone() for name, part in model.named_parameters()}
    laws.ask(model, x_of(), "heads", seconds=2.5 * SECONDS)
    assert all(torch.equal(part, before[name]) for name, part in model.named_parameters())
