"""Wrong arguments of a clip raise, each with its rule, and nothing is scaled."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError
from sqrtdk.repair import clip_, plan_of, qk_clip_
from tests.repair.layouts import Layout
from tests.repair.modules import Attention, randomised, states


@pytest.fixture(scope="module")
def layout() -> Layout:
    return Layout(randomised(Attention()), (states(),))


def _run(layout: Layout, keep: bool = True) -> Any:
    with sqrtdk.trace(layout.model, keep=keep) as run:
        layout.run()
    return run


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.0}, "threshold is a finite number above 0; got 0.0"),
        ({"threshold": -1}, "threshold is a finite number above 0; got -1.0"),
        ({"threshold": math.nan}, "threshold is a finite number above 0; got nan"),
        ({"threshold": True}, "threshold is a number; got True"),
        ({"balance": 1.5}, "balance is from 0 to 1; got 1.5"),
        ({"balance": -0.1}, "balance is from 0 to 1; got -0.1"),
        ({"balance": math.nan}, "balance is a finite number; got nan"),
        ({"optimizer": 3}, "optimizer is a torch optimizer, or several; got int"),
        ({"group": "all"}, "group is a process group, 'merged' or None; got 'all'"),
    ],
)
def test_wrong_arguments(layout: Layout, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SqrtdkError) as raised:
        qk_clip_(layout.model, _run(layout), **options)
    assert str(raised.value) == message
    assert raised.value.hint


def test_wrong_traces(layout: Layout) -> None:
    other = Layout(randomised(Attention()), layout.inputs)
    with pytest.raises(InvalidValueError, match="kept the tensors of its 1 calls; it kept 0"):
        qk_clip_(layout.model, _run(layout, keep=False))
    with pytest.raises(InvalidValueError, match="it is of another Attention"):
        qk_clip_(other.model, _run(layout))
    with sqrtdk.trace(keep=True) as nameless:
        layout.run()
    with pytest.raises(InvalidValueError, match="it is of no model"):
        qk_clip_(layout.model, nameless)
    with sqrtdk.trace(layout.model, keep=True) as run:
        pass
    with pytest.raises(InvalidValueError, match="it saw 0, or has not ended"):
        qk_clip_(layout.model, run)
    with pytest.raises(InvalidTypeError, match="stats is a trace, or has `plans` and `maxima`; got dict"):
        qk_clip_(layout.model, {})
    with pytest.raises(InvalidTypeError, match=r"model is an nn.Module; got str"):
        qk_clip_("gpt2", _run(layout))


def test_maxima_of_an_object_take_no_group(layout: Layout) -> None:
    class Monitor:
        plans, maxima = plan_of(layout.model, _run(layout)), (torch.ones(4),)

    with pytest.raises(InvalidValueError, match="those of an object are merged already"):
        qk_clip_(layout.model, Monitor(), group="merged")


def test_plans_of_a_site_that_is_not_there(layout: Layout) -> None:
    small = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(InvalidValueError, match=r"it has no 'q.weight'"):
        clip_(small, plan_of(layout.model, _run(layout)), [torch.full((4,), 1e3)])


def test_plans_of_a_model_of_other_shapes(layout: Layout) -> None:
    narrow = Attention().double()
    narrow.k = nn.Linear(32, 16).double()  # what comes first, q, would fit
    before = {key: weight.clone() for key, weight in narrow.state_dict().items()}
    with pytest.raises(InvalidValueError, match=r"k.weight has the shape \(16, 32\), and had \(32, 32\) in the plan"):
        clip_(narrow, plan_of(layout.model, _run(layout)), [torch.full((4,), 1e3)])
    assert all(torch.equal(weight, before[key]) for key, weight in narrow.state_dict().items())


@pytest.mark.parametrize(
    ("maxima", "message"),
    [
        ([], "there are maxima for each plan; got 0 for 1"),
        ([torch.ones(3)], r"have one number a head, \(4,\); got \(3,\)"),
    ],
)
def test_maxima_that_do_not_fit(layout: Layout, maxima: list[Tensor], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        clip_(layout.model, plan_of(layout.model, _run(layout)), maxima)


def test_nothing_is_scaled_when_an_argument_is_wrong(layout: Layout) -> None:
    before = layout.model.q.weight.clone()
    with pytest.raises(InvalidTypeError):
        qk_clip_(layout.model, _run(layout), threshold=1e-3, optimizer=[3])
    assert torch.equal(before, layout.model.q.weight)
