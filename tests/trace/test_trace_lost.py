"""An attention that can't be followed is told: what was seen of it, and the file and line where it was lost."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import sqrtdk
from sqrtdk.tracing import NotAttention, NotMeasured, Trace
from sqrtdk.tracing.readback import chain, kernels
from sqrtdk.tracing.tape.recorder import KernelCall
from tests.attentions.each import each

E, L = 16, 6


@torch.library.custom_op("sqrtdk_lost::attend", mutates_args=())
def attend(query: Tensor, key: Tensor, value: Tensor, gain: float) -> Tensor:
    """A kernel that does everything."""
    return (query @ key.mT * gain).softmax(-1) @ value


@attend.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, gain: float) -> Tensor:
    return torch.empty_like(value)


class Attention(nn.Module):
    """Self-attention whose middle is a function of q, k and v."""

    def __init__(self, middle: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, E) for _ in range(3))
        self.router = nn.Linear(32, L)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.middle(self, self.q(x), self.k(x), self.v(x))


def run(middle: Callable[[Any, Tensor, Tensor, Tensor], Tensor], device: str = "cpu") -> Trace:
    with torch.device(device):
        model, x = Attention(middle), torch.randn(2, L, 32)
    with torch.no_grad():
        plain = model(x)
        with sqrtdk.trace(model) as traced:
            observed = model(x)
    assert device == "meta" or torch.equal(plain, observed)
    assert traced.calls == ()
    return traced


def at(entry: NotAttention | NotMeasured) -> str:
    """`file:line` without the folders."""
    return str(entry.at).rpartition("/")[2]


def line(function: Callable[..., Any], comment: str) -> str:
    """`file:line` of the line of a function that ends in the comment."""
    lines, first = inspect.getsourcelines(function)
    (found,) = [first + i for i, text in enumerate(lines) if text.rstrip().endswith(f"# {comment}")]
    return f"test_trace_lost.py:{found}"


# -- a softmax of a product whose weights met no values ----------------------------------------------------------------


def hidden(x: Tensor) -> Tensor:
    return torch.ones(L, L, dtype=torch.bool, device=x.device).triu(1)


def distances(self, q, k, v):
    """The weights go where nothing follows them."""
    logits = (q * 0.5 @ k.mT * 0.5).masked_fill(hidden(q), -torch.inf)
    weights = logits.softmax(-1)
    return torch.cdist(weights, v.mT)  # lost


def dropped(self, q, k, v):
    (q @ k.mT * 0.25 + hidden(q).float() * -1e9).softmax(-1)  # lost
    return v


def kept(self, q, k, v):
    self.weights = (q @ k.mT * 0.25).masked_fill(hidden(q), -torch.inf).softmax(-1)  # lost
    return v


def hard(self, q, k, v):
    best = (q @ k.mT * 0.25).masked_fill(hidden(q), -torch.inf).softmax(-1).argmax(-1)  # lost
    return v.gather(1, best[..., None].expand_as(v))


@each("device", ["cpu", "meta"])
@each("middle", [distances, dropped, kept, hard])
def test_a_lost_softmax_has_its_formula_and_its_line(middle: Callable[..., Tensor], device: str) -> None:
    (entry,) = run(middle, device).not_attention
    assert (entry.code, at(entry)) == ("lost_sight", line(middle, "lost"))
    assert entry.formula == "softmax(0.25 * q.k + causal)"


def test_two_of_them_are_told_apart() -> None:
    def both(self, q, k, v):
        first, second = (q @ k.mT * 0.25).softmax(-1), (q @ k.mT).softmax(-1)
        return torch.cdist(first, v.mT) + torch.cdist(second, v.mT)

    entries = run(both).not_attention
    assert [entry.formula for entry in entries] == ["softmax(0.25 * q.k)", "softmax(q.k)"]
    assert [entry.index for entry in entries] == [0, 1]


# -- "never" only where it was seen ------------------------------------------------------------------------------------


def reduced(self, q, k, v):
    weights = self.router(self.x).softmax(-1)  # seen
    return v + 0 * float(weights.amax()) if not weights.is_meta else v


def mixed(self, q, k, v):
    weights = self.router(self.x).softmax(-1)
    return weights[..., :1] * v  # seen


def separable(self, q, k, v):
    """MobileViTv2 (arXiv:2206.02680): one score a token, whose softmax over the tokens pools k."""
    weights = self.router(self.x)[..., :1].softmax(1)
    return v.relu() * (weights * k).sum(1, keepdim=True)  # seen


def additive(self, q, k, v):
    weights = (q[:, :, None] + k[:, None]).tanh().sum(-1).softmax(-1)
    return torch.cdist(weights, v.mT)  # seen


@each(
    "middle, code, formula",
    [
        (reduced, "never_used", None),
        (mixed, "not_seen", None),
        (separable, "separable", None),
        (additive, "lost_additive", "softmax(additive(q, k))"),
    ],
)
def test_never_is_said_only_where_it_was_seen(middle: Callable[..., Tensor], code: str, formula: str | None) -> None:
    (entry,) = run(middle).not_attention
    assert (entry.code, entry.formula, at(entry)) == (code, formula, line(middle, "seen"))


def test_a_pooling_keeps_its_own_reason_and_line() -> None:
    def pooling(self, q, k, v):
        weights = self.router(self.x).softmax(1)  # seen
        return weights.mT @ v

    (entry,) = run(pooling).not_attention
    assert "one projection" in entry.reason
    assert (entry.formula, at(entry)) == (None, line(pooling, "seen"))


# -- other ways to be lost ---------------------------------------------------------------------------------------------


@each("device", ["cpu", "meta"])
def test_logits_that_meet_values_as_they_are(device: str) -> None:
    def without(self, q, k, v):
        logits = (q * 0.5 @ k.mT * 0.5).masked_fill(hidden(q), 0.0)
        return torch.relu(logits) @ v  # lost

    (entry,) = run(without, device).not_measured
    assert "without a softmax" in entry.reason
    assert at(entry) == line(without, "lost")
    assert entry.formula == "relu(0.25 * q.k) + causal"


@each("device", ["cpu", "meta"])
def test_an_opaque_kernel_names_its_operands(device: str) -> None:
    def opaque(self, q, k, v):
        return attend(q * 0.25, torch.nn.functional.normalize(k, dim=-1), v, 3.0)  # lost

    (entry,) = run(opaque, device).not_measured
    assert "sqrtdk_lost::attend is opaque" in entry.reason
    assert (entry.formula, at(entry)) == ("attend(0.25 * query, l2(key), value)", line(opaque, "lost"))


def test_a_kernel_whose_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(call: KernelCall, kernel: kernels.Kernel) -> Any:
        raise IndexError("no such argument")

    def known(self, q, k, v):
        return attend(q * 0.25, k, v, 3.0)  # lost

    monkeypatch.setitem(kernels.KERNELS, "sqrtdk_lost::attend", kernels.Kernel(read=failing))
    (entry,) = run(known).not_measured
    assert entry.reason == "the reading failed: IndexError: no such argument"
    assert (entry.formula, at(entry)) == ("attend(0.25 * query, key, value)", line(known, "lost"))


def test_an_operation_whose_reading_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(link: Any) -> Any:
        raise IndexError("no such operand")

    def asinh(self, q, k, v):
        logits = (q @ k.mT * 0.25).asinh()
        weights = logits.softmax(-1)  # lost
        return weights @ v

    monkeypatch.setitem(chain.READERS, "asinh", failing)
    (entry,) = run(asinh).not_measured
    assert entry.reason == "the reading failed: IndexError: no such operand"
    assert (entry.formula, at(entry)) == ("softmax(unknown(mul, asinh)(q.k))", line(asinh, "lost"))


def test_what_fails_after_the_formula_was_read_has_it_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any) -> Any:
        raise RuntimeError("out of memory")

    def right(self, q, k, v):
        return (q @ k.mT * 0.25).softmax(-1) @ v  # lost

    monkeypatch.setattr("sqrtdk.tracing.calls.statistics.exact_statistics", failing)
    (entry,) = run(right).not_measured
    assert (entry.formula, at(entry)) == ("softmax(0.25 * q.k)", line(right, "lost"))


def test_what_has_no_formula_has_a_line() -> None:
    def sparse(self, q, k, v):
        weights = torch.sparse.softmax((q @ k.mT * 0.25)[0].to_sparse(), -1)  # lost
        return weights.to_dense() @ v

    (entry,) = run(sparse).not_measured
    assert (entry.formula, at(entry)) == (None, line(sparse, "lost"))


def test_weights_that_meet_tensors_of_another_kind() -> None:
    two = pytest.importorskip("torch.testing._internal.two_tensor")

    def foreign(self, q, k, v):
        weights = (q @ k.mT * 0.25).softmax(-1)
        return (weights @ two.TwoTensor(v, v)).a  # lost

    def routed(self, q, k, v):
        weights = self.router(self.x).softmax(-1)
        return (weights * two.TwoTensor(v[..., :1], v[..., :1])).a  # lost

    for middle, code, formula in ((foreign, "lost_sight", "softmax(0.25 * q.k)"), (routed, "not_seen", None)):
        (entry,) = run(middle).not_attention
        assert (entry.code, entry.formula, at(entry)) == (code, formula, line(middle, "lost"))


# -- logits that go through what is not followed, before their softmax -------------------------------------------------


def over_keys(self, logits, k):
    return self.mix(logits)  # lost


def convolved(self, logits, k):
    return torch.nn.functional.conv1d(logits, self.kernel)  # lost


def smoothed(self, logits, k):
    return logits @ (k @ k.mT)  # lost


@each("device", ["cpu", "meta"])
@each("step, name", [(over_keys, "addmm"), (convolved, "convolution"), (smoothed, "bmm")])
def test_logits_behind_a_projection_are_no_router(step: Callable[..., Tensor], name: str, device: str) -> None:
    """A call whose scale is not known, and not a softmax that comes from one projection."""

    class Mixed(Attention):
        def __init__(self) -> None:
            super().__init__(lambda *_: torch.empty(0))
            self.mix, self.kernel = nn.Linear(L, L), nn.Parameter(torch.randn(L, L, 3))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.q(x), self.k(x), self.v(x)
            logits = step(self, q * 0.5 @ k.mT * 0.5, k) * 2
            weights = logits.softmax(-1)
            return weights @ v[:, : logits.shape[-1]]

    with torch.device(device):
        model, x = Mixed(), torch.randn(2, L, 32)
    with torch.no_grad(), sqrtdk.trace(model) as traced:
        model(x)
    (call,) = traced.calls
    assert traced.not_attention == ()
    assert call.formula == f"softmax(2 * unknown({name})(0.25 * q.k))"
    assert (call.scale.effective, call.unknown) == (None, (name,))
    (stage,) = [stage for stage in call.stages if stage.name == "unknown"]
    assert str(stage.at).rpartition("/")[2] == line(step, "lost")


# -- an observer -------------------------------------------------------------------------------------------------------


class Counting(TorchDispatchMode):
    """Counts the operations that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        return func(*args, **(kwargs or {}))


