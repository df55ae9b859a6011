"""Heads are heads in every layout: above the batch, beside windows and grids, from pieces, each with its scale."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from tests.attentions.each import each
from tests.attentions.heads import ROOT, B, D, E, H, Heads, L, over_devices, trace
from tests.attentions.layouts import COLUMNS, LAID, ROWS, Laid, blocks, traced, windows_after_projection


@over_devices
@pytest.mark.parametrize("name", LAID)
def test_heads_are_heads_in_every_layout(name: str, device: str) -> None:
    _, _, batch, heads, (rows, columns) = LAID[name]
    (call,) = traced(name, device).calls
    assert (call.batch, call.heads, call.kv_heads, call.head_dim) == (batch, heads, heads, D // heads)
    assert (call.query_len, call.key_len, call.unknown) == (rows, columns, ())
    assert call.self_attention is True
    assert call.scale.effective == pytest.approx((D // heads) ** -0.5)
    if device == "cpu":
        assert call.scale.agree is True
        assert call.stats is not None
        assert (call.stats.heads, call.stats.rows) == (heads, batch * rows)


@over_devices
@each("kv_heads", [H, H // 2, 1])
def test_heads_of_a_model_without_a_batch(kv_heads: int, device: str) -> None:
    """`q.unsqueeze(0)` gives SDPA the batch that it wants; the heads of the key stay its own."""

    def run(m: Laid, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, E)).transpose(0, 1) for t in (m.q(x), m.k(x), m.v(x)))
        k, v = k[:kv_heads], v[:kv_heads]
        return functional.scaled_dot_product_attention(q[None], k[None], v[None], enable_gqa=kv_heads < H)

    model = Laid(run).double().to(device)
    with torch.no_grad(), sqrtdk.trace(model) as seen:
        model(torch.randn(L, D, dtype=torch.float64, device=device))
    (call,) = seen.calls
    assert (call.batch, call.heads, call.kv_heads, call.query_len, call.key_len) == (1, H, kv_heads, L, L)
    assert (call.unknown, call.scale.effective) == ((), pytest.approx(ROOT))


@over_devices
@each("last", [True, False])
def test_heads_that_share_a_key_are_no_queries(last: bool, device: str) -> None:
    """Multi-query attention whose product takes the heads for rows, as in mobile networks."""

    def run(m: Laid, x: Tensor) -> Tensor:
        q, k, v = m.q(x).unflatten(-1, (H, E)), m.k(x)[..., :E], m.v(x)[..., :E]
        if last:
            return torch.einsum("bnhm,bmv->bnhv", (torch.einsum("bnhk,bmk->bnhm", q, k) * m.factor).softmax(-1), v)
        return torch.einsum("bmnh,bmv->bnhv", (torch.einsum("bnhk,bmk->bmnh", q, k) * m.factor).softmax(1), v)

    model = Laid(run).double().to(device)
    with torch.no_grad(), sqrtdk.trace(model) as seen:
        model(torch.randn(B, L, D, dtype=torch.float64, device=device))
    (call,) = seen.calls
    assert (call.batch, call.heads, call.kv_heads, call.query_len, call.key_len) == (B, H, 1, L, L)
    assert (call.unknown, call.scale.effective) == ((), pytest.approx(ROOT))
    assert call.scale.agree is (True if device == "cpu" else None)


@each("name", ["cat of chunks", "stack of splits, first", "heads above the batch", "heads first"])
def test_the_statistics_of_a_head_are_its_own(name: str) -> None:
    model = Laid(LAID[name][0]).double()
    for part in (model.q, model.k):
        nn.init.zeros_(part.bias)
    x = torch.randn(B, L, D, dtype=torch.float64)
    with torch.no_grad(), sqrtdk.trace(model) as seen:
        model(x)
    (call,) = seen.calls
    q, k = (part(x).detach().view(B, L, H, E).transpose(1, 2) for part in (model.q, model.k))
    z = q @ k.transpose(2, 3) / math.sqrt(E)
    assert call.stats is not None
    assert call.stats.max_logit == pytest.approx(z.amax((0, 2, 3)).tolist())
    assert call.stats.std_logit == pytest.approx(z.std(-1, correction=0).square().mean((0, 2)).sqrt().tolist())


def one_scale_a_head(m: Laid, shape: tuple[int, ...], parts: tuple[Tensor, ...]) -> Tensor:
    """Cosines with one learned factor a head, as in Swin v2 (Liu et al. 2021, arXiv:2111.09883)."""
    q, k, v = parts
    cosines = torch.nn.functional.normalize(q, dim=-1) @ torch.nn.functional.normalize(k, dim=-1).mT
    return (cosines * m.gain.exp().view(shape)).softmax(-1) @ v


def heads_of(part: Tensor) -> Tensor:
    return part.unflatten(-1, (H, E)).transpose(1, 2)


SCALED = {
    "swin": lambda m, x: one_scale_a_head(m, (H, 1, 1), tuple(map(heads_of, m.parts(blocks(x))))),
    "windows before heads": lambda m, x: one_scale_a_head(
        m, (1, 1, H, 1, 1), tuple(map(windows_after_projection, m.parts(x)))
    ),
    "heads before windows": lambda m, x: one_scale_a_head(
        m, (H, 1, 1, 1), tuple(windows_after_projection(part).transpose(1, 2) for part in m.parts(x))
    ),
    "heads above the batch": lambda m, x: one_scale_a_head(
        m, (H, 1, 1, 1), tuple(part.unflatten(-1, (H, E)).permute(2, 0, 1, 3) for part in m.parts(x.flatten(1, 2)))
    ),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_scale_of_each_head_is_read_in_every_layout(name: str) -> None:
    model = Laid(SCALED[name]).double()
    with torch.no_grad(), sqrtdk.trace(model) as seen:
        model(torch.randn(B, ROWS, COLUMNS, D, dtype=torch.float64))
    (call,) = seen.calls
    assert (call.heads, call.norm, call.scale.agree) == (H, "l2", True)
    assert call.formula == "softmax(exp(gain)[h] * l2(q).l2(k))"
    assert call.scale.per_head == pytest.approx(model.gain.detach().exp().tolist())


def test_a_scale_of_each_head_is_read_where_heads_come_last() -> None:
    def attend(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = torch.einsum("bhid,bhjd->bijh", q, k) * m.gate.exp()
        return torch.einsum("bijh,bhjd->bhid", z.softmax(2), v)

    model, _, run = trace(attend)
    (call,) = run.calls
    assert (call.heads, call.scale.agree) == (H, True)
    assert call.scale.per_head == pytest.approx(model.gate.detach().exp().tolist())


def test_a_division_by_a_number_of_each_head_is_its_inverse() -> None:
    by = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64)[:H]

    def attend(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT) / by[:, None, None]).softmax(-1) @ v

    (call,) = trace(attend)[2].calls
    assert call.scale.agree is True
    assert call.scale.per_head == pytest.approx((1 / by).tolist())


class RowsFirst(nn.Module):
    """As Gemma's JAX code has it: weights (N, D, H), logits (B, T, N, S) of grouped heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv = nn.Parameter(torch.randn(4, 32, 8) / 5), nn.Parameter(torch.randn(2, 2, 32, 8) / 5)

    def forward(self, x: Tensor) -> Tensor:
        batch, rows, _ = x.shape
        q = torch.einsum("btd,ndh->btnh", x, self.q) * 8**-0.5
        k, v = torch.einsum("bsd,ckdh->cbskh", x, self.kv)
        z = torch.einsum("btkgh,bskh->btkgs", q.view(batch, rows, 2, 2, 8), k).reshape(batch, rows, 4, rows)
        seen = torch.ones(rows, rows, dtype=torch.bool).tril()[None, :, None]
        w = torch.where(seen, z, -1e30).softmax(-1).reshape(batch, rows, 2, 2, rows)
        return torch.einsum("btkgs,bskh->btkgh", w, v).flatten(2)


def test_rows_before_heads_of_projections_whose_positions_are_unknown() -> None:
    """The product folds rows and heads of a group, projections fold batch and rows: features tell them apart."""
    torch.manual_seed(0)
    with torch.no_grad(), sqrtdk.trace(model := RowsFirst()) as run:
        model(torch.randn(3, 10, 32))
    (call,) = run.calls
    assert call.formula == "softmax(0.3536 * q.k + causal)"
    assert (call.batch, call.heads, call.kv_heads, call.query_len, call.key_len) == (3, 4, 2, 10, 10)
