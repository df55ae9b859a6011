"""What a trace keeps of every call: computed again in float64 it gives what the model gave."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sqrtdk
from sqrtdk.messages import Message
from sqrtdk.tracing import Trace
from sqrtdk.tracing.calls.keep import NATIVE_MASKS
from sqrtdk.tracing.calls.terms import is_proven
from tests.attentions.blocks import WAYS
from tests.attentions.cases import CASES
from tests.attentions.each import each
from tests.attentions.layouts import LAID, B, D, Laid
from tests.support.needs import needs
from tests.trace.blocks_by_hand import MERGED
from tests.trace.grouped import WRITTEN, Grouped, dropped, fused, repeated, sunk
from tests.trace.kept import changed, check, known, output_faults, unlike, way_faults

FAST = ("fast", "encoder_nested")  # one operation from input to output
UNREAD = {"talking_heads_after": "its weights went through over the heads after the softmax"}
# Of whose projection no weight is known: a sum of two, a matrix a head, keys of the module's own beside the others.
IN_PARTS = {
    "two_projections": "projected",
    "rope_in_slices": "projected, lost",
    "mha_bias_kv": "values",
    "matrix_a_head": "projected",
}


def kept(model: nn.Module, *inputs: Any, **options: Any) -> Trace:
    with sqrtdk.trace(model, keep=True) as run:
        model(*inputs, **options)
    return run


@pytest.mark.sampled(10)
@pytest.mark.parametrize("name", CASES)
def test_every_style(name: str) -> None:
    made = CASES[name]()
    with sqrtdk.trace(made.model, keep=True) as run:
        made.run()
    calls = run.tensors
    assert len(calls) == len(run.calls) == len(made.expected)
    assert [fault for call in calls for fault in unlike(call)] == []
    fast = any(word in name for word in FAST) and "slow" not in name
    for call in calls:
        assert call.missing == (Message(NATIVE_MASKS) if fast else UNREAD.get(name))
        if call.missing is None:
            assert known(call)["key"] == IN_PARTS.get(name, "projection")


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", [*LAID])
def test_every_layout(name: str) -> None:
    attend, read, batch, heads, (rows, keys) = LAID[name]
    torch.manual_seed(0)
    run = kept(Laid(attend).double(), torch.randn(B, *read, D, dtype=torch.float64))
    check(run)
    assert run.tensors[0].query.values.shape[:3] == (batch, heads, rows)
    assert run.tensors[0].key.values.shape[2] == keys


@pytest.mark.sampled(5)
@pytest.mark.parametrize("write", WRITTEN)
@each("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_writing_of_groups(write: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    run = kept(Grouped(write, dtype), torch.randn(2, 6, 24).to(dtype))
    check(run)
    (call,) = run.tensors
    assert call.query.values.shape == (2, 8, 6, 8)
    assert [step.name for step in call.query.steps] == [step.name for step in call.key.steps] == ["norm", "rope"]
    assert known(call) == dict.fromkeys(("query", "key", "value"), "projection")
    assert call.query.projection.name == "q.weight"
    assert torch.equal(call.value.projection.features[0], torch.arange(8))


def of_rows(q: Tensor) -> Tensor:
    return (2.0 + torch.arange(q.shape[-2], dtype=q.dtype)).log()[:, None]


ROW_FACTORS = {
    "logits": lambda q, k: q @ k.mT * 0.3 * of_rows(q),
    "divided": lambda q, k: q @ k.mT * 0.3 / of_rows(q),
    "one a head and row": lambda q, k: (
        q @ k.mT * (of_rows(q) * torch.linspace(0.2, 0.4, 8, dtype=q.dtype)[:, None, None])
    ),
    "query": lambda q, k: (q * of_rows(q)) @ k.mT * 0.3,
}


@pytest.mark.parametrize("way", ROW_FACTORS)
def test_a_factor_of_each_row_is_kept(way: str) -> None:
    """Log n of the keys, say: a term where it meets the logits, a factor of q where it meets that."""

    def write(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.repeat_interleave(4, 1) for t in (k, v))
        return ROW_FACTORS[way](q, k).softmax(-1) @ v

    run = kept(Grouped(write), torch.randn(2, 6, 24))
    check(run)
    (call,) = run.tensors
    tensors = [term.value.shape for term in call.terms if isinstance(term.value, Tensor)]
    heads = 8 if way == "one a head and row" else 1
    assert tensors == ([] if way == "query" else [(1, heads, 6, 1)])
    assert isinstance(call.query.factor, Tensor) == (way == "query")


AUTOCAST = pytest.param("autocast", marks=needs("rms_norm in float32 under autocast", torch="2.8"))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.filterwarnings("ignore:`torch.jit")
@pytest.mark.parametrize("way", [AUTOCAST, "compile", "checkpoint", "dropout", "no_grad"])
def test_ways_to_run(way: str) -> None:
    torch.manual_seed(0)
    model, x = Grouped(fused if way != "dropout" else dropped), torch.randn(2, 6, 24)

    def run() -> Any:
        if way == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return model(x)
        if way == "checkpoint":
            return checkpoint(model, x, use_reentrant=False)
        if way == "no_grad":
            with torch.no_grad():
                return model(x)
        return torch.compile(model, backend="eager")(x) if way == "compile" else model(x)

    with sqrtdk.trace(model, keep=True) as traced:
        run()
    check(traced)
    (call,) = traced.tensors
    assert (call.dropout, call.kept is not None) == ((0.4, True) if way == "dropout" else (0.0, False))


@each("name", [*WAYS])
def test_blocks_of_keys_are_put_together(name: str) -> None:
    """Those under one sum of exponentials; softmaxes of blocks stay apart."""
    q, k, v = (torch.randn(2, 4, 8, 8) for _ in range(3))

    class Blocks(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Any:
            return WAYS[name].way(q * 1, k * 1, v * 1, (0.3,) * 2, (None, None))

    run = kept(Blocks(), q, k, v)
    (call,) = run.tensors
    if name in MERGED:
        assert call.missing == "it was computed in blocks of keys"
        assert not call.query.values.numel()
        return
    check(run)
    for vector, whole in ((call.query, q), (call.key, k), (call.value, v)):
        assert torch.allclose(vector.values[..., :8] / vector.factor, whole)
    assert torch.allclose(call.output[..., :8], (q @ k.mT * 0.3).softmax(-1) @ v, atol=1e-5)


def test_what_was_enlarged_is_not_kept() -> None:
    model = Grouped(fused)
    with sqrtdk.trace(model, keep=True, enlarge={("", 0): 4.0}) as run:
        model(torch.randn(2, 6, 24))
    assert [call.missing for call in run.tensors] == ["its q was enlarged"]


@each("write", [repeated, fused, dropped])
def test_keeping_changes_nothing(write: Any) -> None:
    """Neither outputs, gradients nor records, nor the random numbers that are drawn next."""
    model, x = Grouped(write), torch.randn(2, 6, 24)

    def run(**options: Any) -> tuple[Any, ...]:
        torch.manual_seed(3)
        model.zero_grad()
        with sqrtdk.trace(model, **options) as traced:
            output = model(x)
        output.sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        return output, gradients, torch.rand(4), traced.calls, traced.not_attention, traced.not_measured

    plain, keeping = run(), run(keep=True)
    assert torch.equal(plain[0], keeping[0])
    assert all(map(torch.equal, plain[1], keeping[1]))
    assert torch.equal(plain[2], keeping[2])
    assert plain[3:] == keeping[3:]


def test_nothing_is_left_behind() -> None:
    model, x = Grouped(repeated), torch.randn(2, 6, 24)
    run = kept(model, x)
    held = [weakref.ref(call.query.values) for call in run.tensors]
    del run
    gc.collect()
    assert [ref() for ref in held] == [None]
    with sqrtdk.trace(model) as plain:
        model(x)
    assert plain.tensors == ()


def test_a_write_after_the_attention_does_not_reach_what_is_kept() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            z = (q @ k.mT * 0.3).softmax(-1) @ v
            for tensor in (q, k, v, x):
                tensor.zero_()
            out = z.clone()
            z.zero_()
            return out

    with torch.no_grad():
        run = kept(Reused(), torch.randn(2, 6, 8))
    check(run)


def test_the_law_sees_what_is_wrong() -> None:
    """Each part of a call, changed, is noticed."""
    torch.manual_seed(0)
    (call,) = kept(Grouped(sunk), torch.randn(2, 6, 24)).tensors
    assert unlike(call) == []
    query, key = call.query, call.key
    for wrong in (
        changed(call, terms=call.terms[1:]),
        changed(call, terms=call.terms[:-1]),
        changed(call, value=changed(call.value, values=call.value.values.flip(1))),
        changed(call, key=changed(key, values=key.values.flip(1))),
        changed(call, output=call.output * (1 + 1e-5)),
    ):
        assert output_faults(wrong) != []
    projection = query.projection
    for vector in (
        changed(query, factor=1.001),
        changed(query, steps=query.steps[1:]),
        changed(query, steps=query.steps[::-1]),
        changed(query, projection=changed(projection, bias=None)),
        changed(query, projection=changed(projection, weight=projection.weight.flip(0))),
        changed(query, projection=changed(projection, input=projection.input.flip(1))),
    ):
        assert way_faults(vector) != []


@each("dtype", [torch.float32, torch.float64])
def test_the_proof_allows_rounding_and_no_more(dtype: torch.dtype) -> None:
    """A tenth of a percent of the scale is seen, which the output hardly shows."""
    torch.manual_seed(0)
    (call,) = kept(Grouped(repeated, dtype), torch.randn(2, 6, 24).to(dtype)).tensors
    (scale,) = call.terms
    assert is_proven(call)
    assert not is_proven(changed(call, terms=(changed(scale, value=scale.value * 1.001),)))
    assert not is_proven(changed(call, output=call.output * 1.0001))
    assert not is_proven(changed(call, output=call.output.flip(2)))
    assert not is_proven(changed(call, terms=()))


class Centred(nn.Module):
    """A LayerNorm by hand, as Cohere writes it: its gain has a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        return self.weight.to(torch.float64) * ((x - mean) * torch.rsqrt(variance + 1e-5))


@each(
    "make, kind, gain",
    [
        (Centred, "layer", "weight"),
        (lambda: nn.LayerNorm(8), "layer", "weight"),
        (lambda: nn.RMSNorm(8), "rms", "weight"),
        (lambda: nn.RMSNorm(8, elementwise_affine=False), "rms", ""),
    ],
)
def test_a_norm_tells_its_kind_and_the_name_of_its_gain(make: Any, kind: str, gain: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
            self.q_norm, self.k_norm = make(), make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = (part(x).unflatten(-1, (2, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
            return torch.nn.functional.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)

    run = kept(Normed().double(), torch.randn(2, 5, 16, dtype=torch.float64))
    for side, vector in (("q", run.tensors[0].query), ("k", run.tensors[0].key)):
        (step,) = vector.steps
        assert (step.name, step.detail) == ("norm", kind)
        assert step.gain == (f"{side}_norm.{gain}" if gain else "")
    assert run.calls[0].norm == kind
