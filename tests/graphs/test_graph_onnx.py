"""Attentions of exported graphs: what the module computed with, and tensors that give the recorded output."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from sqrtdk.graphs import GraphRun, read_onnx
from sqrtdk.tracing.tensors import CallTensors, Vector
from tests.graphs.exports import Kept, allowed, build, export, inputs, logits, recomputed, repeated, run_module

pytest.importorskip("onnxscript", reason="onnxscript is not installed: torch.onnx.export needs it")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")

ROUNDING = 2e-5  # between two runs of a model of two layers in float32, whose values are of size 10 at most
FAST = [("qwen3", "sdpa", True), ("gemma2", "eager", False), ("gpt2", "sdpa", False)]
ALL = [
    (family, attn, dynamo)
    for family in ("gpt2", "llama", "bert", "t5", "gemma2", "qwen3", "opt", "gpt_neox", "falcon", "bart", "phi3")
    for attn in ("eager", "sdpa")
    for dynamo in (True, False)
    if (family, attn, dynamo) not in FAST
    and (family, attn) != ("gemma2", "sdpa")  # transformers refuses it
    and (family, attn, dynamo) != ("t5", "sdpa", True)  # the exporter refuses it
]
STEPS = {
    "qwen3": ["norm", "rope"],
    "llama": ["rope"],
    "gemma2": ["rope"],
    "gpt_neox": ["rope"],
    "phi3": ["rope"],
    "falcon": ["rope"],
}
LAYERS = ("model.layers.0.self_attn", "model.layers.1.self_attn")
SITES = {"qwen3": LAYERS, "llama": LAYERS, "gemma2": LAYERS, "gpt2": ("transformer.h.0.attn", "transformer.h.1.attn")}
NET = "net.model."  # the older exporter gets the model inside of another one
UNSEEN = ("falcon",)  # their attention is no function that can be listened to


def check_law(call: CallTensors) -> None:
    """The terms, q, k and v give the output in float64, to rounding."""
    assert call.missing is None
    difference = (recomputed(call) - call.output.double()).abs().max()
    assert float(difference) <= allowed(call)


def check_projection(vector: Vector) -> None:
    """The projection's weight, input and bias give what was projected."""
    projection = vector.projection
    assert projection is not None
    assert vector.projected is not None
    assert projection.weight is not None
    made = torch.einsum("bld,hed->bhle", projection.input.double(), projection.weight.double())
    if projection.bias is not None:
        made = made + projection.bias.double()[:, None]
    size = projection.input.double().norm(dim=-1).max() * projection.weight.double().norm(dim=-1).max() + 1
    torch.testing.assert_close(made, vector.projected.double(), rtol=0, atol=float(size) * 64 * 1.2e-7)


def check_against(call: CallTensors, kept: tuple[torch.Tensor, ...]) -> None:
    """The tensors are those that the module's attention function was called with; its scale may be folded into q, k."""
    query, key, value, output = kept
    heads = query.shape[1]
    folded = query.shape == call.query.values.shape and bool(torch.isclose(call.query.values, query, atol=1e-4).all())
    by = (1.0, 1.0) if folded else (call.query.factor, call.key.factor)
    pairs = (
        (call.query.values / by[0], query),
        (repeated(call.key.values / by[1], heads), repeated(key, heads)),
        (repeated(call.value.values, heads), repeated(value, heads)),
        (call.output, output),
    )
    for graph, module in pairs:
        torch.testing.assert_close(graph, module, rtol=0, atol=ROUNDING)


Read = Callable[..., tuple[GraphRun, Kept]]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> Read:
    """Export a model, read its graph and run its module; once for all tests of what is the same."""

    @functools.cache
    def made(family: str, attn: str, dynamo: bool, **options: Any) -> tuple[GraphRun, Kept]:
        path = tmp_path_factory.mktemp("graph") / "model.onnx"
        model, given = build(family, attn), inputs(family)
        export(model, given, path, dynamo=dynamo, **options)
        with pytest.MonkeyPatch.context() as patch:
            return read_onnx(path, given), run_module(model, given, patch)

    return made


