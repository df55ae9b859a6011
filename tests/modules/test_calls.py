"""What is noted of the calls of modules, and what may take the place of what they pass on."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import astuple, dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.modules.calls import CallPlace, OpenCalls, first_apart, hooked
from sqrtdk.modules.structures import copy_structure, replaced, restored, walk


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated")
def test_hooks_are_called_by_place_and_are_gone_afterwards() -> None:
    model = nn.Sequential(nn.Identity(), nn.Identity(), torch.jit.script(nn.Identity()))
    met: list[tuple[str, CallPlace]] = []
    with hooked(
        dict(model.named_modules()),
        lambda place, args, kwargs: met.append(("begins", place)),
        lambda place, args, kwargs, output: met.append(("ends", place)),
    ):
        model(torch.ones(1))
        model(torch.ones(1))
    model(torch.ones(1))
    once = [("begins", ""), ("begins", "0"), ("ends", "0"), ("begins", "1"), ("ends", "1"), ("ends", "")]
    assert met == [(what, (path, count)) for count in (0, 1) for what, path in once]


def test_arguments_and_outputs_are_replaced() -> None:
    layer = nn.Identity()
    with hooked(
        {"": layer},
        lambda place, args, kwargs: ((args[0] + 1,), kwargs),
        lambda place, args, kwargs, output: output * 10 if place[1] else None,
    ):
        assert [layer(torch.ones(())).item() for _ in range(2)] == [2.0, 20.0]


def test_what_raised_is_dropped_with_the_call_around_it() -> None:
    calls = OpenCalls[int]()
    for number, path in enumerate(("model", "block", "fast")):
        calls.begins(path, number)
    assert astuple(calls.ends("block")) == (1, 0, 0, 1)
    calls.begins("head", 3)
    assert astuple(calls.ends("head")) == (3, 0, 1, 3)
    assert astuple(calls.ends("model")) == (0, -1, 0, 0)
    assert calls.ends("model") is None


def test_the_first_call_apart_has_inputs_that_agree() -> None:
    calls = [("norm", True, False), ("attn", True, True), ("block", True, True)]
    assert first_apart(calls, lambda call: call[1], lambda call: call[2]) == calls[1]
    assert first_apart(calls[:1], lambda call: call[1], lambda call: call[2]) is None


Pair = namedtuple("Pair", "out cache")


@dataclass(frozen=True)
class Answer:
    logits: Tensor
    hidden: Any = None


@pytest.mark.parametrize("wrap", [tuple, list, lambda parts: Pair(*parts), lambda parts: Answer(*parts)])
def test_the_first_tensor_that_fits_is_replaced(wrap: Any) -> None:
    value = wrap([torch.ones(2), {"x": torch.ones(3)}])
    other = replaced(value, [torch.zeros(3)])
    assert type(other) is type(value)
    assert [float(x.sum()) for _, x in walk(other)] == [2.0, 0.0]
    assert [float(x.sum()) for _, x in walk(value)] == [2.0, 3.0]
    assert replaced(value, [torch.zeros(4)]) is value


def test_copies_stay_what_they_were_and_are_put_back() -> None:
    output = (torch.ones(2), [torch.ones(1), None], object())
    before = copy_structure(output)
    output[0].mul_(2)
    assert before[0].tolist() == [1.0, 1.0]
    assert before[2] is None
    again = restored(output, before)
    assert again[0].tolist() == [1.0, 1.0]
    assert again[2] is output[2]
