"""Right ports to MLX: the same as the original, with its formula, and no rule finds anything."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk.frontends import from_mlx
from tests.frontends.mlx_models import FAMILIES, ids, original, port
from tests.frontends.mlx_ports import KINDS, Original, inputs
from tests.frontends.mlx_ports import port as attention
from tests.support.optional import optional

mx = optional("mlx.core")


def _array(tensor: torch.Tensor) -> Any:
    made = mx.array(tensor.float().numpy())
    return made.astype(mx.bfloat16) if tensor.dtype is torch.bfloat16 else made


@functools.cache
def _family(name: str) -> tuple[Any, torch.nn.Module]:
    model = original(FAMILIES[name])
    return model, from_mlx(port(FAMILIES[name], model), None, mx.array(ids().numpy().astype("int32")))


@functools.cache
def _kind(name: str) -> tuple[Any, torch.nn.Module]:
    kind, _ = KINDS[name]
    model = Original(kind)
    return model, from_mlx(attention(kind, model), None, **{n: _array(x) for n, x in inputs(kind).items()})


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_model_of_mlx_lm_is_the_same_as_transformers_own(name: str) -> None:
    family = FAMILIES[name]
    model, ported = _family(name)
    report = sqrtdk.check(ported, (ids(),), laws="none")
    assert tuple(call.call.formula for call in report.calls) == family.formulas
    assert [call.call.site for call in report.calls] == [f"model.layers.{n}.self_attn" for n in range(2)]
    assert not report.findings
    assert not report.not_measured
    compared = sqrtdk.diff(model, ported, {"input_ids": ids()})
    assert compared.same
    assert not any(pair.causes for pair in compared.pairs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", KINDS)
def test_an_attention_is_the_same_as_its_original(name: str) -> None:
    kind, formula = KINDS[name]
    model, ported = _kind(name)
    report = sqrtdk.check(ported, inputs(kind), laws="none")
    assert [call.call.formula for call in report.calls] == [formula]
    assert [call.verdict for call in report.calls] == ["exact"]
    assert not report.findings
    assert sqrtdk.diff(model, ported, inputs(kind)).same


@pytest.mark.full
def test_parameters_keep_their_names_and_numbers() -> None:
    model, ported = _family("llama")
    names = dict(model.named_parameters())
    own = dict(ported.named_parameters())
    assert own.keys() == names.keys()
    assert all(torch.equal(own[name], value) for name, value in names.items())


@pytest.mark.full
def test_a_quantised_model_is_that_of_its_rounded_weights() -> None:
    """`nn.quantize`: the weights are read exactly, so the model with these weights in float32 is the same."""
    mnn = optional("mlx.nn")
    model = original(FAMILIES["llama"])
    module = port(FAMILIES["llama"], model)
    mnn.quantize(module, group_size=32, bits=4, class_predicate=lambda path, part: "proj" in path)
    tokens = mx.array(ids().numpy().astype("int32"))
    ported = from_mlx(module, None, tokens)
    with torch.no_grad():
        for path, part in module.named_modules():
            if isinstance(part, mnn.QuantizedLinear):
                weight = mx.dequantize(part.weight, part.scales, part.biases, 32, 4)
                model.get_submodule(path).weight.copy_(torch.tensor(weight.tolist()))
    assert sqrtdk.diff(model, ported, {"input_ids": ids()}).same
    assert [call.call.formula for call in sqrtdk.check(ported, (ids(),), laws="none").calls] == [
        *FAMILIES["llama"].formulas
    ]
