"""Ports to JAX and MLX with quantised weights: their rounding is named, that of embeddings too; so are mistakes."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk.compare.records import DiffReport
from sqrtdk.frontends import from_jax, from_mlx
from tests.frontends import mlx_models
from tests.frontends.llama import original, parameters_of, port
from tests.frontends.programs import jax, jnp
from tests.support.optional import optional

IDS = torch.randint(0, 97, (2, 12), generator=torch.Generator().manual_seed(0))
MATRICES = ("wq", "wk", "wv", "wo", "gate", "up", "down")


def table(weight: Any, axes: tuple[int, ...]) -> dict[str, Any]:
    """Codes of 8 bits, and a scale for what is summed over `axes`."""
    scales = jnp.abs(weight).max(axes, keepdims=True) / 127
    return {"codes": jnp.round(weight / scales).astype(jnp.int8), "scales": scales}


def numbers(held: dict[str, Any]) -> Any:
    return held["codes"].astype(jnp.float32) * held["scales"]


def quantised(parameters: Any) -> Any:
    """The stacked matrices of the layers, and the embeddings, as tables."""

    def of(path: Any, weight: Any) -> Any:
        name = path[-1].key
        return table(weight, (1, 2) if name == "wo" else (1,)) if name in MATRICES else weight

    layers = jax.tree_util.tree_map_with_path(of, parameters["layers"])
    return {**parameters, "layers": layers, "embed": table(parameters["embed"], (1,))}


class Embeddings:
    """Rows of the codes become numbers once they are picked."""

    def __init__(self, held: dict[str, Any]) -> None:
        self.held = held

    def __getitem__(self, ids: Any) -> Any:
        return numbers({name: part[ids] for name, part in self.held.items()})


def with_tables(function: Any) -> Any:
    def program(parameters: Any, ids: Any) -> Any:
        layers = jax.tree_util.tree_map(
            lambda x: numbers(x) if isinstance(x, dict) else x,
            parameters["layers"],
            is_leaf=lambda x: isinstance(x, dict) and "codes" in x,
        )
        return function({**parameters, "layers": layers, "embed": Embeddings(parameters["embed"])}, ids)

    return program


@functools.cache
def model() -> Any:
    return original()


def of_jax(mistake: str, held: str) -> DiffReport:
    parameters = quantised(parameters_of(model()))
    if held == "numbers":  # rounded, and kept as floating-point numbers with the axes of the heads
        made = with_tables(lambda parameters, ids: parameters["layers"])(parameters, None)
        foreign = from_jax(port(mistake), {**parameters_of(model()), "layers": made}, jnp.asarray(IDS))
    else:
        foreign = from_jax(with_tables(port(mistake)), parameters, jnp.asarray(IDS))
    return sqrtdk.diff(model(), foreign, {"input_ids": IDS})


def roundings(report: DiffReport) -> dict[str, set[str]]:
    assert report.weights is not None
    assert report.weights.known is not None
    assert report.weights.known.faults == ()
    return {change.kind: {name.split(".")[-2] for name in change.weights} for change in report.weights.known.changes}


def causes(report: DiffReport) -> set[str]:
    return {cause.name for pair in report.pairs for cause in pair.causes}


@pytest.mark.parametrize(
    ("mistake", "held"),
    [("scale", "tables")]
    + [
        pytest.param(m, h, marks=pytest.mark.full)
        for m, h in (("", "tables"), ("", "numbers"), ("rope_base", "numbers"))
    ],
)
def test_tables_of_jax_are_rounded_weights(mistake: str, held: str) -> None:
    report = of_jax(mistake, held)
    ((kind, names),) = roundings(report).items()
    assert kind == "int8, a scale a row"
    assert names >= {"q_proj", "o_proj", "gate_proj"}
    assert ("embed_tokens" in names) is (held == "tables")
    assert causes(report) == ({mistake} if mistake else set())
    assert report.exit_code == bool(mistake)
    assert not report.weights.alone_a
    assert not report.weights.alone_b


def test_rows_that_whole_numbers_pick_leave_the_table_a_weight() -> None:
    """The index of a relative position bias is held beside it: its result is no weight, and the table is."""
    parameters = {"bias": jnp.ones((7, 4)), "index": jnp.arange(16).reshape(4, 4) % 7, "w": jnp.ones((4, 4))}

    def program(held: Any, x: Any) -> Any:
        scores = (x @ held["w"]) @ x.T + held["bias"][held["index"]].sum(-1)
        return jax.nn.softmax(scores, -1) @ x

    found = from_jax(program, parameters, jnp.ones((4, 4))).weights()
    assert {name: tuple(weight.shape) for name, weight in found.items()} == {"bias": (7, 4), "w": (4, 4)}


@pytest.mark.full
@pytest.mark.parametrize("mistake", ["", "scale"])
def test_the_original_takes_the_numbers_of_tables_that_come_first(mistake: str) -> None:
    foreign = from_jax(with_tables(port(mistake)), quantised(parameters_of(model())), jnp.asarray(IDS))
    report = sqrtdk.diff(foreign, model(), (IDS,))
    ((kind, names),) = roundings(report).items()
    assert kind == "int8, a scale a row"
    assert names >= {"q_proj", "o_proj", "gate_proj", "embed_tokens"}
    known = report.weights.known
    assert (known.coarse, known.changed) == ("A", "B")
    assert known.cost == pytest.approx(0.019, rel=0.2)
    assert causes(report) == ({mistake} if mistake else set())
    assert report.exit_code == bool(mistake)


@pytest.mark.full
def test_a_table_with_other_numbers_is_no_rounding() -> None:
    """One layer's matrix is another's: what is named is that, and its neighbours' rounding stays named."""
    parameters = quantised(parameters_of(model()))
    codes = parameters["layers"]["mlp"]["up"]["codes"]
    parameters["layers"]["mlp"]["up"]["codes"] = codes.at[1].set(codes[1, ::-1])
    foreign = from_jax(with_tables(port("")), parameters, jnp.asarray(IDS))
    report = sqrtdk.diff(model(), foreign, {"input_ids": IDS})
    assert report.exit_code == 1
    assert "model.layers.1.mlp.up_proj.weight" not in {
        name for change in report.weights.known.changes for name in change.weights
    }


@pytest.mark.parametrize(
    ("bits", "group", "base"),
    [(4, 32, 10000.0)] + [pytest.param(*case, marks=pytest.mark.full) for case in ((8, 64, 10000.0), (4, 32, 5e5))],
)
def test_what_mlx_quantises_is_rounded_weights(bits: int, group: int, base: float) -> None:
    nn, mx = optional("mlx.nn"), optional("mlx.core")
    family = next(one for one in mlx_models.FAMILIES.values() if one.name == "Llama")
    whole = mlx_models.original(family)

    def quantise(module: Any) -> None:
        nn.quantize(module, group_size=group, bits=bits)

    ids = mlx_models.ids()
    other = from_mlx(mlx_models.port(family, whole, quantise, rope_theta=base), None, mx.array(ids.numpy()))
    report = sqrtdk.diff(whole, other, {"input_ids": ids})
    ((kind, names),) = roundings(report).items()
    assert kind == f"int{bits}, groups of {group}, zero points"
    assert names >= {"q_proj", "down_proj", "embed_tokens", "lm_head"}
    assert causes(report) == (set() if base == 10000 else {"rope_base"})
    assert report.exit_code == (base != 10000)
