"""Scores that people write by hand: those that are known have a name, and all have the statistics of their softmax."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import sqrtdk
from sqrtdk.tracing.records import AttentionCall

B, L, H, E = 2, 7, 2, 8
HIDDEN = torch.ones(L, L, dtype=torch.bool).triu(1)
Score = Callable[["Attention", Tensor, Tensor], Tensor]


class Attention(nn.Module):
    """Two heads; `score` gives their logits, (B, H, L, L)."""

    def __init__(self, score: Score) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.q, self.k, self.v = (nn.Linear(H * E, H * E) for _ in range(3))
        self.wq, self.wk, self.w = nn.Linear(E, E), nn.Linear(E, E), nn.Linear(E, 1, bias=False)
        self.matrix = nn.Parameter(torch.randn(E, E) / 2)
        self.mlp = nn.Sequential(nn.Linear(2 * E, E), nn.ReLU(), nn.Linear(E, 1))
        self.score, self.logits = score, torch.empty(0)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, E)).transpose(1, 2) for part in (self.q, self.k, self.v))
        logits = self.score(self, q, k)
        self.logits = logits.detach()
        return (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)


def apart(q: Tensor, k: Tensor) -> Tensor:
    return q.unsqueeze(-2) - k.unsqueeze(-3)


def beside(q: Tensor, k: Tensor) -> Tensor:
    return torch.cat([q.unsqueeze(-2).expand(B, H, L, L, E), k.unsqueeze(-3).expand(B, H, L, L, E)], -1)


def quadratic(m: Attention, q: Tensor, k: Tensor) -> Tensor:
    d = apart(q, k)
    return -(d @ (m.matrix @ m.matrix.mT) * d).sum(-1)


LAPLACE, CAUSAL = "softmax(-0.5 * |q - k|_1)", "softmax(-0.5 * |q - k|_1 + causal)"
KNOWN: dict[str, tuple[Score, str, str]] = {  # the score as code, its name, the formula
    "dot": (lambda m, q, k: q @ k.mT * 0.5, "dot", "softmax(0.5 * q.k)"),
    "cosine": (
        lambda m, q, k: 8 * F.cosine_similarity(q[..., None, :], k[..., None, :, :], dim=-1),
        "cosine",
        "softmax(8 * l2(q).l2(k))",
    ),
    "bahdanau": (
        lambda m, q, k: m.w(torch.tanh(m.wq(q)[..., None, :] + m.wk(k)[..., None, :, :])).squeeze(-1),
        "additive",
        "softmax(additive(q, k))",
    ),
    "mlp": (lambda m, q, k: m.mlp(beside(q, k)).squeeze(-1), "additive", "softmax(additive(q, k))"),
    "rbf": (lambda m, q, k: -(torch.cdist(q, k) ** 2) * 0.5, "distance", "softmax(-0.5 * |q - k|^2)"),
    "distance": (lambda m, q, k: -torch.cdist(q, k), "distance", "softmax(-1 * |q - k|)"),
    "laplace": (lambda m, q, k: -torch.cdist(q, k, p=1) * 0.5, "laplace", LAPLACE),
    "laplace, by hand": (lambda m, q, k: -apart(q, k).abs().sum(-1) / 2, "laplace", LAPLACE),
    "laplace, a norm": (lambda m, q, k: -torch.linalg.vector_norm(apart(q, k), 1, dim=-1) / 2, "laplace", LAPLACE),
    "laplace, causal": (
        lambda m, q, k: (-torch.cdist(q, k, p=1) / 2).masked_fill(HIDDEN, -math.inf),
        "laplace",
        CAUSAL,
    ),
    "another norm": (lambda m, q, k: -torch.cdist(q, k, p=3.0), "distance", "softmax(-1 * |q - k|_3)"),
    "the largest difference": (lambda m, q, k: -torch.cdist(q, k, p=math.inf), "distance", "softmax(-1 * |q - k|_inf)"),
}
UNKNOWN: dict[str, tuple[Score, str]] = {  # the score as code, the formula
    "mahalanobis": (quadratic, "softmax(-1 * unknown(bmm)(q, k))"),
    "polynomial": (lambda m, q, k: (q @ k.mT / E + 1) ** 3, "softmax(unknown(pow)(0.125 * q.k))"),
    "the largest difference, causal": (
        lambda m, q, k: -apart(q, k).abs().amax(-1) + torch.full((L, L), -3e38).triu(1),
        "softmax(-1 * unknown(sub)(q, k) + causal)",
    ),
    "a pairwise distance": (
        lambda m, q, k: -F.pairwise_distance(q.unsqueeze(-2), k.unsqueeze(-3), p=1),
        "softmax(-1 * unknown(sub)(q, k))",
    ),
}


def traced(score: Score) -> tuple[AttentionCall, Tensor]:
    model = Attention(score)
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(torch.randn(B, L, H * E))
    assert run.not_measured == ()
    (call,) = run.calls
    return call, model.logits


def check_statistics(call: AttentionCall, logits: Tensor) -> None:
    """Against the softmax itself; hidden keys don't count."""
    weights = logits.double().softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    assert call.stats is not None
    assert call.stats.entropy_nats == pytest.approx(entropy.mean((0, 2)).tolist(), rel=1e-5)
    assert call.stats.peak == pytest.approx(weights.amax(-1).mean((0, 2)).tolist(), rel=1e-5)
    assert call.stats.effective_keys == pytest.approx((1 / weights.square().sum(-1)).mean((0, 2)).tolist(), rel=1e-5)
    seen = logits.masked_fill(logits < -1e30, math.inf)
    assert call.stats.max_logit == pytest.approx(logits.amax((0, 2, 3)).tolist(), rel=1e-5)
    assert call.stats.min_logit == pytest.approx(seen.amin((0, 2, 3)).tolist(), rel=1e-5)


@pytest.mark.parametrize("name", KNOWN)
def test_a_score_by_hand_has_its_name_and_its_statistics(name: str) -> None:
    score, named, formula = KNOWN[name]
    call, logits = traced(score)
    assert (call.score, call.formula, call.unknown) == (named, formula, ())
    check_statistics(call, logits)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_score_that_is_not_read_has_the_statistics_of_its_softmax(name: str) -> None:
    score, formula = UNKNOWN[name]
    call, logits = traced(score)
    assert call.formula == formula
    assert call.unknown
    assert call.scale.effective is None
    check_statistics(call, logits)


@pytest.mark.parametrize("name", ["laplace", "mahalanobis"])
def test_a_watch_has_them_too_and_check_names_the_score(name: str) -> None:
    score = (KNOWN | UNKNOWN)[name][0]
    model, x = Attention(score), torch.randn(B, L, H * E)
    with sqrtdk.watch(model, every=1, on_alarm=lambda alarm: None) as watch:
        loss = model(x).square().mean()
        loss.backward()
        watch.step(loss)
    ((seen,),) = (sample.calls for sample in watch.samples)
    weights = model.logits.softmax(-1)
    assert seen.columns["peak"] == pytest.approx(weights.amax(-1).mean((0, 2)).tolist(), rel=1e-5)
    assert min(seen.columns["effective_keys"]) > 1
    (judged,) = sqrtdk.check(model, inputs=(x,)).calls
    assert judged.call.score == {"laplace": "laplace", "mahalanobis": "unknown(bmm)"}[name]
    assert judged.call.stats is not None
