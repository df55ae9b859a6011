"""The inputs that a law's run gets: copies, with one tensor in two places still one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.laws.subject import NotAsked, subject_of


class Telling(nn.Module):
    """Returns whether its inputs are one tensor, share memory, and writes into the first."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, more: Any = None) -> Tensor:
        one, shared = q is k, q.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        q.add_(1)
        return torch.tensor([float(one), float(shared)])


class Uncopied:
    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        raise RuntimeError("a file handle")


def test_one_tensor_in_two_places_stays_one_and_the_user_s_is_not_written() -> None:
    x = torch.zeros(2, 4)
    before = copy.deepcopy(x)
    subject = subject_of(Telling(), {"q": x, "k": x, "v": x[:1]})
    assert subject.returned({}).tolist() == [1.0, 1.0]
    assert torch.equal(x, before)
    assert subject.returned({"k": torch.ones(2, 4)}).tolist() == [0.0, 1.0]
    assert subject.returned({}, shared=["q"]).tolist() == [0.0, 0.0]


def test_an_input_that_can_not_be_copied_is_refused() -> None:
    x = torch.zeros(2, 4)
    subject = subject_of(Telling(), {"q": x, "k": x, "v": x, "more": Uncopied()})
    with pytest.raises(NotAsked, match="Uncopied"):
        subject.run({})