def check(read: Read, family: str, attn: str, dynamo: bool, **options: Any) -> GraphRun:
    run, kept = read(family, attn, dynamo, **options)
    assert run.missing == ()
    assert kept.logits is not None
    torch.testing.assert_close(next(iter(run.outputs.values())), kept.logits, rtol=0, atol=10 * ROUNDING)
    assert len(run.calls) == (2 if family not in ("t5", "bart") else 6)
    if family not in UNSEEN:
        assert len(kept.calls) == len(run.calls)
        for call, tensors in zip(run.calls, kept.calls, strict=True):
            check_against(call, tensors)
    for call in run.calls:
        check_law(call)
        for vector in (call.query, call.key, call.value):
            check_projection(vector)
        assert call.site.removeprefix("net.") in SITES.get(family, (call.site.removeprefix("net."),))
        if family in STEPS:
            assert [step.name for step in call.query.steps] == STEPS[family]
            last = call.query.steps[-1].values
            assert last is not None
            torch.testing.assert_close(last * call.query.factor, call.query.values)
        else:
            torch.testing.assert_close(call.query.projected * call.query.factor, call.query.values)
    return run


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "attn", "dynamo"), FAST)
def test_a_graph_tells_what_the_module_computed_with(read: Read, family: str, attn: str, dynamo: bool) -> None:
    check(read, family, attn, dynamo)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "attn", "dynamo"), ALL)
def test_every_family_and_exporter(read: Read, family: str, attn: str, dynamo: bool) -> None:
    check(read, family, attn, dynamo)


@pytest.mark.slow
def test_one_operator_for_the_attention_is_read_too(read: Read) -> None:
    """Since opset 23 the exporter writes an operator of ONNX's own, whose logits are not in the graph."""
    run = check(read, "llama", "sdpa", True, opset_version=23)
    assert [term.name for term in run.calls[0].terms or ()] == ["scale", "mask"]
    assert run.opset == {"ai.onnx": 23}


def test_sites_and_terms_are_the_models_own(read: Read) -> None:
    run, _ = read("gemma2", "eager", False)
    first, second = run.calls
    assert (first.site, first.index, second.site) == (f"{NET}layers.0.self_attn", 0, f"{NET}layers.1.self_attn")
    assert [term.name for term in first.terms or ()] == ["scale", "softcap", "mask"]
    scale, cap, mask = first.terms or ()
    assert scale.value == pytest.approx(20**-0.5)
    assert cap.value == pytest.approx(50.0)
    assert (mask.detail, (second.terms or ())[-1].detail) == ("window", "causal")
    assert mask.fill == torch.finfo(torch.float32).min
    assert first.query.projection is not None
    assert first.query.projection.name == f"{NET}layers.0.self_attn.q_proj.weight"
    assert (run.producer.split()[0], run.forwards, run.versions.keys()) == ("pytorch", 4, {"onnxruntime", "onnx"})


def test_grouped_keys_have_the_features_of_their_projection(read: Read) -> None:
    """Four query heads read two key heads, each twice; the fused projection of GPT-2 is told apart."""
    run, _ = read("qwen3", "sdpa", True)
    key = run.calls[0].key.projection
    assert key is not None
    features = key.features
    assert features[:, 0].tolist() == ([0, 0, 24, 24] if len(features) == 4 else [0, 24])
    fused, _ = read("gpt2", "sdpa", False)
    firsts = [vector.projection.features[:, 0].tolist() for vector in vectors(fused.calls[0]) if vector.projection]
    assert firsts == [[0, 16, 32, 48], [64, 80, 96, 112], [128, 144, 160, 176]]


def vectors(call: CallTensors) -> tuple[Vector, Vector, Vector]:
    return call.query, call.key, call.value


def test_the_law_sees_a_wrong_term(read: Read) -> None:
    """The bound of the law is far below what one wrong term does."""
    run, _ = read("gemma2", "eager", False)
    call = run.calls[0]
    scale, cap, mask = call.terms or ()
    for wrong in (replace(scale, value=scale.value * 1.01), replace(mask, value=mask.value.roll(1, -1))):
        terms = tuple(wrong if term.name == wrong.name else term for term in (scale, cap, mask))
        with pytest.raises(AssertionError):
            check_law(replace(call, terms=terms))
    assert logits(call)[0].isfinite().all()
