"""Attention inside programs and transforms: exported graphs, TorchScript, adapters, quantised weights, autocast."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn
from torch.utils.checkpoint import checkpoint

import sqrtdk
from sqrtdk.errors import InvalidTypeError
from sqrtdk.tracing import AttentionCall, Trace
from tests.attentions.each import each
from tests.attentions.programs import (
    ROOT,
    WIDTH,
    Adapter,
    Attention,
    ByDirection,
    ByLibrary,
    InPlace,
    Merging,
    Net,
    Packed,
    Scriptable,
    SizedAfter,
    Whole,
    WholeInputs,
    changed,
    rotary_mm,
    whole,
)

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
SITES = ["blocks.0.attn", "blocks.1.attn"]
FORMULA = {ROOT: "softmax(0.3536 * q.k)", 1.0: "softmax(q.k)"}


def run_of(model: Any, *inputs: Tensor) -> Trace:
    """One run, its output bit-equal to the run without a trace."""
    inputs = inputs or (torch.randn(2, 6, WIDTH),)
    with torch.no_grad():
        plain = model(*inputs)
        with sqrtdk.trace(model) as run:
            observed = model(*inputs)
    assert torch.equal(plain, observed)
    return run


def calls_of(model: Any, *inputs: Tensor) -> tuple[AttentionCall, ...]:
    run = run_of(model, *inputs)
    assert run.not_attention == run.not_measured == ()
    return run.calls


def check_calls(calls: tuple[AttentionCall, ...], scale: float, sites: list[str]) -> None:
    assert [call.site for call in calls] == sites
    for call in calls:
        assert (call.formula, call.heads, call.unknown) == (FORMULA[scale], 4, ())
        assert call.scale.effective == pytest.approx(scale)
        assert call.scale.agree is True


# -- programs ----------------------------------------------------------------------------------------------------------


@each("scale, fused, decomposed", [(ROOT, False, True), (ROOT, True, False), (1.0, False, False)])
def test_an_exported_program_names_its_sites(scale: float, fused: bool, decomposed: bool) -> None:
    program = torch.export.export(Net(scale, fused).eval(), (torch.randn(2, 6, WIDTH),))
    if decomposed:
        program = program.run_decompositions()
    check_calls(calls_of(program.module()), scale, SITES)


@pytest.mark.full
def test_an_exported_program_runs_at_other_sizes() -> None:
    sizes = {0: torch.export.Dim("rows", min=2, max=8), 1: torch.export.Dim("tokens", min=2, max=64)}
    program = torch.export.export(Net().eval(), (torch.randn(2, 6, WIDTH),), dynamic_shapes={"x": sizes})
    calls = calls_of(program.module(), torch.randn(3, 9, WIDTH))
    check_calls(calls, ROOT, SITES)
    assert {(call.batch, call.query_len) for call in calls} == {(3, 9)}


def test_a_program_inside_a_model_is_named_beneath_it() -> None:
    program = torch.export.export(Net().eval(), (torch.randn(2, 6, WIDTH),)).module()
    check_calls(calls_of(nn.Sequential(nn.Linear(WIDTH, WIDTH), program)), ROOT, [f"1.{site}" for site in SITES])


def test_an_exported_program_itself_is_refused_with_what_to_pass() -> None:
    program = torch.export.export(Attention().eval(), (torch.randn(2, 6, WIDTH),))
    for refuse in (lambda: sqrtdk.trace(program), lambda: sqrtdk.check(program, torch.randn(2, 6, WIDTH))):
        with pytest.raises(InvalidTypeError) as caught:
            refuse()
        assert "module()" in caught.value.hint


@each("fused", [False, True])
@each("make", [torch.fx.symbolic_trace, lambda m: torch.jit.trace(m, (torch.randn(2, 6, WIDTH),))])
def test_traced_graphs_name_their_sites(make: Callable[[nn.Module], nn.Module], fused: bool) -> None:
    check_calls(calls_of(make(Net(fused=fused).eval())), ROOT, SITES)


@each("scale", [ROOT, 1.0])
@each("fused", [False, True])
def test_torchscript_is_read_before_and_after_it_has_warmed_up(fused: bool, scale: float) -> None:
    """From its second call on, TorchScript runs a graph made for what it has seen."""
    model = torch.jit.script(nn.Sequential(Scriptable(scale, fused), nn.GELU(), Scriptable(scale, fused)))
    for _ in range(3):
        check_calls(calls_of(model), scale, ["0", "2"])


@each("scale", [ROOT, 1.0])
def test_frozen_torchscript_is_never_judged_by_what_is_hidden(scale: float) -> None:
    model = torch.jit.freeze(torch.jit.script(nn.Sequential(Scriptable(scale, False)).eval()))
    run = run_of(model)
    assert all(call.scale.effective is None for call in run.calls)
    assert run.not_measured


# -- weights -----------------------------------------------------------------------------------------------------------


@each("scale", [ROOT, 1.0])
@each("kind", [Adapter, InPlace, Merging, ByDirection])
def test_an_adapters_size_is_no_factor_of_the_attention(kind: type[Adapter], scale: float) -> None:
    check_calls(calls_of(changed(Net(scale), kind).eval()), scale, SITES)


def test_an_adapter_reads_alike_trained_and_merged() -> None:
    model = changed(Net(), Adapter)
    with sqrtdk.trace(model) as run:
        model(torch.randn(2, 6, WIDTH))
    check_calls(run.calls, ROOT, SITES)
    for part in model.modules():
        if isinstance(part, Adapter):
            part.merge()
    check_calls(calls_of(model.eval()), ROOT, SITES)


@each("scale", [ROOT, 1.0])
@each("fused", [False, True])
@each("kind", [Whole, SizedAfter, WholeInputs, Packed])
def test_weights_of_a_class_of_their_own_project(kind: type[Whole], fused: bool, scale: float) -> None:
    model = changed(Net(scale, fused), lambda layer: whole(layer.weight.detach(), kind))
    rows = torch.randn(4, 6, WIDTH)  # torch._int_mm wants more than 16
    check_calls(calls_of(model, rows), scale, SITES)


@each("scale", [ROOT, 1.0])
@each("inputs", [False, True])
def test_a_librarys_product_with_weights_projects(inputs: bool, scale: float) -> None:
    calls = calls_of(changed(Net(scale), lambda layer: ByLibrary(layer, inputs)))
    check_calls(calls, scale, SITES)
    assert all(call.self_attention is not False for call in calls)


def test_a_librarys_operation_without_weights_is_read_from_what_it_does() -> None:
    class Doubled(Attention):
        def forward(self, x: Tensor) -> Tensor:
            return (rotary_mm(self.q(x)) @ self.k(x).mT * ROOT).softmax(-1) @ self.v(x)

    (call,) = calls_of(Doubled())
    assert call.unknown == ()
    assert call.scale.effective == pytest.approx(2 * ROOT)


@each("scale", [ROOT, 1.0])
@each("dtype", [torch.qint8, torch.float16])
def test_dynamically_quantised_layers_project(dtype: torch.dtype, scale: float) -> None:
    model = torch.ao.quantization.quantize_dynamic(Net(scale), {nn.Linear}, dtype=dtype)
    check_calls(calls_of(model), scale, SITES)


@each("scale", [ROOT, 1.0])
def test_quantised_layers_project_where_their_output_becomes_floating_point(scale: float) -> None:
    class Quantised(Attention):
        def __init__(self) -> None:
            super().__init__(scale)
            self.into, self.back = torch.ao.quantization.QuantStub(), torch.ao.quantization.DeQuantStub()

        def forward(self, x: Tensor) -> Tensor:
            x = self.into(x)
            q, k, v = (self.back(f(x)).unflatten(-1, (4, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
            return (q @ k.mT * self.number).softmax(-1) @ v

    model = Quantised().eval()
    model.qconfig = torch.ao.quantization.get_default_qconfig("x86")
    prepared = torch.ao.quantization.prepare(model)
    prepared(torch.randn(2, 6, WIDTH))
    check_calls(calls_of(torch.ao.quantization.convert(prepared)), scale, [""])


# -- around the forward ------------------------------------------------------------------------------------------------


class Around(nn.Module):
    """A model that runs inside something else."""

    def __init__(self, model: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.model, self.run = model, run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.model, x)


def cast_to(dtype: torch.dtype) -> Callable[[nn.Module, Tensor], Tensor]:
    def run(model: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype):
            return model(model(x))  # the second time, the cast weights come from autocast's cache

    return run


@each("dtype", [torch.bfloat16, torch.float16])
@each("scale, fused", [(ROOT, False), (ROOT, True), (1.0, False)])
def test_a_forward_under_autocast_is_read(scale: float, fused: bool, dtype: torch.dtype) -> None:
    calls = calls_of(Around(Net(scale, fused), cast_to(dtype)))
    assert [call.site for call in calls] == [f"model.{site}" for site in SITES] * 2
    for call in calls:
        assert call.formula == FORMULA[scale]
        assert call.scale.effective == pytest.approx(scale)
        assert call.scale.agree is not False
        assert call.dtype == str(dtype).removeprefix("torch.")


def ensemble(model: nn.Module, x: Tensor) -> Tensor:
    """Two models in one, by a batch of weights."""
    both = {name: torch.stack([p, p * 1.1]) for name, p in model.named_parameters()}
    return func.vmap(lambda weights: func.functional_call(model, weights, (x,)))(both)


TRANSFORMS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "functional_call": lambda m, x: func.functional_call(m, dict(m.named_parameters()), (x,)),
    "functional_call, other weights": lambda m, x: func.functional_call(
        m, {name: p * 1.5 for name, p in m.named_parameters()}, (x,)
    ),
    "vmap": lambda m, x: func.vmap(m)(x),
    "vmap over batches": lambda m, x: func.vmap(m)(x[:, None]),
    "ensemble": ensemble,
    "grad": lambda m, x: func.grad(lambda y: m(y).sum())(x),
    "vjp": lambda m, x: func.vjp(m, x)[1](torch.ones_like(x))[0],
    "jvp": lambda m, x: func.jvp(m, (x,), (torch.ones_like(x),))[1],
    "gradients of samples": lambda m, x: func.vmap(func.grad(lambda y: m(y).sum()))(x),
    "hessian": lambda m, x: func.hessian(lambda y: m(y).sum())(x[0, :2]),
    "functionalize": lambda m, x: func.functionalize(m)(x),
}


@each("scale", [ROOT, 1.0])
@each("fused", [False, True])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_forward_inside_a_transform_is_read(name: str, fused: bool, scale: float) -> None:
    if fused and name in ("jvp", "hessian"):  # torch has no forward derivative of its kernel
        return
    calls = calls_of(Around(Attention(scale, fused), TRANSFORMS[name]))
    assert {call.site for call in calls} == {"model"}
    for call in calls:
        assert call.formula == FORMULA[scale]
        assert call.scale.effective == pytest.approx(scale)
        assert call.scale.agree is True


@each("implementation", ["eager", "sdpa"])
@each("reentrant", [True, False])
def test_a_model_that_recomputes_its_layers_is_counted_once(reentrant: bool, implementation: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64)
    model = LlamaForCausalLM._from_config(config, attn_implementation=implementation).train()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    ids = torch.randint(64, (2, 7))

    def step() -> list[Tensor]:
        model.zero_grad()
        model(ids, labels=ids, use_cache=False).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = step()
    with sqrtdk.trace(model) as run:
        observed = step()
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))
    assert [(call.site, call.index) for call in run.calls] == [(f"model.layers.{i}.self_attn", 0) for i in range(2)]
    assert {call.formula for call in run.calls} == {"softmax(0.3536 * rope(q).rope(k) + causal)"}
    assert run.not_attention == run.not_measured == ()


@pytest.mark.full
def test_an_exported_language_model_keeps_its_mask_and_its_heads() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=2, vocab_size=64)
    model = LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    inputs = {"input_ids": torch.randint(64, (2, 7)), "use_cache": False}
    program = torch.export.export(model, (), inputs, strict=False).module()
    with torch.no_grad(), sqrtdk.trace(program) as run:
        program(**inputs)
    assert [call.site for call in run.calls] == [f"model.layers.{i}.self_attn" for i in range(2)]
    for call in run.calls:
        assert call.formula == "softmax(0.3536 * rope(q).rope(k) + causal)"
        assert (call.heads, call.kv_heads, call.rope, call.scale.agree) == (4, 2, True, True)


@each("reentrant", [True, False])
def test_an_adapted_block_that_is_recomputed_is_counted_once(reentrant: bool) -> None:
    model = changed(Net(), Adapter)
    with sqrtdk.trace(model) as run:
        x = torch.randn(2, 6, WIDTH, requires_grad=True)
        checkpoint(model, x, use_reentrant=reentrant).sum().backward()
    check_calls(run.calls, ROOT, SITES)
