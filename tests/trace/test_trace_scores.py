"""Scores that are no product: our own additive and distance attention, and Keras's layers in their own words."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk import scores
from sqrtdk.tracing import AttentionCall, Trace
from tests.attentions.each import each

B, L, H, E = 2, 6, 2, 8
GENERATOR = torch.Generator().manual_seed(7)
V, WQ, WK = (torch.randn(*shape, dtype=torch.float64, generator=GENERATOR) for shape in ((5,), (E, 5), (E, 5)))
BIAS = torch.randn(L, L, dtype=torch.float64, generator=GENERATOR)
CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()


class Attention(nn.Module):
    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, H * E) for _ in range(3))
        self.attend = attend

    def split(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(x).unflatten(-1, (H, E)).transpose(1, 2) for f in (self.q, self.k, self.v))

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(*self.split(x))


def run_of(model: nn.Module) -> tuple[Trace, Tensor]:
    model = model.double()
    x = torch.randn(B, L, 16, dtype=torch.float64)
    with torch.no_grad():
        plain = model(x)
        with sqrtdk.trace(model) as run:
            output = model(x)
    assert torch.equal(plain, output)
    return run, x


def only(run: Trace) -> AttentionCall:
    assert run.not_measured == run.not_attention == ()
    (call,) = run.calls
    return call


def additive(q: Tensor, k: Tensor) -> Tensor:
    return ((q @ WQ)[..., :, None, :] + (k @ WK)[..., None, :, :]).tanh() @ V


def distance(q: Tensor, k: Tensor) -> Tensor:
    return -(q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)


OURS: dict[str, tuple[dict[str, Any], str, Callable[[Tensor, Tensor], Tensor]]] = {
    "additive": ({"score": scores.additive(V, WQ, WK)}, "additive(q, k)", additive),
    "additive, scaled, causal": (
        {"score": scores.additive(V, WQ, WK), "scale": 0.5, "is_causal": True},
        "0.5 * additive(q, k) + causal",
        lambda q, k: (additive(q, k) * 0.5).masked_fill(~CAUSAL, -math.inf),
    ),
    "additive, capped, with a bias": (
        {"score": scores.additive(V, WQ, WK), "softcap": 2.0, "bias": BIAS},
        "2 * tanh(additive(q, k) / 2) + bias",
        lambda q, k: 2 * torch.tanh(additive(q, k) / 2) + BIAS,
    ),
    "additive of Keras": (
        {"score": scores.keras_additive()},
        "additive(q, k)",
        lambda q, k: torch.tanh(q[..., :, None, :] + k[..., None, :, :]).sum(-1),
    ),
    "distance": ({"score": scores.distance()}, "-1 * |q - k|^2", distance),
    "distance, scaled, causal": (
        {"score": scores.distance(), "scale": 0.5, "is_causal": True, "impl": "tiled"},
        "-0.5 * |q - k|^2 + causal",
        lambda q, k: (distance(q, k) * 0.5).masked_fill(~CAUSAL, -math.inf),
    ),
    "laplace": (
        {"score": scores.laplace(), "scale": 0.5, "is_causal": True},
        "-0.5 * |q - k|_1 + causal",
        lambda q, k: (-torch.cdist(q, k, p=1.0) * 0.5).masked_fill(~CAUSAL, -math.inf),
    ),
    "distance with sinks": ({"score": scores.distance(), "sinks": 0.0}, "-1 * |q - k|^2 + sinks", distance),
}


@pytest.mark.parametrize("name", OURS)
def test_our_own_scores_are_read(name: str) -> None:
    """By name, with their factor, softcap, bias, mask and statistics; a scale to judge they have not."""
    options, formula, logits = OURS[name]
    model = Attention(lambda q, k, v: sqrtdk.attention(q, k, v, **options))
    run, x = run_of(model)
    call = only(run)
    assert (call.formula, call.score) == (f"softmax({formula})", name.split(",")[0].split()[0])
    assert (call.batch, call.heads, call.query_len, call.key_len) == (B, H, L, L)
    assert (call.scale.effective, call.scale.numeric, call.unknown) == (None, None, ())
    assert "no product of q and k" in (call.scale.reason or "")
    sign = 1.0 if call.score == "additive" else -1.0
    assert math.prod(factor.value or 0.0 for factor in call.scale.factors) == sign * options.get("scale", 1.0)
    q, k, _ = model.split(x)
    z = logits(q, k)
    entropy = torch.special.entr(z.softmax(-1)).sum(-1).mean((0, 2))
    assert call.stats is not None
    assert call.stats.max_logit == pytest.approx(z.amax((0, 2, 3)).tolist())
    assert call.stats.entropy_nats == pytest.approx(entropy.tolist())


def test_the_sign_of_a_distance() -> None:
    """An attention to what is far away has a factor above 0."""
    near = Attention(lambda q, k, v: ((q[..., :, None, :] - k[..., None, :, :]).pow(2).sum(-1) * -0.5).softmax(-1) @ v)
    far = Attention(lambda q, k, v: ((q[..., :, None, :] - k[..., None, :, :]).pow(2).sum(-1) * 0.5).softmax(-1) @ v)
    assert only(run_of(near)[0]).formula == "softmax(-0.5 * |q - k|^2)"
    assert only(run_of(far)[0]).formula == "softmax(0.5 * |q - k|^2)"


@each("name", ["additive", "distance"])
def test_without_data(name: str) -> None:
    score = scores.distance() if name == "distance" else scores.additive(*(x.to("meta") for x in (V, WQ, WK)))
    model = Attention(lambda q, k, v: sqrtdk.attention(q, k, v, score=score, scale=0.5, is_causal=True))
    model = model.double().to("meta")
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(torch.randn(B, L, 16, dtype=torch.float64, device="meta"))
    logits = "-0.5 * |q - k|^2" if name == "distance" else "0.5 * additive(q, k)"
    assert only(run).formula == f"softmax({logits} + causal)"


class Bahdanau(nn.Module):
    """One query, the last state, and keys of all: scores (B, S, 1)."""

    def __init__(self, attend: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.q, self.k, self.score = nn.Linear(16, 8), nn.Linear(16, 8), nn.Linear(8, 1)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self.score(torch.tanh(self.q(x[:, -1:]) + self.k(x))), x)


HIDDEN = (torch.arange(L) >= torch.tensor([[L], [4]]))[..., None]  # (B, S, 1), padding of the second sequence


@each(
    "attend",
    [
        lambda z, x: (z.softmax(1) * x).sum(1),
        lambda z, x: torch.bmm(z.squeeze(2).unsqueeze(1).softmax(-1), x),
        lambda z, x: z.softmax(1).mT @ x,
    ],
)
@each("padded", [False, True])
def test_one_query_of_a_decoder(attend: Callable[[Tensor, Tensor], Tensor], padded: bool) -> None:
    model = Bahdanau(lambda z, x: attend(z.masked_fill(HIDDEN, -math.inf) if padded else z, x))
    call = only(run_of(model)[0])
    assert call.formula == ("softmax(additive(q, k) + padding)" if padded else "softmax(additive(q, k))")
    assert (call.batch, call.heads, call.query_len, call.key_len) == (B, 1, 1, L)
    assert call.stats is not None
    assert call.stats.keys == ((5.0,) if padded else (6.0,))


def test_the_modules() -> None:
    model = sqrtdk.nn.AdditiveAttention(16, 16, hidden=8).double()
    x = torch.randn(B, L, 16, dtype=torch.float64)
    with sqrtdk.trace(model) as run:
        model(x, x, x)
    assert only(run).formula == "softmax(additive(q, k))"


# -- Keras on torch ----------------------------------------------------------------------------------------------------


def lowered(z: Tensor, seen: Tensor, by: float = 1e9, *, hidden_first: bool = True) -> Tensor:
    """How `keras.layers.Attention` hides keys."""
    return torch.where(~seen, z - by, z) if hidden_first else torch.where(seen, z, z + -by)


@each("hidden_first", [True, False])
@each("scale", [1.0, E**-0.5])
def test_logits_lowered_where_a_key_is_hidden(scale: float, hidden_first: bool) -> None:
    """The rows see what they see, not what is hidden from them."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return lowered(q @ k.mT * scale, CAUSAL, hidden_first=hidden_first).softmax(-1) @ v

    call = only(run_of(Attention(attend))[0])
    assert call.formula == ("softmax(q.k + causal)" if scale == 1.0 else "softmax(0.3536 * q.k + causal)")
    assert call.mask is not None
    assert (call.mask.kind, call.mask.fill, call.mask.masked_weight, call.mask.blind_rows) == ("causal", -1e9, 0.0, 0)
    assert call.scale.effective == pytest.approx(scale)
    assert call.scale.agree is True


