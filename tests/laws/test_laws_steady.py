"""Models whose outputs differ from run to run of the same inputs in evaluation mode: no law is said broken of them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from sqrtdk import check
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED
from sqrtdk.laws import table
from tests.laws.models import Decoder, ids, leaking

DIFFER = "its outputs differ from run to run of the same inputs"
STEPS = itertools.count()


class Counting(Decoder):
    """A causal decoder whose outputs follow what its earlier runs left; `where` says where that is."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.runs, self.cache = where, 0, []
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        y = super().forward(input_ids, attention_mask)
        if self.training:  # as eval mode alone counts, runs in train mode agree
            return y
        if self.where == "buffer":
            self.steps += 1
            return y + 0.01 * self.steps
        if self.where == "assigned buffer":
            self.steps = self.steps + 1
            return y + 0.01 * self.steps
        if self.where == "attribute":
            self.runs += 1
            return y * 1.01**self.runs
        if self.where == "global":
            return y + 0.1 * next(STEPS)
        self.cache.append(y.mean().item())
        return y + sum(self.cache)


@pytest.mark.parametrize("where", ["buffer", "assigned buffer", "attribute", "global", "cache"])
def test_a_count_of_runs_breaks_no_law(where: str) -> None:
    report = check(Counting(where).eval(), ids(), laws="all")
    assert not [finding for finding in report.findings if finding.rule.startswith("law_")]
    states = {answer.law: (answer.state, answer.reason) for answer in report.laws}
    assert states.pop("finite") == states.pop("gradient") == (KEPT, "")  # of one run
    assert set(states) == {*table.names_of("all")} - {"finite", "gradient"}
    assert set(states.values()) == {(NOT_ASKED, DIFFER)}


class Skipping(Decoder):
    """Every `period`-th run gives other outputs, beginning with the run of number `first`."""

    def __init__(self, period: int, first: int) -> None:
        super().__init__()
        self.period, self.runs = period, period - first

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        self.runs += 1
        y = super().forward(input_ids, attention_mask)
        return y.roll(1, 2) if self.runs % self.period == 0 else y


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("period", "first"), [(k, first) for k in (2, 3, 4, 5, 6, 7, 9) for first in range(k)])
def test_what_differs_at_every_kth_run_breaks_no_law(period: int, first: int) -> None:
    """The first runs are alike if the period is long: the law that looks broken is asked again."""
    for laws in ("all", "causal", "samples", "modes", "padding"):
        assert BROKEN not in {answer.state for answer in check(Skipping(period, first).eval(), ids(), laws=laws).laws}


def test_what_depends_on_the_inputs_of_the_run_before() -> None:
    class Remembering(Decoder):
        last: Tensor | None = None

        def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
            y = super().forward(input_ids, attention_mask)
            self.last, last = y, self.last
            return y if last is None or last.shape != y.shape else y + 0.1 * last

    reasons = {answer.reason for answer in check(Remembering().eval(), ids(), laws="samples,causal").laws}
    assert reasons == {DIFFER}


def test_a_law_that_is_broken_stays_broken() -> None:
    """It is asked three times, with unchanged runs in between."""
    (answer,) = check(leaking().eval(), ids(), laws="causal").laws
    assert answer.state == BROKEN


def test_a_large_model_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "LARGE_MODEL", 0)
    report = check(Counting("attribute").eval(), ids(), laws="finite,causal")
    assert {answer.law: answer.state for answer in report.laws} == {"finite": KEPT, "causal": NOT_ASKED}
