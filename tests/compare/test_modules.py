"""What a listener keeps of the modules of a model."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.compare.outside import modules
from sqrtdk.compare.outside.modules import ModuleListener
from sqrtdk.compare.sides import load_side, run_side
from sqrtdk.models.options import LoadOptions
from sqrtdk.modules.structures import tensors_of
from tests.compare.decoders import IDS, decoder


def test_what_is_kept_in_all_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules, "_MOST_BYTES", 2**20)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(32)))
    listener = ModuleListener()
    with torch.no_grad(), listener.on(model):
        model(torch.randn(512, 64))  # 33 tensors of 2**17 bytes
    kept = {id(one): one for step in listener.steps for one in (*step.takes, *step.gives)}
    assert sum(one.values.nbytes for one in kept.values()) < 2 * 2**20
    assert {one.stride for one in kept.values()} == {1, 9}
    assert listener.steps[0].gives[0] is listener.steps[1].takes[0]


def test_what_was_written_into_since_is_kept_anew() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x + 0).mul_(2))

    listener, model = ModuleListener(), Model()
    with listener.on(model):
        model(torch.ones(3))
    assert listener.steps[0].gives[0].values.tolist() == [1.0, 1.0, 1.0]
    assert listener.steps[1].takes[0].values.tolist() == [2.0, 2.0, 2.0]


def test_a_module_that_raises_inside_another_ends_with_it() -> None:
    class Raises(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("no kernel")

    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fast = Raises()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.fast(x)
            except RuntimeError:
                return x

    model, listener = nn.Sequential(Tries(), nn.Identity()), ModuleListener()
    with listener.on(model):
        model(torch.ones(2))
    numbers = {step.place[0]: (step.number, step.parent) for step in listener.steps}
    assert numbers == {"0": (1, 0), "1": (3, 0), "": (0, -1)}


def test_a_structure_that_is_held_twice_is_walked_once() -> None:
    held: object = [torch.ones(2)]
    for _ in range(6):
        held = [held] * 8
    assert len(tensors_of(held)) == 1


def test_a_run_says_whether_it_was_listened_to() -> None:
    side = run_side(load_side(decoder(), "A", (IDS,), LoadOptions()), "A", (IDS,), LoadOptions())
    assert side.again is not None
    assert side.again(True, None).listened
    assert not side.again(False, None).listened