def test_logits_moved_a_little_are_no_mask() -> None:
    call = only(run_of(Attention(lambda q, k, v: lowered(q @ k.mT, CAUSAL, 1.0).softmax(-1) @ v))[0])
    assert (call.mask, call.unknown, call.scale.effective) == (None, ("where",), None)


def test_additive_attention_of_keras() -> None:
    """Its `scale` is v; a causal mask lowers the logits."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = (torch.ones(E, dtype=q.dtype) * torch.tanh(q[..., :, None, :] + k[..., None, :, :])).sum(-1)
        return lowered(z, CAUSAL).softmax(-1) @ v

    call = only(run_of(Attention(attend))[0])
    assert call.formula == "softmax(additive(q, k) + causal)"
    assert call.stats is not None
    assert call.stats.keys == ((L + 1) / 2,) * H


def test_grouped_queries_of_keras() -> None:
    """`GroupQueryAttention`: an einsum a product, a softmax over the last axis, keys repeated."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = q.transpose(1, 2), *(x[:, :1].repeat_interleave(H, 1).transpose(1, 2) for x in (k, v))
        weights = torch.einsum("BQNH,BKNH->BNQK", q * E**-0.5, k).softmax(-1)
        return torch.einsum("BNQK,BKNH->BQNH", weights, v)

    call = only(run_of(Attention(attend))[0])
    assert call.formula == "softmax(0.3536 * q.k)"
    assert call.scale.agree is True
