"""Weights of a port to JAX that differ from the original's are named, with how; inputs are handed over by kind."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk.frontends import from_jax
from tests.frontends.llama import HEADS, LAYERS, D, E, original, parameters_of, port
from tests.frontends.programs import jax, jnp

IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))


def _of(group: str, name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def edit(parameters: Any) -> None:
        held = parameters["layers"][group]
        held[name] = change(held[name])

    return edit


def _exchange(parameters: Any) -> None:
    mlp = parameters["layers"]["mlp"]
    mlp["gate"], mlp["up"] = mlp["up"], mlp["gate"]


# what is done to the weights: the cause outside attention that is named, and a sentence on the weights
MISTAKES: dict[str, tuple[Callable[[Any], None], str, str]] = {
    "not_loaded": (_of("mlp", "gate", jnp.ones_like), "weights", "`layers.#.mlp.gate` is 1 throughout"),
    "other": (
        _of("mlp", "down", lambda w: w * 1.3 + 0.01),
        "weights",
        "`layers.#.mlp.down` has other numbers than A's",
    ),
    "scaled": (_of("attn", "wo", lambda w: w * 0.5), "weights_scaled", "`layers.#.attn.wo` is A's"),
    "layers": (_of("mlp", "up", lambda w: w[::-1]), "weights_elsewhere", "by its place `layers.0.mlp.up` would"),
    "exchanged": (_exchange, "weights_elsewhere", "by its place `layers.#.mlp.gate` would"),
    "transposed": (
        _of("attn", "wo", lambda w: w.reshape(LAYERS, D, D).swapaxes(1, 2).reshape(LAYERS, HEADS, E, D)),
        "weights_transposed",
        "its other matrices are transposed",
    ),
}


@functools.cache
def _model() -> Any:
    return original()


def _diff(edit: Callable[[Any], None] = lambda _: None, mistake: str = "") -> Any:
    parameters = parameters_of(_model())
    edit(parameters)
    return sqrtdk.diff(_model(), from_jax(port(mistake), parameters, jnp.asarray(IDS)), {"input_ids": IDS})


@pytest.mark.full
def test_weights_of_a_right_port_are_all_paired() -> None:
    report = _diff()
    assert report.same
    assert report.weights.alike == 0
    assert not report.weights.alone_a + report.weights.alone_b + report.weights.unread_b
    named = {pair.a: (pair.b, pair.layout) for pair in report.weights.pairs}
    assert len(named) == len(list(_model().parameters()))
    assert named["model.layers.1.self_attn.o_proj.weight"] == ("layers.1.attn.wo", "transposed")
    assert named["model.norm.weight"] == ("norm", "same")
    assert {pair.numbers for pair in report.weights.pairs} == {"same"}
    assert any(text.startswith("All 21 weights of A are in B") for text in report.paragraphs)


@pytest.mark.full
@pytest.mark.parametrize("name", MISTAKES)
def test_a_weight_that_differs_is_proven(name: str) -> None:
    edit, cause, sentence = MISTAKES[name]
    report = _diff(edit)
    assert not report.same
    assert {one.name for one in report.module_causes} == {cause}
    assert all(one.proven for one in report.module_causes)
    assert any(sentence in text for text in report.paragraphs), report.paragraphs


@pytest.mark.full
@pytest.mark.parametrize(
    ("mistake", "cause", "values"),
    [("norm_eps", "norm_eps", (1e-6, 1e-3)), ("activation", "activation", ("SiLUActivation", "gelu (tanh)"))],
)
def test_a_setting_of_a_norm_or_an_activation_is_proven(mistake: str, cause: str, values: tuple[Any, Any]) -> None:
    report = _diff(mistake=mistake)
    (found,) = report.module_causes
    assert (found.name, found.proven) == (cause, True)
    assert found.b == values[1]
    assert cause == "activation" or found.a == values[0]


@pytest.mark.full
def test_a_checkpoint_that_went_through_bfloat16_is_told() -> None:
    parameters = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), parameters_of(_model()))
    report = sqrtdk.diff(_model(), from_jax(port(), parameters, jnp.asarray(IDS)), {"input_ids": IDS})
    assert {one.name for one in report.module_causes} == {"weights_rounded"}
    assert {pair.dtype for pair in report.weights.pairs} == {"bfloat16"}


@pytest.mark.full
def test_inputs_go_by_kind_both_ways() -> None:
    parameters, llama = parameters_of(_model()), port()
    ids = jnp.asarray(IDS)

    def with_positions(p: Any, positions: Any, tokens: Any, mask: Any) -> Any:
        return llama(p, tokens)

    other = from_jax(with_positions, parameters, jnp.arange(12), ids, jnp.ones((2, 12), bool))
    for sides in ((_model(), other), (other, _model())):
        report = sqrtdk.diff(*sides)
        assert report.same
        assert any("positions is made for it" in note for note in report.environment["notes"])
        assert "JAX" in report.a.framework + report.b.framework


@pytest.mark.full
def test_conventions_of_jax_are_said() -> None:
    parameters = parameters_of(_model())
    parameters["norm"] = parameters["norm"].astype(jnp.bfloat16)
    with jax.default_matmul_precision("bfloat16"):
        notes = [str(note) for note in from_jax(port(), parameters, jnp.asarray(IDS)).notes]
    assert "matrix products is bfloat16" in notes[0]
    assert "1 of bfloat16" in notes[1]


@pytest.mark.full
def test_an_unread_weight_is_named() -> None:
    parameters = parameters_of(_model())
    parameters["extra"] = jnp.linspace(0, 1, 7)
    report = sqrtdk.diff(_model(), from_jax(port(), parameters, jnp.asarray(IDS)), {"input_ids": IDS})
    assert report.weights.unread_b == ("extra",)
    assert report.weights.alone_b == ("extra",)
    assert any("B never reads its `extra`" in text for text in report.paragraphs)
