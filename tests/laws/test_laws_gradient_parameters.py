"""Law `gradient`: parameters between the projections and the softmax get the gradients of the formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sqrtdk.audit.records import BROKEN, KEPT
from sqrtdk.laws import ask
from tests.laws.backward_models import features
from tests.laws.learned_parameters import LEARNED, Cut, Shared, WithParameter, detached, halved
from tests.laws.test_laws_gradient_written import said


def _same(x: Tensor) -> Tensor:
    return x


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LEARNED)
def test_a_parameter_gets_the_gradient_of_the_formula_or_is_named(name: str) -> None:
    right = ask(WithParameter(name, _same).train(), features(), "gradient").answers
    assert [(one.state, one.reason) for one in right] == [(KEPT, "")]
    without = ask(WithParameter(name, detached).train(), features(), "gradient").answers
    assert said(without) == ("none: theta",)
    assert [one.finding.severity for one in without] == ["note"]
    wrong = ask(WithParameter(name, LEARNED[name].fault).train(), features(), "gradient").answers
    assert said(wrong) == (f"{LEARNED[name].code}: theta",)
    assert [one.finding.severity for one in wrong] == ["fail"]


def test_a_table_that_two_layers_read_is_judged_in_each() -> None:
    name = "table"
    right = ask(Shared(name, _same).train(), features(), "gradient").answers
    assert [(one.state, one.reason) for one in right] == [(KEPT, "")]
    wrong = ask(Shared(name, detached).train(), features(), "gradient").answers
    assert {(one.state, one.site) for one in wrong} == {(BROKEN, "layers.1")}
    assert said(wrong) == ("none: the bias",)  # and no second sentence for the table behind it


def test_a_gain_that_two_layers_read_is_said_not_to_be_judged() -> None:
    (answer,) = ask(Shared("gain of q", _same).train(), features(), "gradient").answers
    assert (answer.state, str(answer.reason)) == (KEPT, "the gradients of layers.0.theta were not judged")


def test_a_parameter_in_bfloat16_is_judged_in_the_float32_copy() -> None:
    module = WithParameter("table", LEARNED["table"].fault).to(torch.bfloat16).train()
    answers = ask(module, {"x": features()["x"].to(torch.bfloat16)}, "gradient").answers
    assert said(answers) == ("unknown: theta",)


def _by_hand(cut: Cut, self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = (q @ k.mT * cut(self.theta.exp())).exp()
    return (e @ v) / e.sum(-1, keepdim=True)


def _in_blocks(cut: Cut, self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = [(q @ key.mT * cut(self.theta.exp())).exp() for key in k.chunk(2, 2)]
    out = sum(e @ value for e, value in zip(parts, v.chunk(2, 2), strict=True))
    return out / sum(e.sum(-1, keepdim=True) for e in parts)


def test_a_temperature_in_a_softmax_by_hand_is_judged() -> None:
    for cut, found in ((_same, ()), (halved, ("factor: theta",))):
        module = WithParameter("temperature", cut)
        module.attend = _by_hand
        answers = ask(module.train(), features(), "gradient").answers
        assert said(answers) == found
        assert found or answers[0].reason == ""


class Autocast(WithParameter):
    """Runs under autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


def test_parameters_that_are_not_judged_are_named_where_the_law_is_kept() -> None:
    blocks = WithParameter("temperature", _same)
    blocks.attend = _in_blocks
    for module in (blocks, Autocast("gain of q", _same)):
        (answer,) = ask(module.train(), features(), "gradient").answers
        assert (answer.state, str(answer.reason)) == (KEPT, "the gradients of theta were not judged")
