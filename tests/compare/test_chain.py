"""`diff` on differences outside of attentions: every one that was planted, by its part, and what it reaches."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.compare.diff import diff
from sqrtdk.compare.outside.changes import changes_of
from sqrtdk.compare.outside.parts import ModulePair
from tests.compare.chinese import paragraphs
from tests.compare.decoders import (
    IDS,
    WIDTH,
    Decoder,
    adapted,
    changed,
    decoder,
    doubled_head,
    first,
    lost_residual,
    other_activation,
    other_activation_first,
    other_embedding,
    other_norm,
    unscaled,
    without_lines,
)

Change = Callable[[Decoder], None]
EMBEDDING = "`embed`: `weight` differs in 1 of 23 rows"
BETWEEN = "`layers.0.mlp.1`: GELU in A, ReLU in B"
BEHIND = "`layers.1.mlp.1`: GELU in A, ReLU in B"
HEAD = "`head`: B's `weight` is 2 times A's"
PLANTED = [
    ([adapted, doubled_head], ["`layers.1.attend.out`: Linear in A, LowRank in B", HEAD]),
    ([other_embedding, other_activation_first], [EMBEDDING, BETWEEN]),
    ([other_activation_first, doubled_head], [BETWEEN, HEAD]),
    ([other_embedding, doubled_head], [EMBEDDING, HEAD]),
    ([other_norm, doubled_head], ["`norm`: `eps` is 1e-05 in A, 0.01 in B", HEAD]),
    ([other_embedding, other_activation, doubled_head], [EMBEDDING, BEHIND, HEAD]),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("changes", "entries"), PLANTED)
def test_every_difference_is_told_in_the_order_of_the_run(changes: list[Change], entries: list[str]) -> None:
    report = diff(decoder(), changed(*changes), IDS)
    told = [half.partition(" is in ")[2] for half in without_lines(report.outputs_from).split("; ")]
    assert told == [*entries, ""]
    assert without_lines(report.outputs_from).endswith("; nothing else differs")
    assert report.forwards == (2 + len(entries), 2)
    assert first(report) == (entries[0].split("`")[1],) * 2
    said = without_lines(paragraphs(report)[0])
    assert not re.search(r"\b[a-z]{3}", re.sub("`[^`]*`|layers[.a-z0-9]*", "", said)), said


def test_what_attentions_do_otherwise_is_told_apart() -> None:
    def scaled(model: Decoder) -> None:
        model.layers[1].attend.scale = 1.0  # type: ignore[union-attr,assignment]

    report = diff(decoder(), changed(other_embedding, scaled, doubled_head), IDS)
    assert [[cause.name for cause in pair.causes] for pair in report.pairs] == [["input"], ["scale"]]
    assert (
        without_lines(report.outputs_from)
        == f"the first difference is in {EMBEDDING}; another is in {HEAD}; the attentions explain the rest"
    )
    assert " It reaches the attention at layers.0.attend, and what the models return" in report.paragraphs[0]
    report = diff(decoder(), changed(unscaled, other_activation, doubled_head), IDS)
    assert without_lines(report.paragraphs[1]).endswith(
        f" explain a part. Another difference is in {BEHIND}. Another is in {HEAD}. Nothing else differs."
    )


def test_an_attention_that_is_reached_does_the_same_and_has_no_paragraph() -> None:
    report = diff(decoder(), changed(other_embedding), IDS)
    assert [pair.same for pair in report.pairs] == [False, False]
    (said,) = report.paragraphs
    assert said.startswith(
        f"The first difference is in {EMBEDDING}. It reaches the attentions from layers.0.attend on, and"
    )


class RootMeanSquare(nn.Module):
    """What `nn.RMSNorm` is, under names of its own."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.weight, self.variance_epsilon, self.unused = nn.Parameter(torch.ones(WIDTH)), eps, "a"

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()


def put(name: str, make: Callable[[Any], nn.Module]) -> Change:
    def change(model: Decoder) -> None:
        for layer in model.layers:
            path, _, last = name.rpartition(".")
            parent = layer.get_submodule(path)
            parent.add_module(last, make(parent.get_submodule(last)))

    return change


@torch.no_grad()
def without_bias(linear: nn.Linear) -> nn.Linear:
    linear.bias = None
    return linear


def test_a_change_that_many_modules_share_is_told_once() -> None:
    report = diff(decoder(), changed(put("mlp.1", lambda _: nn.GELU(approximate="tanh"))), IDS)
    half = "the first difference is in `layers.0.mlp.1`: `approximate` is none in A, tanh in B"
    assert without_lines(report.outputs_from) == f"{half}; the same holds for layers.1.mlp.1; nothing else differs"
    assert report.forwards == (3, 2)


