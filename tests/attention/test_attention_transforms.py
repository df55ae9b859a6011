"""The op under what transforms code: compile, export, torch.func, autocast, and tensors without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import sqrtdk
from sqrtdk import AuxRequest, positions, scores
from sqrtdk.stats import AuxOutput
from tests.attention.calls import close, close_gradients
from tests.tolerances import half_complaint

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "softcap": {"softcap": 3.0, "is_causal": True},
    "sinks": {"sinks": 0.0},
    "cosine": {"score": scores.cosine(gain=5.0)},
    "alibi": {"bias": positions.alibi(4), "impl": "dense"},
    "window": {"window": (2, 0)},
}
over_calls = pytest.mark.parametrize("name", CALLS)
SHAPE = (2, 4, 9, 8)
ROWS = 2 * 4 * 9


def of(name: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: sqrtdk.attention(q, k, v, **CALLS[name])


def qkv(*lead: int) -> list[Tensor]:
    return [torch.randn(*lead, *SHAPE) for _ in range(3)]


@pytest.mark.sampled(1)
@over_calls
def test_compile_without_a_graph_break(name: str) -> None:
    torch.compiler.reset()
    given = [t.requires_grad_() for t in qkv()]
    compiled = torch.compile(of(name), fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*given), of(name)(*given)
    close(found, wanted)
    close_gradients(*(torch.autograd.grad(x.square().sum(), given) for x in (found, wanted)), rows=ROWS)


@pytest.mark.full
def test_compile_with_statistics() -> None:
    torch.compiler.reset()
    q, k, v = qkv()

    def run(q: Tensor, k: Tensor, v: Tensor) -> AuxOutput:
        return sqrtdk.attention(q, k, v, is_causal=True, return_aux=AuxRequest.all())[1]

    for found, wanted in zip(
        torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v), run(q, k, v), strict=True
    ):
        close(found, wanted)


@over_calls
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_vmap(name: str) -> None:
    q, k, v = qkv(3)
    wanted = torch.stack([of(name)(*each) for each in zip(q, k, v, strict=True)])
    close(torch.vmap(of(name))(q, k, v), wanted)


@over_calls
def test_gradients_of_torch_func(name: str) -> None:
    q, k, v = qkv()
    found = torch.func.grad(lambda q: of(name)(q, k, v).square().sum())(q)
    leaf = q.clone().requires_grad_()
    close_gradients([found], torch.autograd.grad(of(name)(leaf, k, v).square().sum(), leaf), rows=ROWS)


@pytest.mark.sampled(2)
@over_calls
def test_export(name: str) -> None:
    class Exported(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return of(name)(q, k, v)

    given = tuple(qkv())
    program = torch.export.export(Exported(), given)
    close(program.module()(*given), of(name)(*given))


@pytest.mark.sampled(5)
@over_calls
@pytest.mark.parametrize("kind", ["meta", "fake"])
def test_tensors_without_data(name: str, kind: str) -> None:
    options = {key: value for key, value in CALLS[name].items() if key != "bias"}
    with FakeTensorMode() if kind == "fake" else torch.device("meta"):
        q = torch.empty(SHAPE)
        output, aux = sqrtdk.attention(q, q, q, return_aux=AuxRequest.all(), **options)
    assert output.shape == SHAPE
    assert [value.shape for value in aux] == [SHAPE[:-1]] * 10


@over_calls
def test_autocast_gives_its_dtype(name: str) -> None:
    q, k, v = qkv()
    with torch.autocast("cpu", torch.bfloat16):
        found = of(name)(q, k, v)
    assert found.dtype == torch.bfloat16
    half = [t.bfloat16() for t in (q, k, v)]
    exact = of(name)(*(t.double() for t in half))
    assert half_complaint(found, exact, [of(name)(*half)], torch.bfloat16) is None
