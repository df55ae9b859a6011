"""What is no attention, what the lineage cannot follow, and where the readings of the scale disagree."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.tracing import Trace
from tests.attentions.each import each
from tests.tolerances import allowed

E, H = 8, 2
SLOPE = allowed(torch.float32, length=E, logit=10.0, magnitude=1.0)  # of a scale that is measured


@torch.library.custom_op("sqrtdk_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """An opaque kernel that hides a factor of 2."""
    return x * 2


@torch.library.custom_op("sqrtdk_tests::bent", mutates_args=())
def bent(x: Tensor) -> Tensor:
    """An opaque kernel that is no factor at all."""
    return x * x * x


@torch.library.custom_op("sqrtdk_tests::double_in_place", mutates_args=("x",))
def double_in_place(x: Tensor) -> None:
    """An opaque kernel that writes its factor where nobody looks."""
    x.mul_(2)


@torch.library.custom_op("sqrtdk_tests::scores", mutates_args=())
def scores(q: Tensor, k: Tensor) -> Tensor:
    """An opaque product."""
    return q @ k.mT


for op in (doubled, bent):
    op.register_fake(torch.empty_like)


class Doubles(torch.autograd.Function):
    """A factor inside an autograd function: no kernel hides it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Attend(nn.Module):
    """An attention whose logits come from `logits(q, k)`."""

    def __init__(self, logits: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.logits = logits
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (H, E)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.logits(q, k).softmax(-1) @ v


def run(logits: Callable[[Tensor, Tensor], Tensor]) -> Trace:
    model = Attend(logits)
    with torch.no_grad(), sqrtdk.trace(model) as found:
        model(torch.randn(2, 9, 16))
    return found


# -- no attention ------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A router, an attention pooling by one projection, a discarded map, and one attention among them."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.pool = nn.Linear(16, 4), nn.Linear(16, 1)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
        self.attend = nn.MultiheadAttention(16, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        x = sum(gates[..., i, None] * expert(x) for i, expert in enumerate(self.experts))
        (self.q(x) @ self.k(x).mT * 0.25).softmax(-1)  # a map that nobody uses
        x, _ = self.attend(x, x, x, need_weights=False)
        return self.pool(x).softmax(1).mT @ x


def test_softmaxes_that_are_no_attention_are_listed_and_not_judged() -> None:
    model = Mixed()
    with sqrtdk.trace(model) as found:
        model(torch.randn(2, 9, 16))
    assert [call.site for call in found.calls] == ["attend"]
    assert [other.shape for other in found.not_attention] == [(2, 9, 4), (2, 9, 9), (2, 9, 1)]
    assert [other.index for other in found.not_attention] == [0, 1, 2]
    assert all(other.site == "" and other.reason for other in found.not_attention)
    router, discarded, pooling = (other.reason for other in found.not_attention)
    assert "value" in router
    assert "value" in discarded
    assert "one projection" in pooling


def test_a_dense_mixture_is_no_attention() -> None:
    """Gates times stacked experts, contracted: a value product whose logits are one projection."""
    gate, expert = nn.Linear(16, 4), nn.Linear(16, 4 * 16)
    x = torch.randn(2, 9, 16)
    with sqrtdk.trace() as found:
        torch.einsum("ble,bled->bld", gate(x).softmax(-1), expert(x).unflatten(-1, (4, 16)))
    assert found.calls == ()
    assert len(found.not_attention) == 1


def test_class_probabilities_are_no_attention() -> None:
    head = nn.Linear(16, 10)
    with sqrtdk.trace(head) as found:
        functional.log_softmax(head(torch.randn(3, 16)), -1)
        head(torch.randn(3, 16)).softmax(-1)
    assert found.calls == ()


def test_a_model_without_attention_gives_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with sqrtdk.trace(model) as found:
        model(torch.randn(2, 4))
    assert found.calls == found.not_attention == found.not_measured == ()


def test_a_product_of_attention_outputs_is_judged_once() -> None:
    """Two attentions in a row, the second one on the output of the first."""
    x = torch.randn(2, 6, 8)
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    with sqrtdk.trace() as found:
        y = (first(x) @ second(x).mT * 0.5).softmax(-1) @ x
        _ = (first(y) @ second(y).mT * 0.25).softmax(-1) @ y
    assert [call.scale.effective for call in found.calls] == [0.5, 0.25]


# -- what cannot be followed -------------------------------------------------------------------------------------------


def test_an_autograd_function_hides_nothing() -> None:
    (call,) = run(lambda q, k: Doubles.apply(q) @ k.mT * 0.25).calls
    assert call.unknown == ()
    assert call.scale.symbolic == pytest.approx(0.5)
    assert call.scale.agree is True


@each(
    "logits",
    [
        lambda q, k: doubled(q) @ k.mT * 0.25,
        lambda q, k: q @ doubled(k).mT * 0.25,
        lambda q, k: doubled(q @ k.mT) * 0.25,
        lambda q, k: doubled(q @ k.mT * 0.25),
    ],
)
def test_an_opaque_factor_is_read_from_what_it_does_to_other_values(logits: Callable[[Tensor, Tensor], Tensor]) -> None:
    (call,) = run(logits).calls
    assert (call.unknown, call.formula) == ((), "softmax(0.5 * q.k)")
    assert call.scale.symbolic == call.scale.effective == pytest.approx(0.5)
    assert call.scale.agree is True
    assert "effect of doubled" in [factor.source for factor in call.scale.factors]


@each("logits", [lambda q, k: bent(q) @ k.mT, lambda q, k: bent(q @ k.mT), lambda q, k: torch.sin(9 * q @ k.mT)])
def test_what_is_no_factor_gets_no_scale(logits: Callable[[Tensor, Tensor], Tensor]) -> None:
    (call,) = run(logits).calls
    assert call.unknown in (("bent",), ("sin",))
    assert call.scale.effective is None
    assert call.scale.ratio is None
    assert call.unknown[0] in (call.scale.reason or "")
    assert call.scale.r_squared is not None
    assert call.scale.r_squared < 0.99
    assert call.stats is not None


@each("place", ["q", "logits"])
def test_a_factor_written_behind_the_lineage_shows_in_the_numbers(place: str) -> None:
    """The two readings disagree, or the operation is named: never a silent 0.25."""

    def logits(q: Tensor, k: Tensor) -> Tensor:
        q = q.clone()
        if place == "q":
            double_in_place(q)
        z = q @ k.mT * 0.25
        if place == "logits":
            double_in_place(z)
        return z

    (call,) = run(logits).calls
    assert call.scale.numeric == pytest.approx(0.5, rel=SLOPE)
    assert call.scale.agree is False or "double_in_place" in call.unknown
    assert call.scale.reason


def test_an_opaque_product_is_not_guessed() -> None:
    found = run(lambda q, k: scores(q, k) * 0.25)
    assert len(found.calls) + len(found.not_attention) == 1
    for call in found.calls:
        assert "scores" in " ".join(call.unknown)
        assert "scores" in call.score
        assert call.scale.effective is None
        assert call.scale.reason
    for other in found.not_attention:
        assert "scores" in other.reason


def test_heads_mixed_by_the_data_are_named() -> None:
    def mixed(q: Tensor, k: Tensor) -> Tensor:
        matrix = q.mean(2)[..., :H].tanh()
        return torch.einsum("bhij,bhg->bgij", q @ k.mT * 0.25, matrix)

    (call,) = run(mixed).calls
    assert call.unknown == ("heads mixed by the data",)
    assert call.scale.effective is None
    assert call.scale.reason


def test_a_pooling_with_a_tanh_is_no_attention() -> None:
    """The logits of Lin et al. 2017: v . tanh(W x), one number for every position, and no query."""

    class Pooling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(16, 8), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(torch.tanh(self.inner(x))).softmax(1).mT @ x

    model = Pooling()
    with sqrtdk.trace(model) as found:
        model(torch.randn(2, 5, 16))
    assert found.calls == ()
    assert ["pooling" in other.reason for other in found.not_attention] == [True]


def test_unlike_factors_of_two_parts_are_not_averaged() -> None:
    (call,) = run(lambda q, k: torch.cat([q[..., :4] * 0.5, q[..., 4:] * 0.25], -1) @ k.mT).calls
    assert call.scale.symbolic is None
    assert call.unknown


def test_like_factors_of_two_parts_are_one() -> None:
    (call,) = run(lambda q, k: torch.cat([q[..., :4] * 0.25, q[..., 4:] * 0.25], -1) @ k.mT).calls
    assert call.scale.symbolic == pytest.approx(0.25)
    assert call.scale.agree is True


def test_like_factors_of_two_projections_are_one() -> None:
    class Parts(Attend):
        def forward(self, x: Tensor) -> Tensor:
            q = torch.cat([self.q(x) * 0.25, self.v(x) * 0.25], -1)
            k = torch.cat([self.k(x), self.v(x)], -1)
            return (q @ k.mT).softmax(-1) @ self.v(x)

    model = Parts(lambda q, k: q)
    with sqrtdk.trace(model) as found:
        model(torch.randn(2, 9, 16))
    (call,) = found.calls
    assert call.scale.symbolic == pytest.approx(0.25)
    assert call.scale.agree is True
