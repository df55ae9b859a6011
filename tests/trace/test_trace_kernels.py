"""Attentions that are one operation: any operator can have a row, whatever it calls its arguments and returns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.tracing import Trace
from sqrtdk.tracing.readback.kernels import KERNELS, Kernel
from tests.attentions.each import each

E = 16


@torch.library.custom_op("sqrtdk_tests::attend_into", mutates_args=("out",))
def attend_into(out: Tensor, query: Tensor, key: Tensor, value: Tensor, scale: float) -> None:
    """A kernel that writes its result, and returns nothing."""
    out.copy_((query @ key.mT * scale).softmax(-1) @ value)


@torch.library.custom_op("sqrtdk_tests::attend_q", mutates_args=())
def attend_q(v: Tensor, k: Tensor, q: Tensor, scale: float) -> Tensor:
    """A kernel with names and an order of its own."""
    return (q @ k.mT * scale).softmax(-1) @ v


class Attention(nn.Module):
    """Projections, and a kernel."""

    def __init__(self, into: bool, twice: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, E) for _ in range(3))
        self.into, self.twice = into, twice

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if not self.into:
            return attend_q(v, k, q, 0.125)
        out = torch.zeros_like(v)
        attend_into(out, q, k, v, 0.125)
        return (out @ k.mT * 0.5).softmax(-1) @ v if self.twice else out


@contextlib.contextmanager
def rows() -> Iterator[None]:
    """Rows for both kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "sqrtdk_tests::attend_into", Kernel())
        patch.setitem(KERNELS, "sqrtdk_tests::attend_q", Kernel(query="q"))
        yield


@pytest.fixture(autouse=True)
def _rows() -> Iterator[None]:
    with rows():
        yield


def traced(model: nn.Module, **options: object) -> Trace:
    x = torch.randn(2, 7, 32, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = model(x)
        with sqrtdk.trace(model, **options) as run:
            output = model(x)
    assert "enlarge" in options or torch.equal(output, plain)
    return run


@each("into", [True, False])
def test_a_kernel_is_read(into: bool) -> None:
    (call,) = traced(Attention(into)).calls
    assert call.formula == "softmax(0.125 * q.k)"
    assert call.scale.agree
    assert call.stats is not None
    assert call.output_rms is not None


def test_what_a_kernel_wrote_is_its_result() -> None:
    """Another attention that takes it for q starts there, and says so."""
    first, second = traced(Attention(True, twice=True)).calls
    assert first.formula == "softmax(0.125 * q.k)"
    assert second.formula == "softmax(0.5 * unknown(sqrtdk_tests::attend_into)(q).k)"


def test_q_is_enlarged_by_the_name_that_the_kernel_gives_it() -> None:
    model = Attention(False)
    plain, larger = (traced(model, **options).calls[0] for options in ({}, {"enlarge": {("", 0): 50.0}}))
    assert plain.stats is not None
    assert larger.stats is not None
    assert larger.stats.max_abs_logit == pytest.approx([50 * z for z in plain.stats.max_abs_logit], rel=1e-5)


def test_an_additive_score_that_serves_as_q_is_named() -> None:
    class Additive(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.k, self.v = (nn.Linear(32, E) for _ in range(4))
            self.score = nn.Linear(E, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            q = self.score((self.a(x)[:, :, None] + self.b(x)[:, None]).tanh())[..., 0]  # (B, L, L)
            k, v = self.k(x)[..., : x.shape[1]], self.v(x)
            return (q @ k.mT).softmax(-1) @ v

    (call,) = traced(Additive()).calls
    assert call.unknown == ("additive",)
    assert call.scale.effective is None


@torch.library.custom_op("sqrtdk_tests::attend_with_defaults", mutates_args=())
def attend_with_defaults(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float = 0.125,
    causal: bool = True,
    warp: float = 0.5,
    plain: bool = True,
) -> Tensor:
    """What is not passed is what the schema says; nobody knows `warp` and `plain`."""
    logits = q @ k.mT * softmax_scale * (1 + warp)
    logits = logits if plain else logits * 2
    return (logits.masked_fill(torch.ones(logits.shape[-2:]).triu(1).bool(), -torch.inf) if causal else logits).softmax(
        -1
    ) @ v


@pytest.mark.parametrize(
    ("options", "unread"),
    [
        ({}, ("warp", "plain")),
        ({"warp": 0.5}, ("warp", "plain")),
        ({"warp": 0.0}, ("plain", "warp")),
        ({"warp": 0.0, "plain": False}, ("plain", "warp")),
    ],
)
def test_defaults_of_the_schema_are_arguments(options: dict[str, float], unread: tuple[str, ...]) -> None:
    layers = nn.ModuleList(nn.Linear(32, E) for _ in range(3))
    x = torch.randn(2, 6, 32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KERNELS, "sqrtdk_tests::attend_with_defaults", Kernel(query="q"))
        with Trace(layers) as run:
            attend_with_defaults(*(layer(x) for layer in layers), **options)
    (call,) = run.calls
    assert call.unknown == tuple(f"{name} of the kernel" for name in unread)
    assert "0.125 * q.k" in call.formula
    assert call.mask is not None
    assert call.mask.kind == "causal"
    assert call.scale.effective is None
