"""What somebody types who knows torch, transformers and FlexAttention: it works, or the error says what does."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import flex_attention
from torch.nn.attention.bias import causal_lower_right

import sqrtdk
from sqrtdk import AuxRequest, positions, scales, scores
from sqrtdk.impl import rows
from tests.support.needs import needs

L, H = 16, 4
SDPA = functional.scaled_dot_product_attention
Call = Callable[[Tensor, Tensor, Tensor], Any]


@pytest.fixture
def qkv() -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = torch.randn(3, 2, H, L, 8)
    return q, k, v


def near() -> Tensor:
    i = torch.arange(L)
    return (i[:, None] >= i) & (i[:, None] - i < 5)


SLOPE = torch.rand(H)
SAME: dict[str, tuple[Call, Call]] = {
    "name of a score": (
        lambda q, k, v: sqrtdk.attention(q, k, v, score="cosine", scale=5.0),
        lambda q, k, v: SDPA(functional.normalize(q, dim=-1), functional.normalize(k, dim=-1), v, scale=5.0),
    ),
    "name of a scale": (
        lambda q, k, v: sqrtdk.attention(q, k, v, scale="log_n", is_causal=True),
        lambda q, k, v: sqrtdk.attention(q, k, v, scale=scales.log_n(), is_causal=True),
    ),
    "name of a bias": (
        lambda q, k, v: sqrtdk.attention(q, k, v, bias="alibi", is_causal=True),
        lambda q, k, v: sqrtdk.attention(q, k, v, bias=positions.alibi(H), is_causal=True),
    ),
    "keys of a window": (
        lambda q, k, v: sqrtdk.attention(q, k, v, is_causal=True, window=5),
        lambda q, k, v: SDPA(q, k, v, attn_mask=near()),
    ),
    "keys of a window from the last key": (
        lambda q, k, v: sqrtdk.attention(q[..., 9:, :], k, v, causal_lower_right=True, window=5),
        lambda q, k, v: SDPA(q[..., 9:, :], k, v, attn_mask=near()[9:]),
    ),
    "scale of each head": (
        lambda q, k, v: sqrtdk.attention(q, k, v, scale=SLOPE),
        lambda q, k, v: SDPA(q * SLOPE.view(H, 1, 1), k, v, scale=1.0),
    ),
    "function as a score, not scaled": (
        lambda q, k, v: sqrtdk.attention(q, k, v, score=lambda q, k: -torch.cdist(q, k)),
        lambda q, k, v: torch.softmax(-torch.cdist(q, k), -1) @ v,
    ),
    "function as a score, for shared heads": (
        lambda q, k, v: sqrtdk.attention(
            q, k[:, :2], v[:, :2], score=lambda q, k: q @ k.mT, scale="sqrt_dk", enable_gqa=True
        ),
        lambda q, k, v: SDPA(q, k[:, :2], v[:, :2], enable_gqa=True),
    ),
    "function as a score, with one key head for all": (
        lambda q, k, v: sqrtdk.attention(
            q,
            k[:, :1],
            v[:, :1],
            score=lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, (2, H)),
            enable_gqa=True,
        ),
        lambda q, k, v: SDPA(q, k[:, :1], v[:, :1], scale=1.0, enable_gqa=True),
    ),
    "weights": (
        lambda q, k, v: sqrtdk.attention(q, k, v, return_weights=True)[1],
        lambda q, k, v: torch.softmax(q @ k.mT / 8**0.5, -1),
    ),
    "lse by torch's request": (
        lambda q, k, v: sqrtdk.attention(q, k, v, return_aux=flex_attention.AuxRequest(lse=True))[1].lse,
        lambda q, k, v: torch.logsumexp(q @ k.mT / 8**0.5, -1),
    ),
    "max_scores": (
        lambda q, k, v: sqrtdk.attention(q, k, v, return_aux=AuxRequest(max_scores=True))[1].max_scores,
        lambda q, k, v: (q @ k.mT / 8**0.5).amax(-1),
    ),
    "statistics of measure": (
        lambda q, k, v: sqrtdk.measure(q, k, is_causal=True).entropy_nats,
        lambda q, k, v: sqrtdk.attention(q, k, v, is_causal=True, return_aux=True)[1].entropy_nats,
    ),
}


REQUEST = "lse by torch's request"


@pytest.mark.parametrize(
    "name", [*(name for name in SAME if name != REQUEST), pytest.param(REQUEST, marks=needs("AuxRequest", torch="2.9"))]
)
def test_a_guess_means_what_it_says(name: str, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    guess, meaning = SAME[name]
    torch.testing.assert_close(guess(*qkv), meaning(*qkv), atol=1e-5, rtol=1e-4)


def aux(q: Tensor, k: Tensor, v: Tensor) -> Any:
    return sqrtdk.attention(q, k, v, return_aux=True)[1]


CURES: dict[str, tuple[Call, str]] = {
    "fewer key heads": (lambda q, k, v: sqrtdk.attention(q, k[:, :2], v[:, :2]), "Pass enable_gqa=True"),
    "attention_mask of 1 and 0": (
        lambda q, k, v: sqrtdk.attention(q, k, v, torch.ones(2, L).long()),
        "attention_mask.bool()[:, None, None, :]",
    ),
    "mask of keys": (
        lambda q, k, v: sqrtdk.attention(q, k, v, torch.ones(2, L) > 0),
        "attn_mask[:, None, None, :]: one number a key of each batch element, (2, 1, 1, 16)",
    ),
    "mask of torch's module": (
        lambda q, k, v: sqrtdk.attention(q, k, v, torch.ones(2 * H, L, L) > 0),
        "attn_mask.view(2, 4, 16, 16)",
    ),
    "mask without heads": (lambda q, k, v: sqrtdk.attention(q, k, v, torch.ones(2, L, L)), "attn_mask[:, None]"),
    "bias of each head": (
        lambda q, k, v: sqrtdk.attention(q, k, v, bias=torch.ones(H)),
        "bias[:, None, None]: one number a head, (4, 1, 1)",
    ),
    "window of both sides or of the past": (
        lambda q, k, v: sqrtdk.attention(q, k, v, window=5),
        "is_causal=True, or one of these: (4, 0), 5 keys up to the row's own; (5, 5), 5 keys on either side",
    ),
    "window beside a bias that ends at the last key": (
        lambda q, k, v: sqrtdk.attention(q[..., 9:, :], k, v, causal_lower_right(L - 9, L), window=5),
        "Pass causal_lower_right=True in place of the bias",
    ),
    "name of a score": (lambda q, k, v: sqrtdk.attention(q, k, v, score="cosin"), "did you mean 'cosine'?"),
    "score that is not called": (lambda q, k, v: sqrtdk.attention(q, k, v, score=scores.distance), "scores.distance()"),
    "score of one pair": (
        lambda q, k, v: sqrtdk.attention(q, k, v, score=lambda q, k: (q * k).sum(-1)),
        "score(q, k) returns (2, 4, 16, 16)",
    ),
    "another name of a statistic": (lambda q, k, v: aux(q, k, v).entropy, "did you mean 'entropy_nats'?"),
    "another name in measure": (lambda q, k, v: sqrtdk.measure(q, k).entropy, "did you mean 'entropy_nats'?"),
}


@pytest.mark.parametrize("name", CURES)
def test_an_error_shows_the_cure_in_its_traceback(name: str, qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    call, cure = CURES[name]
    with pytest.raises((ValueError, TypeError, AttributeError)) as raised:
        call(*qkv)
    assert cure in "".join(traceback.format_exception(raised.value))


def test_output_weights_and_statistics_come_in_this_order(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = (t.requires_grad_() for t in qkv)
    torch.manual_seed(3)
    output, weights, aux = sqrtdk.attention(
        q, k, v, is_causal=True, sinks=0.0, dropout_p=0.5, return_weights=True, return_aux=True
    )
    torch.testing.assert_close(weights @ v, output)
    assert ((weights > 0).sum(-1) <= aux.keys).all()
    assert bool((weights == 0)[..., -1, :].any())  # after dropout
    _, undropped = sqrtdk.attention(q, k, v, is_causal=True, sinks=0.0, return_weights=True)
    torch.testing.assert_close(undropped.sum(-1), 1.0 - torch.exp(-aux.lse))  # the rest is the sink's
    assert torch.autograd.grad(undropped.square().sum(), q)[0].abs().sum() > 0
    assert sqrtdk.explain(q, k, v, return_weights=True).impl == "dense"


def test_what_holds_statistics_shows_their_names_and_no_numbers(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v = qkv
    shown = "keys, max_logit, min_logit, mean, variance, lse, entropy_nats, collision, effective_keys, peak, off_peak"
    rows = sqrtdk.measure(q, k)
    assert repr(rows) == f"RowStats({shown}, jacobian_norm: each (2, 4, 16) float32)"
    assert set(shown.split(", ")) - {"effective_keys", "off_peak"} < {*aux(q, k, v)._fields}
    assert repr(AuxRequest(max_scores=True)) == repr(AuxRequest(max_logit=True))


def test_a_function_as_a_score_learns_by_blocks_of_rows(
    qkv: tuple[Tensor, Tensor, Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "BLOCK_PAIRS", 2 * H * L * 3)
    weight = torch.nn.Linear(8, 8)
    seen: list[int] = []

    def score(q: Tensor, k: Tensor) -> Tensor:
        seen.append(q.shape[-2])
        return weight(q) @ k.mT

    q, k, v = qkv
    output = sqrtdk.attention(q, k, v, score=score, impl="tiled")
    assert set(seen) == {3, 1}
    z = weight(q) @ k.mT
    torch.testing.assert_close(output, z.softmax(-1) @ v)
    torch.testing.assert_close(sqrtdk.measure(q, k, score=score).max_logit, z.amax(-1))
    found, wanted = (torch.autograd.grad(each.square().sum(), weight.weight) for each in (output, z.softmax(-1) @ v))
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-4)
    half = sqrtdk.attention(*(t.bfloat16() for t in qkv), score=score)
    assert half.dtype == torch.bfloat16


def test_a_compiler_reads_the_score_of_a_module(qkv: tuple[Tensor, Tensor, Tensor]) -> None:
    module = sqrtdk.nn.CosineAttention()
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*qkv), module(*qkv))
