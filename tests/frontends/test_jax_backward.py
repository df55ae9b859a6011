"""Gradients of JAX functions against torch: `custom_vjp` by its own rule, parameters by `jax.vjp`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sqrtdk
from sqrtdk import laws
from sqrtdk.audit.records import BROKEN, KEPT
from sqrtdk.compare.backward.records import BackwardDiff
from sqrtdk.frontends import from_jax
from sqrtdk.messages import Message
from tests.frontends.llama import original, parameters_of, port
from tests.frontends.programs import jax, jnp

FAULTS = {
    "backward scale": ("scale_missing", {"k"}),
    "backward group": ("group", {"k", "v"}),
    "backward mask": ("no_causal", {"q", "k", "v"}),
    "backward D": ("no_delta", {"q", "k"}),
}


def compared(mistake: str) -> BackwardDiff:
    model = original()
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    foreign = from_jax(port(mistake), parameters_of(model), jnp.asarray(ids))
    report = sqrtdk.diff(model, foreign, {"input_ids": ids}, backward=True)
    assert report.backward is not None
    assert not any(x.requires_grad for x in foreign.parameters())  # the user's module is as it was
    return report.backward


def code(text: str) -> str:
    assert isinstance(text, Message)
    while "what" in text.values:  # with the place, or the number of attentions
        text = text.values["what"]
    return str(text.id.rpartition(".")[2])


@pytest.mark.full
@pytest.mark.parametrize("mistake", FAULTS)
def test_a_wrong_derivative_of_a_jax_function_is_named(mistake: str) -> None:
    found = compared(mistake)
    expected, operands = FAULTS[mistake]
    assert found.reason is None
    assert {(one.side, code(one.text)) for one in found.faults} == {("b", expected)}
    wrong = {one.name for one in found.gradients if one.same is False and one.name != "parameter"}
    assert operands <= wrong
    assert found.first_module is not None
    assert "layers.1" in found.first_module.b  # the last layer is the first of the backward pass


@pytest.mark.full
@pytest.mark.parametrize("mistake", ["backward", "backward scale"])
def test_the_law_asks_a_jax_function_as_jax_differentiates_it(mistake: str) -> None:
    model = original()
    ids = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
    foreign = from_jax(port(mistake), parameters_of(model), jnp.asarray(ids))
    for answers in (laws.ask(foreign, (ids,), "gradient").answers, sqrtdk.check(foreign, (ids,), laws="all").laws):
        asked = [one for one in answers if one.law == "gradient"]
        if mistake == "backward":
            assert [one.state for one in asked] == [KEPT]
        else:
            assert {one.site: (one.state, code(one.reason)) for one in asked} == dict.fromkeys(
                ("layers.0.attention.attend.weights", "layers.1.attention.attend.weights"),
                (BROKEN, FAULTS[mistake][0]),
            )
    assert not any(x.requires_grad for x in foreign.parameters())  # the user's module is as it was


@pytest.mark.full
@pytest.mark.parametrize("mistake", ["", "backward"])
def test_a_right_port_has_the_same_gradients(mistake: str) -> None:
    found = compared(mistake)
    assert found.same is True, [one for one in found.gradients if one.same is not True]
    # `dot_product_attention` gives q and k an axis for the group: they are no tensors of the graph in any layout
    assert {one.name for one in found.gradients} == ({"q", "k", "v", "parameter"} if mistake else {"parameter"})


class Gate(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w, self.u = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(x @ self.w) * self.u
        return (y @ y.mT).softmax(-1) @ y


def _gate(how: str) -> Any:
    @jax.custom_jvp
    def tanh(x: Any) -> Any:
        return jnp.tanh(x)

    tanh.defjvp(lambda xs, ts: (jnp.tanh(xs[0]), ts[0] * (1 - jnp.tanh(xs[0]) ** 2) * (2 if how == "jvp" else 1)))

    def gate(p: Any, x: Any) -> Any:
        y = tanh(x @ p["w"]) * (jax.lax.stop_gradient(p["u"]) if how == "stopped" else p["u"])
        return jax.nn.softmax(y @ jnp.swapaxes(y, -1, -2), -1) @ y

    return gate


@pytest.mark.full
@pytest.mark.parametrize("how", ["", "jvp", "stopped"])
def test_gradients_of_parameters_are_those_of_jax(how: str) -> None:
    model, x = Gate(), torch.randn(2, 5, 8)
    parameters = {name: jnp.asarray(value.detach().numpy()) for name, value in model.named_parameters()}
    report = sqrtdk.diff(model, from_jax(_gate(how), parameters, jnp.asarray(x.numpy())), (x,), backward=True)
    found = report.backward
    assert found is not None
    wrong = {one.a: one.difference for one in found.gradients if one.same is False}
    assert set(wrong) == ({"w"} if how == "jvp" else set())
    assert found.only_a == (("u",) if how == "stopped" else ())
    if how == "jvp":
        assert wrong["w"] == pytest.approx(1, abs=1e-5)
