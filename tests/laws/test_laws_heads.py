"""Law `heads`: heads with the keys, the mask or the bias of another are found, those that differ on purpose pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from sqrtdk import check, laws
from sqrtdk.audit.records import BROKEN, KEPT, NOT_ASKED, LawAnswer
from sqrtdk.laws.head_order import new_places
from tests.laws.head_models import (
    MASKS,
    Fused,
    Heads,
    Latent,
    Sinks,
    Terms,
    Windows,
    eager,
    grouped,
    halves_first,
    side_by_side,
    tiled,
    x_of,
)


def answer(model: nn.Module, inputs: Any = None) -> LawAnswer:
    (one,) = laws.ask(model.eval(), x_of() if inputs is None else inputs, "heads").answers
    return one


RIGHT: dict[str, Callable[[], nn.Module]] = {
    "one head of keys for each": Heads,
    "groups": lambda: Heads(2),
    "groups, eager": lambda: Heads(2, core=eager),
    "groups of a fused kernel": lambda: Heads(2, None, core=grouped),
    "one head of keys": lambda: Heads(1),
    "norm of a head": lambda: Heads(2, norm="each"),
    "norm of all heads": lambda: Heads(2, norm="all"),
    "three": lambda: Fused("three"),
    "by head": lambda: Fused("by head"),
    "by group": lambda: Fused("by group"),
}


@pytest.mark.parametrize("name", RIGHT)
def test_heads_in_any_layout_change_places(name: str) -> None:
    assert answer(RIGHT[name]()).state == KEPT


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("core", [eager, nn.functional.scaled_dot_product_attention])
def test_tiled_groups_are_found(core: Any, batch: int) -> None:
    one = answer(Heads(2, tiled, core=core), x_of(batch))
    assert (one.state, one.finding and one.finding.severity) == (BROKEN, "warn")
    assert "query heads read heads 0 1 0 1 of the keys, where groups side by side read 0 0 1 1" in one.reason


def test_tiled_groups_are_found_in_any_layout() -> None:
    assert answer(Fused("by group", wrong=True)).state == BROKEN
    assert answer(Heads(2, None, core=halves_first)).state == BROKEN
    assert answer(Sinks(tiled)).state == BROKEN


def test_keys_and_values_in_two_orders() -> None:
    one = answer(Heads(2, side_by_side, tiled))
    assert (one.state, one.finding and one.finding.severity) == (BROKEN, "fail")
    assert "heads 0 0 1 1 of the keys and heads 0 1 0 1 of the values" in one.reason


IDS = torch.arange(3 * 12).view(3, 12)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("multihead", [False, True])
@pytest.mark.parametrize("batch", [2, 3])
def test_masks_of_another_sample(batch: int, multihead: bool) -> None:
    inputs = {"input_ids": IDS[:batch], "attention_mask": MASKS[:batch]}
    assert answer(Terms("mask", multihead), inputs).state == KEPT
    one = answer(Terms("mask tiled", multihead), inputs)
    assert (one.state, one.finding and one.finding.severity) == (BROKEN, "fail")
    assert "some heads of a sample have the mask of another sample" in one.reason


def test_masks_of_another_sample_over_groups() -> None:
    inputs = {"input_ids": IDS[:2], "attention_mask": MASKS[:2]}
    assert [answer(Terms(which, groups=2), inputs).state for which in ("mask", "mask tiled")] == [KEPT, BROKEN]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("multihead", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3])
def test_biases_of_another_head(batch: int, multihead: bool) -> None:
    inputs = {"input_ids": IDS[:batch], "attention_mask": MASKS[:batch]}
    for right in ("bias", "both"):
        assert answer(Terms(right, multihead), inputs).state == NOT_ASKED
    one = answer(Terms("bias tiled", multihead), inputs)
    assert one.state == BROKEN
    assert "in equal samples, the same head has other biases" in one.reason


@pytest.mark.parametrize("model", [Latent, Sinks, Windows, lambda: Heads(norm="own")])
def test_heads_that_differ_on_purpose_or_can_not_be_moved(model: Callable[[], nn.Module]) -> None:
    for batch in (1, 2, 3):
        one = answer(model(), x_of(batch))
        assert one.state == NOT_ASKED
        assert one.reason


class Stack(nn.Module):
    """Three layers, of which the last is wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Heads(2), Fused("by group"), nn.Sequential(Heads(2, tiled))])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_only_the_layer_that_is_wrong_is_named() -> None:
    class Tiled(Heads):  # one attention of each class is asked
        pass

    model = Stack()
    model.layers[2] = Tiled(2, tiled)
    assert (answer(model).state, answer(model).site) == (BROKEN, "layers.2")