def test_another_number_in_another_layer_is_told_apart() -> None:
    def change(model: Decoder) -> None:
        for number, layer in enumerate(model.layers):
            layer.norm2.eps = 0.1 + number  # type: ignore[union-attr,assignment,operator]

    told = without_lines(diff(decoder(), changed(change), IDS).outputs_from).split("; ")
    assert [half.partition(" is in ")[2] for half in told] == [
        "`layers.0.norm2`: `eps` is 1e-05 in A, 0.1 in B",
        "`layers.1.norm2`: `eps` is 1e-05 in A, 1.1 in B",
        "",
    ]


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        (0.123456, 0.123457, "is 0.123456 in A, 0.123457 in B"),
        ("x" * 5000 + "left", "x" * 5000 + "right", f"is ...{'x' * 30}left... in A, ...{'x' * 30}right... in B"),
        (functional.gelu, functional.relu, "is gelu in A, relu in B"),
    ],
)
def test_values_are_written_so_that_they_differ(one: Any, other: Any, told: str) -> None:
    modules = [nn.Identity() for _ in range(2)]
    for module, value in zip(modules, (one, other), strict=True):
        module.held = value
    assert [change.text for change in changes_of(ModulePair(*modules))] == [f"`held` {told}"]


def test_modules_of_two_names_differ_by_a_number() -> None:
    a, b = (
        changed(put("norm2", lambda _: RootMeanSquare(1e-6))),
        changed(put("norm2", lambda _: nn.RMSNorm(WIDTH, 0.1))),
    )
    said = without_lines(diff(a, b, IDS).outputs_from)
    assert "`layers.0.norm2`: `variance_epsilon` is 1e-06 in A, `eps` is 0.1 in B; the same holds for layers.1" in said
    assert diff(a, changed(put("norm2", lambda _: nn.RMSNorm(WIDTH, 1e-6))), IDS).same is True


def test_what_does_not_matter_is_not_named() -> None:
    def other(_: nn.Module) -> nn.Module:
        norm = RootMeanSquare(1e-6)
        norm.unused = "b"
        norm.forward = lambda x: 2 * RootMeanSquare.forward(norm, x)  # type: ignore[method-assign,assignment]
        return norm

    a, b = changed(put("norm2", lambda _: RootMeanSquare(1e-6))), changed(put("norm2", other))
    report = diff(a, b, IDS)
    assert without_lines(report.outputs_from).startswith(
        "the first difference is in `layers.0.norm2`: B's numbers are 2 times A's;"
    )
    assert "unused" not in without_lines(report.outputs_from)

    def coarse(_: nn.Module) -> nn.Module:
        norm = RootMeanSquare(0.1)
        norm.unused = "b"
        return norm

    report = diff(a, changed(put("norm2", coarse)), IDS)
    assert "`layers.0.norm2`: `variance_epsilon` is 1e-06 in A, 0.1 in B; the same holds" in without_lines(
        report.outputs_from
    )
    assert "unused" not in without_lines(report.outputs_from)


@torch.no_grad()
def other_linear(linear: nn.Linear) -> nn.Linear:
    linear.weight.mul_(torch.linspace(0.5, 2, linear.in_features))
    linear.bias.add_(torch.linspace(0.5, 2, linear.out_features))
    return linear


def test_two_parts_of_one_module() -> None:
    report = diff(decoder(), changed(put("mlp.2", other_linear)), IDS)
    halves = without_lines(report.outputs_from).split("; ")
    assert halves[0].startswith("the first difference is in `layers.0.mlp.2`: `weight` has other numbers (off by ")
    assert halves[1].startswith("there also `bias` has other numbers (off by ")
    assert halves[2:] == ["the same holds for layers.1.mlp.2", "nothing else differs"]
    assert not re.search(r"\b[a-z]{3}", re.sub("`[^`]*`|layers[.a-z0-9]*", "", without_lines(paragraphs(report)[0])))


@torch.no_grad()
def scattered(model: Decoder) -> None:
    for name, parameter in model.named_parameters():
        if "norm" in name and name.endswith("weight"):
            parameter.copy_(1 + torch.randn(WIDTH, generator=torch.Generator().manual_seed(sum(map(ord, name)))))


@torch.no_grad()
def swapped(model: Decoder) -> None:
    one, other = model.layers[1].norm2, model.norm
    one.weight, other.weight = other.weight, one.weight  # type: ignore[union-attr,assignment]


def test_weights_that_went_to_another_module() -> None:
    report = diff(changed(scattered), changed(scattered, swapped), IDS)
    assert without_lines(report.outputs_from).split("; ") == [
        "the first difference is in `layers.1.norm2`: B's `weight` is that of A's `norm`",
        "another is in `norm`: B's `weight` is that of A's `layers.1.norm2`",
        "nothing else differs",
    ]


