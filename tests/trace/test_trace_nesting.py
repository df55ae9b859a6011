"""What runs around a trace: nested traces, other threads, backward passes, checkpointing, compiled modules."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint

import sqrtdk
from sqrtdk.tracing import AttentionCall
from tests.attentions.each import each

LONG_S = 120.0  # that a thread waits for another one: a busy machine is no failure


@pytest.fixture(autouse=True)
def _default_stance() -> Iterator[None]:
    """A stance that a test left behind must not reach the next one."""
    yield
    torch.compiler.set_stance("default")


class Attend(nn.Module):
    """One attention, eager or fused."""

    def __init__(self, eager: bool = True, width: int = 16) -> None:
        super().__init__()
        self.eager, self.width = eager, width
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.eager:
            y = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
        else:
            y = functional.scaled_dot_product_attention(q, k, v)
        return y.transpose(1, 2).flatten(2)


class Stack(nn.Module):
    """Residual attentions, recomputed in the backward pass if asked."""

    def __init__(self, layers: int = 2, *, eager: bool = True, reentrant: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attend(eager) for _ in range(layers))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            again = self.reentrant
            x = x + (layer(x) if again is None else checkpoint(layer, x, use_reentrant=again))
        return x


def sites(calls: tuple[AttentionCall, ...]) -> list[tuple[str, int]]:
    return [(call.site, call.index) for call in calls]


LAYERS = [("layers.0", 0), ("layers.1", 0)]


@each("eager", [True, False])
@each("inner_stats", [True, False])
def test_nested_traces_both_see_the_model_and_not_each_other(eager: bool, inner_stats: bool) -> None:
    model, x = Stack(eager=eager), torch.randn(2, 5, 16)
    with sqrtdk.trace(model) as alone:
        plain = model(x)
    with sqrtdk.trace(model) as outer, sqrtdk.trace(model, stats=inner_stats) as inner:
        observed = model(x)
    assert torch.equal(plain, observed)
    for run in (outer, inner):
        assert sites(run.calls) == LAYERS
        assert run.not_attention == run.not_measured == ()
        assert [call.formula for call in run.calls] == [call.formula for call in alone.calls]
        assert [call.scale for call in run.calls] == [call.scale for call in alone.calls]
    assert [call.stats for call in outer.calls] == [call.stats for call in alone.calls]


def test_an_inner_trace_sees_its_part_only() -> None:
    model, x = Stack(), torch.randn(2, 5, 16)
    with sqrtdk.trace(model) as outer:
        model(x)
        with sqrtdk.trace(model) as inner:
            model.layers[1](x)
        model(x)
    assert sites(outer.calls) == [*LAYERS, ("layers.1", 1), ("layers.0", 1), ("layers.1", 2)]
    assert sites(inner.calls) == [("layers.1", 0)]


def test_attention_of_another_thread_is_not_seen() -> None:
    model, x = Stack(), torch.randn(2, 5, 16)
    inside, done = threading.Event(), threading.Event()
    outputs: list[Tensor] = []

    def other() -> None:
        inside.wait(LONG_S)
        outputs.append(model(x))
        nn.MultiheadAttention(16, 2)(x, x, x)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with sqrtdk.trace(model) as run:
        inside.set()
        assert done.wait(LONG_S)
    thread.join()
    assert run.calls == run.not_attention == run.not_measured == ()
    assert torch.equal(outputs[0], model(x))


def test_threads_that_trace_at_once_see_their_own() -> None:
    """Layer by layer in turns, so that each thread's modules begin and end while the other's run."""
    turns = threading.Barrier(2, timeout=LONG_S)
    found: dict[str, Any] = {}

    class Waiting(nn.Module):
        def __init__(self, eager: bool) -> None:
            super().__init__()
            self.attend = Attend(eager)

        def forward(self, x: Tensor) -> Tensor:
            turns.wait()
            y = self.attend(x)
            turns.wait()
            return y

    def work(name: str, eager: bool) -> None:
        model = nn.Sequential(*(Waiting(eager) for _ in range(3)))
        with torch.no_grad(), sqrtdk.trace(model) as run:
            model(torch.randn(1, 4, 16))
        found[name] = run

    threads = [threading.Thread(target=work, args=(name, name == "eager")) for name in ("eager", "sdpa")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, run in found.items():
        assert [(call.site, call.kind) for call in run.calls] == [(f"{i}.attend", name) for i in range(3)]
        assert run.not_attention == run.not_measured == ()
    assert len(found) == 2


def test_overlapping_traces_of_two_threads_leave_the_compiler_as_it_was() -> None:
    """The second trace begins inside the first one and ends after it.

    Up to torch 2.8 nothing is compiled while the flag says that a mode is open.
    """
    import torch._dynamo.eval_frame as eval_frame

    begun, ended = threading.Event(), threading.Event()

    def second() -> None:
        with sqrtdk.trace():
            begun.set()
            ended.wait(LONG_S)

    thread = threading.Thread(target=second)
    before = eval_frame._stance.stance
    with sqrtdk.trace():
        thread.start()
        assert begun.wait(LONG_S)
    ended.set()
    thread.join()
    assert eval_frame._stance.stance == before
    assert not is_in_torch_dispatch_mode()


@each("eager", [False, True])
def test_a_model_run_by_its_forward_is_recorded(eager: bool) -> None:
    """Code that calls `model.forward`, or another method, runs the same attention, though no hook of `model` fires."""
    model = Attend(eager)
    with sqrtdk.trace(model) as run:
        model.forward(torch.randn(1, 4, 16))
    assert [(call.formula, call.scale.agree) for call in run.calls] == [("softmax(0.3536 * q.k)", True)]


def test_modules_of_another_thread_do_not_name_the_site() -> None:
    """While a thread is inside the second layer of a model, the first one runs under a trace."""
    inside, done = threading.Event(), threading.Event()

    class Holding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            inside.set()
            done.wait(LONG_S)
            return x

    model, other = nn.Sequential(Attend(), nn.Sequential(Holding())), Attend()  # `other` is not of the model
    x = torch.randn(1, 4, 16)
    thread = threading.Thread(target=model[1], args=(x,))
    with sqrtdk.trace(model) as run:
        thread.start()
        assert inside.wait(LONG_S)
        model[0](x)
        other(x)
        done.set()
        thread.join()
    assert sites(run.calls) == [("0", 0), ("", 0)]


@each("eager", [True, False])
@each("reentrant", [None, True, False])
def test_a_backward_pass_is_not_counted(reentrant: bool | None, eager: bool) -> None:
    """A forward recomputed for the gradient is the same attention, and the gradient is bit-equal."""
    model = Stack(eager=eager, reentrant=reentrant)
    x = torch.randn(2, 5, 16, requires_grad=True)

    def step() -> list[Tensor]:
        model.zero_grad()
        x.grad = None
        model(x).square().sum().backward()
        assert x.grad is not None
        return [x.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    plain = step()
    with sqrtdk.trace(model) as run:
        observed = step()
    assert sites(run.calls) == LAYERS
    assert run.not_attention == run.not_measured == ()
    assert [(call.formula, call.scale.agree) for call in run.calls] == [("softmax(0.3536 * q.k)", True)] * 2
    assert all(call.stats is not None for call in run.calls)
    assert len(plain) == len(observed) > 3
    assert all(torch.equal(a, b) for a, b in zip(plain, observed, strict=True))


def test_a_gradient_inside_the_forward_is_not_counted() -> None:
    """`torch.autograd.grad` in the middle of a model, and the attention after it."""
    model, x = Attend(), torch.randn(1, 4, 16, requires_grad=True)
    with sqrtdk.trace(model) as run:
        (grad,) = torch.autograd.grad(model(x).sum(), x)
        model(grad)
    assert sites(run.calls) == [("", 0), ("", 1)]


@pytest.mark.filterwarnings("ignore:Using `torch.compile")
@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("eager", [True, False])
def test_a_compiled_module_is_recorded(eager: bool, warm: bool) -> None:
    """It runs eagerly under the trace, also when it was compiled before, and compiled again afterwards."""
    model, x = Stack(eager=eager), torch.randn(2, 5, 16)
    graphs = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    plain = compiled(x) if warm else model(x)
    assert graphs == int(warm)
    with sqrtdk.trace(compiled) as run:
        observed = compiled(x)
    assert graphs == int(warm)
    assert torch.equal(plain, observed)
    assert [call.site.removeprefix("_orig_mod.") for call in run.calls] == ["layers.0", "layers.1"]
    assert [call.formula for call in run.calls] == ["softmax(0.3536 * q.k)"] * 2
    assert run.not_measured == ()
    compiled(x)
    assert graphs == 1
    torch._dynamo.reset()


def test_a_compiled_module_runs_without_a_warning() -> None:
    compiled = torch.compile(Attend(), backend="eager")
    with sqrtdk.trace(compiled) as run:
        compiled(torch.randn(1, 4, 16))
    assert len(run.calls) == 1
