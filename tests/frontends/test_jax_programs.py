"""Attentions written in JAX, as users write them: what `check` says, and that the numbers are JAX's."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import numpy
import pytest
import torch

import sqrtdk
from sqrtdk.frontends import from_jax
from tests.frontends.programs import T, jax
from tests.frontends.table import PROGRAMS
from tests.support.optional import optional
from tests.support.paths import ROOT


def _module(name: str) -> tuple[torch.nn.Module, tuple[Any, ...]]:
    program, expected = PROGRAMS[name]
    _ = optional(expected.package).__doc__  # skips where the library is missing
    function, parameters, inputs = program()
    module = from_jax(function, parameters, *inputs)
    return module, tuple(module.example[name] for name in inspect.signature(module.forward).parameters)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_check_reads_formula_verdict_and_sites(name: str) -> None:
    """`from_jax` itself compares the outputs with JAX's: it refuses more than rounding."""
    expected = PROGRAMS[name][1]
    module, inputs = _module(name)
    report = sqrtdk.check(module, inputs, laws="none")
    assert [call.call.site for call in report.calls] == list(expected.sites)
    assert {call.call.formula for call in report.calls} == {expected.formula}
    assert {call.verdict for call in report.calls} == {expected.verdict}
    assert not report.not_measured


def test_a_place_is_a_line_of_the_jax_file() -> None:
    module, inputs = _module("lines")
    for judged in sqrtdk.check(module, inputs, laws="none").calls:
        file, _, line = str(judged.call.softmax_at).rpartition(":")
        assert file == "tests/frontends/programs.py"
        assert "softmax" in (ROOT / file).read_text(encoding="utf-8").splitlines()[int(line) - 1]


@pytest.mark.full
def test_parameters_have_the_paths_of_the_leaves() -> None:
    """A stacked parameter is one of each layer; regions that read it hold it as well, under one name."""
    module, _ = _module("scan")
    names = dict(module.named_parameters())
    assert {f"layers.{n}.attn.wq" for n in range(3)} | {"embed", "norm"} <= names.keys()
    _, parameters, _ = PROGRAMS["scan"][0]()
    wq = parameters["layers"]["attn"]["wq"]
    assert torch.equal(names["layers.2.attn.wq"], torch.tensor(wq[2].tolist()))
    assert sum(x.numel() for x in names.values()) == sum(x.size for x in jax.tree.leaves(parameters))


@pytest.mark.parametrize("name", [pytest.param("scan", marks=pytest.mark.full), "nn_causal"])
def test_other_shapes_are_traced_anew(name: str) -> None:
    function, parameters, inputs = PROGRAMS[name][0]()
    other = [x[:1, :5] for x in inputs]
    assert torch.equal(from_jax(function, parameters, *inputs)(*other), from_jax(function, parameters, *other)(*other))


def test_a_parameter_in_bfloat16_makes_the_program_of_bfloat16() -> None:
    """`module.to(torch.bfloat16)` is JAX's program for such parameters, with its casts."""
    function, parameters, inputs = PROGRAMS["nn_causal"][0]()
    half = from_jax(function, parameters, *inputs).to(torch.bfloat16)
    cast = jax.tree.map(lambda x: x.astype("bfloat16"), (parameters, inputs))
    same = from_jax(function, cast[0], *cast[1])
    tensors = [torch.tensor(inputs[0].tolist(), dtype=torch.bfloat16)]
    assert torch.equal(half(*tensors), same(*tensors))


def test_float64_is_the_program_without_rounding() -> None:
    """Every conversion is widened: a bfloat16 program in float64 differs from itself by the rounding of bfloat16."""
    function, parameters, inputs = PROGRAMS["nn_bfloat16"][0]()
    half = from_jax(function, parameters, *inputs)
    x = torch.tensor(inputs[0].astype("float32").tolist())
    own, exact = half(x.bfloat16()), half.double()(x.double())
    plain = from_jax(function, jax.tree.map(lambda p: p.astype("float32"), parameters), x).double()(x.double())
    assert exact.dtype is torch.float64
    assert torch.equal(exact, plain)
    assert 0 < float((own.double() - exact).abs().max()) < 0.1


def test_a_key_is_an_input() -> None:
    function, parameters, (x, key) = PROGRAMS["key"][0]()
    module = from_jax(function, parameters, x, key)
    data = torch.tensor(jax.random.key_data(key).tolist())
    assert torch.equal(module(x, key), module(x, data))
    assert not torch.equal(module(x, key), module(x, jax.random.key(4)))


@pytest.mark.full
def test_a_loop_of_very_many_turns_is_not_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    function, parameters, inputs = PROGRAMS["scan"][0]()
    unrolled = from_jax(function, parameters, *inputs)
    monkeypatch.setattr("sqrtdk.frontends.jax.walk._MOST_UNROLLED", 20)
    looped = from_jax(function, parameters, *inputs)
    assert torch.equal(unrolled(*inputs), looped(*inputs))
    assert len(sqrtdk.check(looped, (torch.tensor(inputs[0].tolist()),), laws="none").calls) == 3


def test_inputs_go_by_name() -> None:
    module, (x, key) = _module("key")
    assert list(inspect.signature(module.forward).parameters) == ["x", "key"]
    assert torch.equal(module(x, key=key), module(x, key))
    assert module(x[:, :4].repeat(1, T // 2, 1)[:, :T], key).shape == x.shape


@pytest.mark.full
def test_a_function_in_other_forms() -> None:
    """Jitted, partial, an object; weights of numpy and torch; settings beside arrays; paths of haiku."""
    function, parameters, (x,) = PROGRAMS["nn_causal"][0]()
    right = from_jax(function, parameters, x)(x)

    class Called:
        def __call__(self, p: Any, x: Any) -> Any:
            return function(p, x)

    as_numpy = {name: numpy.asarray(value) for name, value in parameters.items()}
    as_torch = {name: torch.tensor(value) for name, value in as_numpy.items()}
    for form in (jax.jit(function), functools.partial(function), Called()):
        assert torch.equal(from_jax(form, parameters, x)(x), right)
    for weights in (as_numpy, as_torch):
        assert torch.equal(from_jax(function, weights, numpy.asarray(x))(x), right)
    settings = from_jax(
        lambda p, x, sign, mask: function(p["w"], x) * p["by"] * sign, {"w": parameters, "by": 2}, x, 3, None
    )
    assert torch.equal(settings(x, 3, None), right * 2 * 3)
    haiku = from_jax(lambda p, x: x @ p["mlp/~/linear"]["w"], {"mlp/~/linear": {"w": as_numpy["wq"]}}, x)
    assert [name for name, _ in haiku.named_parameters()] == ["mlp.linear.w"]
