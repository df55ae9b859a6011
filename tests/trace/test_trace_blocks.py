"""Attention whose logits are computed block by block of keys: one call, its formula, one scale a block."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.stats import head_stats_from_logits
from sqrtdk.tracing import AttentionCall, Trace

B, H, L, E, BLOCK = 2, 2, 12, 16, 4
ROOT = E**-0.5
Attending = Callable[["Attend", Tensor, Tensor, Tensor], Tensor]
Scales = tuple[float, ...]


class Attend(nn.Module):
    """Projections, and in the middle a function."""

    def __init__(self, attend: Attending) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(32, H * E) for _ in range(3))
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, E)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.attend(self, q, k, v).transpose(1, 2).flatten(2)


def causal(rows: int, columns: int, first_row: int = 0, first_key: int = 0) -> Tensor:
    """True where the row may not see the key."""
    return torch.arange(first_key, first_key + columns) > torch.arange(first_row, first_row + rows)[:, None]


def traced(attend: Attending, device: str = "cpu") -> tuple[Trace, Tensor, Attend, Tensor]:
    """One run, its output bit-equal to the run without a trace."""
    torch.manual_seed(0)
    with torch.device(device), torch.no_grad():
        model, x = Attend(attend), torch.randn(B, L, 32)
        plain = model(x)
        with sqrtdk.trace(model) as run:
            observed = model(x)
    assert plain.is_meta or torch.equal(plain, observed)
    return run, observed, model, x


def only(attend: Attending, device: str = "cpu") -> AttentionCall:
    run, *_ = traced(attend, device)
    assert (run.not_attention, run.not_measured) == ((), ())
    (call,) = run.calls
    return call


def products(model: Attend, x: Tensor) -> Tensor:
    """q . k in float64."""
    with torch.no_grad():
        q, k = (part(x).double().unflatten(-1, (H, E)).transpose(1, 2) for part in (model.q, model.k))
    return q @ k.mT


def is_dense(call: AttentionCall, logits: Tensor) -> None:
    """The statistics of the record are those of float64 logits, -inf where hidden."""
    expected = head_stats_from_logits(logits, logits > -math.inf).heads
    assert call.stats is not None
    for name in ("max_logit", "min_logit", "std_logit", "entropy_nats", "effective_keys", "peak", "keys"):
        assert getattr(call.stats, name) == pytest.approx(getattr(expected, name), rel=1e-4, abs=1e-5), name


# -- logits side by side -----------------------------------------------------------------------------------------------


def side_by_side(scales: Scales, *, hide: bool = False, late: float = 1.0, bias: bool = False) -> Attending:
    """Logits of blocks of keys, put together before one softmax, with what follows the blocks."""

    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = k.split(BLOCK, -2)
        z = torch.cat([q @ part.mT * scale for part, scale in zip(parts, scales, strict=True)], -1) * late
        if bias:
            z = z - 0.5 * (torch.arange(L)[:, None] - torch.arange(L)).abs()
        return (z.masked_fill(causal(L, L), -torch.inf) if hide else z).softmax(-1) @ v

    return attend


def hidden_by_block(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each block has its part of the mask, and the first its scale on k."""
    z = [
        (q @ part.mT * ROOT).masked_fill(causal(L, BLOCK, 0, place * BLOCK), -1e9)
        for place, part in enumerate(k.split(BLOCK, -2))
    ]
    return torch.cat(z, -1).softmax(-1) @ v


def grown(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One block after the other is put beside those before it, in the layout of folded heads."""
    q, k = (t.flatten(0, 1) for t in (q, k))
    z = torch.bmm(q, k[:, :BLOCK].mT) * ROOT
    for first in range(BLOCK, L, BLOCK):
        z = torch.cat([z, torch.bmm(q, k[:, first : first + BLOCK].mT) * ROOT], 2)
    return z.view(B, H, L, L).softmax(-1) @ v


def keys_by_queries(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The softmax runs over the second last axis."""
    z = torch.cat([part @ (q * ROOT).mT for part in k.split([5, 7], -2)], -2)
    return z.softmax(-2).mT @ v


WRITTEN: dict[str, tuple[Attending, str]] = {
    "plain": (side_by_side((ROOT, ROOT, ROOT)), "softmax(0.25 * q.k)"),
    "causal": (side_by_side((ROOT, ROOT, ROOT), hide=True), "softmax(0.25 * q.k + causal)"),
    "scaled after": (side_by_side((0.5, 0.5, 0.5), late=0.5, hide=True), "softmax(0.25 * q.k + causal)"),
    "alibi": (side_by_side((ROOT, ROOT, ROOT), bias=True), "softmax(0.25 * q.k + alibi)"),
    "hidden by block": (hidden_by_block, "softmax(0.25 * q.k + causal)"),
    "grown": (grown, "softmax(0.25 * q.k)"),
    "keys by queries": (keys_by_queries, "softmax(0.25 * q.k)"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", WRITTEN)
def test_blocks_side_by_side_are_one_call(name: str, device: str) -> None:
    attend, formula = WRITTEN[name]
    call = only(attend, device)
    assert call.formula == formula
    assert (call.batch, call.heads, call.query_len, call.key_len, call.head_dim) == (B, H, L, L, E)
    assert call.scale.effective == pytest.approx(ROOT)
    assert call.scale.agree is (True if device == "cpu" else None)
    assert [(block.first, block.last) for block in call.blocks] == (
        [(0, 4), (5, 11)] if name == "keys by queries" else [(0, 3), (4, 7), (8, 11)]
    )
    for block in call.blocks:
        assert block.scale.symbolic == pytest.approx(ROOT)
        assert device == "meta" or block.scale.numeric == pytest.approx(ROOT, rel=1e-3)


@pytest.mark.parametrize("name", WRITTEN)
def test_statistics_of_blocks_are_those_of_the_whole(name: str) -> None:
    run, _, model, x = traced(WRITTEN[name][0])
    (call,) = run.calls
    logits = products(model, x) * ROOT
    if name == "alibi":
        logits = logits - 0.5 * (torch.arange(L)[:, None] - torch.arange(L)).abs()
    if "causal" in call.formula:
        logits = logits.masked_fill(causal(L, L), -math.inf)
        assert call.mask is not None
        assert (call.mask.kind, call.mask.least, call.mask.greatest) == ("causal", 0, L - 1)
        assert call.mask.masked_weight == pytest.approx(0.0, abs=1e-6)
    is_dense(call, logits)
    assert call.max_product == pytest.approx(
        float(products(model, x).abs().max()) * (1 if "keys" not in name else ROOT)
    )


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("scales", [(1.0, ROOT, ROOT), (ROOT, ROOT, 2 * ROOT), (ROOT, ROOT**2, ROOT)])
def test_unlike_scales_are_told_by_block(scales: Scales, device: str) -> None:
    call = only(side_by_side(scales, hide=True), device)
    assert call.unlike_blocks
    assert call.formula == "softmax(scale[block] * q.k + causal)"
    assert call.scale.effective is None
    assert [block.scale.symbolic for block in call.blocks] == pytest.approx(list(scales))
    if device == "cpu":
        assert [block.scale.numeric for block in call.blocks] == pytest.approx(list(scales), rel=1e-3)
    assert "keys 0 to " in (call.scale.reason or "")


def test_products_side_by_side_along_the_heads_are_no_blocks_of_keys() -> None:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = torch.cat([q[:, [h]] @ k[:, [h]].mT * ROOT for h in range(H)], 1)
        return z.softmax(-1) @ v

    assert only(attend).blocks == ()
