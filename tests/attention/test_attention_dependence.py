"""What is read from a function of one pair, and that nothing is read into one that may be something else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sqrtdk.impl.dependence import added_by, shown_by

SLOPES, TABLE, SHARED = torch.rand(8), torch.randn(8, 16, 16), torch.randn(16, 16, dtype=torch.bfloat16)
LEARNED = torch.rand(8, requires_grad=True)
DOCUMENT = torch.arange(16) // 4


class _Halved(torch.autograd.Function):
    """The value of its input, and half of its gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] / 2


def _without_gradient(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    with torch.no_grad():
        other = s + 1.0
    return torch.where(i >= j, s, other)


def _hooked(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    if s.requires_grad:
        s.register_hook(lambda gradient: gradient / 2)
    return s + 1.0


# name: function, what f depends on, the cap; None: no such function
ADDED: dict[str, tuple[Callable[..., Tensor], set[str] | None, float | None]] = {
    "nothing": (lambda s, b, h, i, j: s, set(), None),
    "alibi": (lambda s, b, h, i, j: s - SLOPES[h] * (i - j), {"h", "i - j"}, None),
    "learned slopes": (lambda s, b, h, i, j: s + LEARNED[h] * (j - i).abs(), {"h", "i - j"}, None),
    "two sums": (lambda s, b, h, i, j: (s + SLOPES[h]) - 0.1 * (i - j).float(), {"h", "i - j"}, None),
    "relative table": (lambda s, b, h, i, j: TABLE[h, 0, i - j] + s, {"h", "i - j"}, None),
    "moved": (lambda s, b, h, i, j: s + SLOPES[(i + 3) - (j - 2)], {"i - j"}, None),
    "table": (lambda s, b, h, i, j: s + TABLE[h, i, j], {"h", "i", "j"}, None),
    "of the sample": (lambda s, b, h, i, j: s + SLOPES[b], {"b"}, None),
    "distance in floats": (lambda s, b, h, i, j: s + (i.float() - j.float()), {"i", "j"}, None),
    "sum of places": (lambda s, b, h, i, j: s + (i + j), {"i", "j"}, None),
    "causal by -inf": (lambda s, b, h, i, j: torch.where(i >= j, s, -math.inf), {"i - j"}, None),
    "by masked_fill": (lambda s, b, h, i, j: s.masked_fill(i - j > 3, -math.inf), {"i - j"}, None),
    "documents": (lambda s, b, h, i, j: torch.where(DOCUMENT[i] == DOCUMENT[j], s, -math.inf), {"i", "j"}, None),
    "one of two": (lambda s, b, h, i, j: torch.where(i > j, s + 1.0, s - SLOPES[h]), {"h", "i - j"}, None),
    "cap": (lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0), set(), 30.0),
    "cap and more": (lambda s, b, h, i, j: (s / 5).tanh() * 5 - SLOPES[h] * (i - j), {"h", "i - j"}, 5.0),
    # others
    "another cap": (lambda s, b, h, i, j: 30.0 * torch.tanh(s / 20.0), None, None),
    "cap after a sum": (lambda s, b, h, i, j: 30.0 * torch.tanh((s + 1.0) / 30.0), None, None),
    "two caps": (lambda s, b, h, i, j: torch.where(i > j, 3.0 * (s / 3.0).tanh(), s), None, None),
    "square": (lambda s, b, h, i, j: s * s, None, None),
    "twice": (lambda s, b, h, i, j: s + s, None, None),
    "nothing of it": (lambda s, b, h, i, j: s - s, None, None),
    "from one": (lambda s, b, h, i, j: 1.0 - s, None, None),
    "turned": (lambda s, b, h, i, j: SLOPES[h] - s, None, None),
    "scaled": (lambda s, b, h, i, j: torch.add(SLOPES[h], s, alpha=2.0), None, None),
    "zero where hidden": (lambda s, b, h, i, j: torch.where(i >= j, s, 0.0), None, None),
    "by its sign": (lambda s, b, h, i, j: torch.where(s > 0, s, s + 1.0), None, None),
    "by its value": (lambda s, b, h, i, j: s + 1.0 if i >= j else s, None, None),
    "by a number": (lambda s, b, h, i, j: s + float(i), None, None),
    "detached": (lambda s, b, h, i, j: torch.where(i > j, s, s.detach() + 1.0), None, None),
    "data": (lambda s, b, h, i, j: torch.where(i > j, s, s.data), None, None),
    "no gradient in part": (_without_gradient, None, None),
    "own gradient": (lambda s, b, h, i, j: _Halved.apply(s) + 1.0, None, None),
    "hook": (_hooked, None, None),
    "bits": (lambda s, b, h, i, j: (s.view(torch.int32) + 1).view(torch.float32), None, None),
    "in place": (lambda s, b, h, i, j: s.clone().add_(1.0), None, None),
    "random": (lambda s, b, h, i, j: s + torch.rand(()), None, None),
    "float64": (lambda s, b, h, i, j: s + SLOPES[h].double(), None, None),
    "a row": (lambda s, b, h, i, j: s + TABLE[h, i], None, None),
    "no tensor": (lambda s, b, h, i, j: 1.0, None, None),  # type: ignore[dict-item, return-value]
}
SHOWN: dict[str, tuple[Callable[..., Tensor], set[str] | None]] = {
    "causal": (lambda b, h, i, j: i >= j, {"i - j"}),
    "window": (lambda b, h, i, j: (i - j).abs() <= 3, {"i - j"}),
    "moved": (lambda b, h, i, j: i + 2 >= j - 1, {"i - j"}),
    "dilated": (lambda b, h, i, j: (i - j) % 2 == 0, {"i - j"}),
    "both": (lambda b, h, i, j: (i >= j) & (i - j < 4), {"i - j"}),
    "all": (lambda b, h, i, j: i == i, set()),
    "of the head": (lambda b, h, i, j: i - j < h, {"h", "i - j"}),
    "first keys": (lambda b, h, i, j: j < 4, {"j"}),
    "blocks": (lambda b, h, i, j: i // 4 == j // 4, {"i", "j"}),
    "twice the row": (lambda b, h, i, j: i + i >= j, {"i", "j"}),
    "documents": (lambda b, h, i, j: DOCUMENT[i] == DOCUMENT[j + 0 * b], {"b", "i", "j"}),
    "floats": (lambda b, h, i, j: i.float() >= j.float(), {"i", "j"}),
    "by its value": (lambda b, h, i, j: i >= j if h > 1 else i > j, None),
    "no bool": (lambda b, h, i, j: i - j, None),
}


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("name", ADDED)
def test_what_a_score_mod_adds(name: str, learns: bool) -> None:
    function, places, cap = ADDED[name]
    with torch.set_grad_enabled(learns):
        found = added_by(function, torch.float32)
    if not learns and name in OF_GRADIENTS:  # the values alone are those of a sum
        assert found is None or found.cap is None
    elif places is None:
        assert found is None
    else:
        assert found is not None
        assert (set(found.places), found.cap) == (places, cap)


OF_GRADIENTS = ("detached", "data", "no gradient in part", "own gradient", "hook")


@pytest.mark.parametrize("name", SHOWN)
def test_what_a_mask_mod_shows(name: str) -> None:
    function, places = SHOWN[name]
    found = shown_by(function)
    assert (None if found is None else set(found)) == places


def test_a_tensor_is_a_bias_only_by_its_own_indices_in_order() -> None:
    found = added_by(lambda s, b, h, i, j: s + TABLE[h, i, j], torch.float32)
    assert found is not None
    assert found.table is TABLE
    assert found.axes == ("h", "i", "j")
    for other in (
        lambda s, b, h, i, j: s + TABLE[h, j, i],
        lambda s, b, h, i, j: s + TABLE[h, i, i],
        lambda s, b, h, i, j: s + TABLE[h + 1, i, j],
        lambda s, b, h, i, j: s + TABLE[2 * h, i, j],
        lambda s, b, h, i, j: s + TABLE[h, i + 1, j],
        lambda s, b, h, i, j: s - TABLE[h, i, j],
        lambda s, b, h, i, j: s + 2.0 * TABLE[h, i, j],
        lambda s, b, h, i, j: (s + TABLE[h, i, j]) + TABLE[h, j, i],
        lambda s, b, h, i, j: (s + 1.0) + TABLE[h, i, j],
        lambda s, b, h, i, j: torch.where(i >= j, s + TABLE[h, i, j], -math.inf),
    ):
        found = added_by(other, torch.float32)
        assert found is not None
        assert found.table is None


def test_a_captured_table_keeps_the_gradient_that_the_function_gives_it() -> None:
    learned = TABLE.clone().requires_grad_()

    def in_part(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        with torch.no_grad():
            added = learned[h, i, j]
        return s + added

    found = added_by(lambda s, b, h, i, j: s + learned[h, i, j], torch.float32)
    assert found is not None
    assert found.table is learned
    for other in (
        in_part,
        lambda s, b, h, i, j: s + learned[h, i, j].detach(),
        lambda s, b, h, i, j: s + _Halved.apply(learned[h, i, j]),
    ):
        found = added_by(other, torch.float32)
        assert found is not None
        assert found.table is None


def test_the_graphs_of_captured_tensors_are_not_walked_and_ways_that_meet_are_walked_once() -> None:
    deep = SLOPES.clone().requires_grad_()
    for _ in range(1500):
        deep = deep + torch.tanh(deep) * 0.001

    def many(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for ahead in range(64):
            s = torch.where(i > j + ahead, s + 1.0, s - 1.0)
        return s

    for function, places in ((lambda s, b, h, i, j: s + deep[h] * (i - j), {"h", "i - j"}), (many, {"i - j"})):
        found = added_by(function, torch.float32)
        assert found is not None
        assert set(found.places) == places