@each("middle", [distances, dropped, kept])
def test_a_mode_of_the_callers_sees_the_model_alone(middle: Callable[..., Tensor]) -> None:
    model, x = Attention(middle), torch.randn(2, L, 32)
    with torch.no_grad():
        with Counting() as plain:
            model(x)
        with sqrtdk.trace(model) as traced, Counting() as inside:
            model(x)
    assert [entry.formula for entry in traced.not_attention] == ["softmax(0.25 * q.k + causal)"]
    assert inside.seen == plain.seen


def test_nothing_is_told_after_the_block() -> None:
    model, x = Attention(kept), torch.randn(2, L, 32)
    with torch.no_grad(), sqrtdk.trace(model) as traced:
        model(x)
    told = traced.not_attention
    del model.weights
    assert traced.not_attention == told
    assert all(isinstance(entry, (NotAttention, NotMeasured)) for entry in told)


@pytest.fixture
def _without_collector() -> Iterator[None]:
    gc.disable()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("_without_collector")
@each("middle", [distances, dropped])
def test_lost_layers_are_let_go(middle: Callable[..., Tensor]) -> None:
    """What lives at the start of each layer does not grow: a lost softmax keeps nothing."""

    def live() -> int:
        tensors = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
        return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())

    layers = [Attention(middle) for _ in range(6)]
    x, held = torch.randn(2, L, 32), list[int]()
    with torch.no_grad(), sqrtdk.trace(nn.ModuleList(layers)) as traced:
        for layer in layers:
            held.append(live())
            layer(x)
            layer.x = None  # type: ignore[assignment]
    assert len(traced.not_attention) == len(layers)
    assert held[-1] <= held[2]
