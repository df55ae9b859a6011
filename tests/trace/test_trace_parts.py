"""Masks in odd places and without data, logits of several products, caches written in place, folded normalisations."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.tracing import AttentionCall, Trace
from tests.attentions.each import each

E, H, L = 8, 2, 9
Attending = Callable[["Attend", Tensor, Tensor, Tensor], Tensor]


class Attend(nn.Module):
    """An attention with projections; `attend` says what happens between q, k and v."""

    def __init__(self, attend: Attending) -> None:
        super().__init__()
        self.qkv, self.extra, self.attend = nn.Linear(16, 48), nn.Linear(16, 16), attend
        self.norm = nn.BatchNorm1d(16).eval()
        self.norm.running_var.uniform_(0.5, 2.0)
        self.register_buffer("cache", torch.zeros(2, H, 20, E))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)
        self.x = x
        return self.attend(self, q, k, v)


def run(attend: Attending, device: str = "cpu") -> Trace:
    model = Attend(attend).to(device)
    with torch.no_grad(), sqrtdk.trace(model) as found:
        model(torch.randn(2, L, 16, device=device))
    return found


def only(attend: Attending, device: str = "cpu") -> AttentionCall:
    found = run(attend, device)
    assert found.not_measured == ()
    (call,) = found.calls
    return call


def product(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * 0.25


# -- masks without data ------------------------------------------------------------------------------------------------


def by_argument(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.25)


def by_fill(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1)
    return product(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v


def by_fill_in_place(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    hidden = torch.zeros(L, L, device=q.device)
    hidden.masked_fill_(torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return (product(q, k) + hidden).softmax(-1) @ v


def by_comparison(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    i = torch.arange(L, device=q.device)
    return torch.where(i[:, None] >= i[None], product(q, k), torch.finfo(q.dtype).min).softmax(-1) @ v


@each("attend", [by_argument, by_fill, by_fill_in_place, by_comparison])
def test_a_mask_of_numbers_alone_is_known_without_data(attend: Attending) -> None:
    """The formula on the meta device is that of a run, and so are the rows that see nothing."""
    ran, static = only(attend), only(attend, "meta")
    assert static.formula == ran.formula == "softmax(0.25 * q.k + causal)"
    assert static.mask is not None
    assert ran.mask is not None
    assert (static.mask.kind, static.mask.blind_rows) == (ran.mask.kind, ran.mask.blind_rows) == ("causal", 0)


def test_a_mask_made_of_an_input_stays_unknown_without_data() -> None:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return product(q, k).masked_fill(m.x[..., :1].mT[:, None] > 0, -math.inf).softmax(-1) @ v

    assert only(attend, "meta").formula == "softmax(0.25 * q.k + mask)"


# -- masks in odd places -----------------------------------------------------------------------------------------------


def test_a_mask_of_zeros_and_ones_that_is_added_is_named() -> None:
    call = only(
        lambda m, q, k, v: functional.scaled_dot_product_attention(
            q, k, v, attn_mask=torch.ones(L, L).tril(), scale=0.25
        )
    )
    assert (call.formula, call.bias, call.mask) == ("softmax(0.25 * q.k + zero-one mask)", "zero-one mask", None)


def test_a_mask_after_the_softmax_is_named() -> None:
    call = only(lambda m, q, k, v: product(q, k).softmax(-1) * torch.ones(L, L).tril() @ v)
    assert call.formula == "mask * softmax(0.25 * q.k)"
    assert call.stages[-1].where == "weights"
    call = only(lambda m, q, k, v: product(q, k).softmax(-1) * torch.rand(H, 1, 1) @ v)
    assert call.formula == "softmax(0.25 * q.k)"  # a factor a head is no mask


# -- several products --------------------------------------------------------------------------------------------------


def two_products(first: float, second: float) -> Attending:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        other = m.extra(m.x).unflatten(-1, (H, E)).transpose(1, 2)
        weights = torch.cat([q @ other.mT * first, q @ k.mT * second], -1).softmax(-1)
        return weights[..., :L] @ other + weights[..., L:] @ v

    return attend


@each("scale", [0.25, 1.0])
def test_products_side_by_side_have_one_scale(scale: float) -> None:
    """Global and local keys in one softmax (BigBird, Pegasus-X): no sinks."""
    call = only(two_products(scale, scale))
    assert call.scale.effective == pytest.approx(scale)
    assert call.formula == f"softmax({'' if scale == 1 else '0.25 * '}q.k)"
    assert not call.sinks
    assert call.key_len == 2 * L
    assert call.stats is not None


def test_products_of_unlike_scales_side_by_side_are_not_averaged() -> None:
    call = only(two_products(0.25, 0.5))
    assert call.scale.effective is None
    assert call.unlike_blocks
    assert call.formula == "softmax(scale[block] * q.k)"


# -- caches and folded norms -------------------------------------------------------------------------------------------


def by_index_copy(m: Attend, k: Tensor) -> Tensor:
    return m.cache.index_copy(2, torch.arange(L), k)


def by_index(m: Attend, k: Tensor) -> Tensor:
    m.cache[:, :, torch.arange(L)] = k
    return m.cache


def by_slice(m: Attend, k: Tensor) -> Tensor:
    m.cache[:, :, :L] = k
    return m.cache


@each("scale", [0.25, 1.0])
@each("write", [by_index_copy, by_index, by_slice])
def test_a_preallocated_cache_is_followed(write: Callable[[Attend, Tensor], Tensor], scale: float) -> None:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        visible = torch.arange(20) <= torch.arange(L)[:, None]
        return functional.scaled_dot_product_attention(q, write(m, k), v.new_ones(2, H, 20, E), visible, scale=scale)

    model = Attend(attend)
    x = torch.randn(2, L, 16)
    with torch.no_grad(), sqrtdk.trace(model) as found:
        for _ in range(3):
            model(x)
    assert [call.scale.effective for call in found.calls] == pytest.approx([scale] * 3)
    assert all(call.unknown == () for call in found.calls)


def test_a_batch_norm_of_fixed_statistics_belongs_to_the_projection() -> None:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q = m.norm(q.transpose(1, 2).reshape(-1, H * E)).view(2, L, H, E).transpose(1, 2)
        return product(q, k).softmax(-1) @ v

    call = only(attend)
    assert (call.formula, call.norm, call.unknown) == ("softmax(0.25 * q.k)", None, ())
    assert call.scale.agree is True


# -- a softmax by hand that divides by more than its sum ---------------------------------------------------------------


@each(
    "below, sinks",
    [
        (lambda e, top: e.sum(-1, keepdim=True), False),
        (lambda e, top: e.sum(-1, keepdim=True) + 1e-6, False),
        (lambda e, top: (e.sum(-1, keepdim=True) + 1e-9).clamp(min=1e-9), False),
        (lambda e, top: 1.0 + e.sum(-1, keepdim=True), True),
        (lambda e, top: e.sum(-1, keepdim=True) + torch.exp(-top), True),
        (lambda e, top: e.sum(-1, keepdim=True) + torch.exp(torch.ones(H, 1, 1) - top), True),
        (lambda e, top: torch.exp(torch.ones(H, 1, 1) - top) + e.sum(-1, keepdim=True), True),
    ],
)
def test_what_joins_the_denominator(below: Callable[[Tensor, Tensor], Tensor], sinks: bool) -> None:
    """A small number is a guard; 1, or the exp of what is no logit, is a sink."""

    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT * E**-0.5
        top = z.detach().amax(-1, keepdim=True)
        e = (z - top).exp()
        return e / below(e, top) @ v

    call = only(attend)
    assert call.sinks == sinks
    assert call.formula == "softmax(0.3536 * q.k" + (" + sinks)" if sinks else ")")
    assert call.scale.agree is True


# -- our own implementations -------------------------------------------------------------------------------------------


@each(
    "options, formula",
    [
        ({"impl": "fused"}, "softmax(0.3536 * q.k)"),
        ({"impl": "dense"}, "softmax(0.3536 * q.k)"),
        ({"impl": "dense", "is_causal": True}, "softmax(0.3536 * q.k + causal)"),
        ({"softcap": 5.0, "is_causal": True}, "softmax(5 * tanh(0.3536 * q.k / 5) + causal)"),
        ({"bias": sqrtdk.positions.alibi(H), "impl": "tiled"}, "softmax(0.3536 * q.k + alibi)"),
        ({"score": sqrtdk.scores.cosine(gain=10.0), "impl": "dense"}, "softmax(10 * l2(q).l2(k))"),
        ({"sinks": torch.tensor([0.5, -1.0]), "is_causal": True}, "softmax(0.3536 * q.k + causal + sinks)"),
    ],
)
def test_attention_by_sqrtdk_is_read(options: dict[str, object], formula: str) -> None:
    """Its dense softmax takes off a guarded maximum and divides by a guarded sum."""
    call = only(lambda m, q, k, v: sqrtdk.attention(q, k, v, **options))
    assert call.formula == formula
    assert call.sinks == ("sinks" in options)
    assert call.scale.agree is True