class Raising(Heads):
    """Raises from the second run on that has its query weights moved."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.equal(self.q.weight, self.first):
            raise ValueError("moved")
        return super().forward(x)


def test_parameters_are_the_user_s_own_again() -> None:
    for model in (Heads(2), Raising(2), Terms("mask", multihead=True)):
        model.first = model.q.weight.detach().clone() if isinstance(model, Heads) else None
        before = {name: (part, part.detach().clone(), part._version) for name, part in model.named_parameters()}
        inputs = {"input_ids": IDS[:2], "attention_mask": MASKS[:2]} if isinstance(model, Terms) else x_of()
        answer(model, inputs)
        after = dict(model.named_parameters())
        assert after.keys() == before.keys()
        for name, (part, numbers, version) in before.items():
            assert after[name] is part
            assert torch.equal(part, numbers)
            assert part._version == version


@pytest.mark.parametrize("groups", range(2, 9))
@pytest.mark.parametrize("size", range(2, 9))
def test_no_tiled_groups_pass(groups: int, size: int) -> None:
    query, keys = new_places(groups * size, groups)
    assert sorted(query) == list(range(groups * size))
    assert all(head // size == keys[place // size] for place, head in enumerate(query))
    assert any(head % groups != keys[place % groups] for place, head in enumerate(query))
    # nor masks of (batch * heads) that are tiled
    for batch in (2, 3, 4):
        assert any(head % batch != place % batch for place, head in enumerate(query))


def test_check_asks_it() -> None:
    report = check(Heads(2, tiled), x_of(), laws="all")
    assert [finding.rule for finding in report.findings if finding.severity == "warn"] == ["law_heads"]


def several(*parts: nn.Module) -> nn.Module:
    """Return the parts one after the other, each in a class of its own, as attentions of several kinds are."""
    named = [type(f"Kind{number}", (type(part),), {}) for number, part in enumerate(parts)]
    for part, own in zip(parts, named, strict=True):
        part.__class__ = own
    return nn.Sequential(*parts)


def test_what_is_not_asked_beside_what_is_kept_is_counted() -> None:
    one = answer(several(Heads(2), Sinks(), Heads(2), Heads(2)))
    assert one.state == KEPT
    assert one.reason == (
        "3 of 4 attentions; 1 not asked: its heads differ in more than their projections, as by a bias, a mask or a "
        "factor of each head"
    )
    one = answer(several(*(Heads(2) for _ in range(10))))
    assert (one.state, one.reason) == (
        KEPT, "8 of 10 attentions; 2 not asked: no more than 8 classes and layouts are asked",
    )  # fmt: skip
    # layers of one class are one kind
    assert answer(nn.Sequential(*(Heads(2) for _ in range(10)))).reason == ""
    one = answer(nn.Sequential(Heads(2), Heads(2), Sinks()))
    assert one.reason.startswith("2 of 3 attentions; 1 asked, for 2 of like class and layout; 1 not asked: its heads")


def test_what_is_not_asked_beside_what_is_broken_is_counted() -> None:
    broken, rest = laws.ask(several(Heads(2, tiled), Sinks()).eval(), x_of(), "heads").answers
    assert (broken.state, rest.state) == (BROKEN, NOT_ASKED)
    assert rest.reason.startswith("1 not asked: its heads differ")