def test_a_bias_that_is_left_out() -> None:
    report = diff(decoder(), changed(put("mlp.2", without_bias)), IDS)
    assert "`layers.0.mlp.2`: A has a `bias`, B none; the same holds for layers.1.mlp.2;" in without_lines(
        report.outputs_from
    )


class Product(nn.Module):
    """A linear layer that a port wrote without a bias."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


class Forgetful(nn.Linear):
    """A linear layer that holds its bias and does not add it."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


def forgetful(linear: nn.Linear) -> nn.Linear:
    linear.__class__ = Forgetful
    return linear


@pytest.mark.parametrize("name", ["mlp.0", "mlp.2"])
@pytest.mark.parametrize("make", [Product, forgetful])
def test_a_bias_that_a_linear_layer_of_another_class_does_not_add(name: str, make: Callable[[Any], nn.Module]) -> None:
    other = changed(put(name, make))
    for one, two, (adds, lacks) in ((decoder(), other, "AB"), (other, decoder(), "BA")):
        report = diff(one, two, IDS)
        half = f"the first difference is in `layers.0.{name}`: {adds} adds a `bias`, {lacks} does not"
        told = f"{half}; the same holds for layers.1.{name}; nothing else differs"
        assert without_lines(report.outputs_from) == told
        assert report.forwards[0] <= 4


def test_a_linear_layer_that_differs_by_more_than_its_bias_is_told_by_its_class() -> None:
    class Doubled(Product):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    told = diff(decoder(), changed(put("mlp.2", Doubled)), IDS).outputs_from
    assert "`layers.0.mlp.2`: Linear in A, Doubled in B; " in without_lines(told)


def forward_of(forward: Callable[[Any, Tensor], Tensor]) -> Change:
    """A forward in place of that of the first layer's class: nothing that a module holds tells of it."""

    def change(model: Decoder) -> None:
        layer = model.layers[0]
        layer.__class__ = type("Layer", (type(layer),), {"forward": forward})

    return change


UNHELD = [
    (
        lambda layer, x: layer.mlp(layer.norm2(x + layer.attend(layer.norm1(x)))),
        "`layers.0`, between `layers.0.mlp` and the output of `layers.0`: A adds the input of `layers.0.norm2`, B",
    ),
    (
        lambda layer, x: (y := layer.attend(layer.norm1(x))) + layer.mlp(layer.norm2(y)),
        "`layers.0`, between `layers.0.attend` and `layers.0.norm2`: A adds the input of `layers.0`, B does not",
    ),
    (
        lambda layer, x: (
            (y := x + layer.attend(layer.norm1(x))) + layer.mlp(layer.norm2(y.transpose(0, 1).reshape_as(y)))
        ),
        "`layers.0`, between `layers.0.attend` and `layers.0.norm2`: B has A's numbers in another order",
    ),
    (
        lambda layer, x: (y := x + layer.attend(layer.norm1(x))) + functional.softplus(layer.mlp(layer.norm2(y))),
        "`layers.0`, between `layers.0.mlp` and the output of `layers.0`; nothing else differs",
    ),
]


@pytest.mark.parametrize(("forward", "place"), UNHELD)
def test_what_no_part_of_a_module_tells_is_told_from_numbers(forward: Any, place: str) -> None:
    report = diff(decoder(), changed(forward_of(forward)), IDS)
    assert f"the first difference is in {place}" in without_lines(report.outputs_from)
    assert without_lines(report.outputs_from).endswith("nothing else differs")
    assert not re.search(r"[一-鿿]`|`[一-鿿]", paragraphs(report)[0])


def test_layers_that_differ_alike_in_what_is_not_known() -> None:
    def change(model: Decoder) -> None:
        for layer in model.layers:
            layer.__class__ = type("Layer", (type(layer),), {"forward": UNHELD[3][0]})

    place = "the first difference is in `layers.0`, between `layers.0.mlp` and the output of `layers.0`"
    told = without_lines(diff(decoder(), changed(change), IDS).outputs_from)
    assert told == f"{place}; the same holds for layers.1; nothing else differs"


def test_a_residual_of_another_size() -> None:
    def other(layer: Any, x: Tensor) -> Tensor:
        y = 0.5 * x + layer.attend(layer.norm1(x))
        return y + layer.mlp(layer.norm2(y))

    told = without_lines(diff(decoder(), changed(forward_of(other)), IDS).outputs_from)
    assert ": A adds 0.5 times the input of `layers.0` more than B; nothing else differs" in told


def test_a_difference_behind_one_that_is_not_known() -> None:
    report = diff(decoder(), changed(forward_of(UNHELD[3][0]), lost_residual, doubled_head), IDS)
    halves = without_lines(report.outputs_from).split("; ")
    assert halves[1:] == [
        "another is in `layers.1`, between `layers.1.attend` and `layers.1.norm2`: `kept` is 1 in A, 0 in B",
        f"another is in {HEAD}",
        "nothing else differs",
    ]
