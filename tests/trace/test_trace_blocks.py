"""Attention whose logits are computed block by block of keys: one call, its formula, one scale a block."""

from __future__ import annotations

import gc
import math

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.tracing import AttentionCall
from tests.attentions.blocks import BLOCK, WAYS
from tests.attentions.each import each
from tests.trace.blocks_by_hand import (
    KEYS,
    MERGED,
    ONE,
    ROOT,
    Attend,
    Attending,
    B,
    E,
    H,
    L,
    Scales,
    causal,
    is_dense,
    online,
    only,
    padding,
    products,
    traced,
)

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


def written(scales: Scales) -> Attending:
    """Logits are written into one tensor, the last block first."""

    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = torch.empty(B, H, L, L)
        for place in (2, 0, 1):
            keys = slice(place * BLOCK, (place + 1) * BLOCK)
            z[..., keys] = q @ k[:, :, keys].mT * scales[place]
        return z.masked_fill(causal(L, L), -torch.inf).softmax(-1) @ v

    return attend


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
    "written": (written((ROOT, ROOT, ROOT)), "softmax(0.25 * q.k + causal)"),
    "keys by queries": (keys_by_queries, "softmax(0.25 * q.k)"),
}


def check_side_by_side(call: AttentionCall, name: str) -> None:
    assert call.formula == WRITTEN[name][1]
    assert (call.batch, call.heads, call.query_len, call.key_len, call.head_dim) == (B, H, L, L, E)
    assert call.scale.effective == pytest.approx(ROOT)
    assert call.scale.agree is (True if call.device == "cpu" else None)
    keys = [(0, 4), (5, 11)] if name == "keys by queries" else [(0, 3), (4, 7), (8, 11)]
    assert [(block.first, block.last) for block in call.blocks] == keys
    for block in call.blocks:
        assert block.scale.symbolic == pytest.approx(ROOT)
        assert call.device == "meta" or block.scale.numeric == pytest.approx(ROOT, rel=1e-3)


@pytest.mark.parametrize("name", WRITTEN)
def test_blocks_side_by_side_are_one_call(name: str) -> None:
    """With the statistics of the whole; without data too."""
    attend, _ = WRITTEN[name]
    check_side_by_side(only(attend, "meta"), name)
    run, _, model, x = traced(attend)
    (call,) = run.calls
    check_side_by_side(call, name)
    logits = products(model, x) * ROOT
    if name == "alibi":
        logits = logits - 0.5 * (torch.arange(L)[:, None] - torch.arange(L)).abs()
    if "causal" in call.formula:
        logits = logits.masked_fill(causal(L, L), -math.inf)
        assert call.mask is not None
        assert (call.mask.kind, call.mask.least, call.mask.greatest) == ("causal", 0, L - 1)
        assert call.mask.masked_weight == pytest.approx(0.0, abs=1e-6)
    is_dense(call, logits)
    largest = float(products(model, x).abs().max())
    assert call.max_product == pytest.approx(largest * ROOT if name == "keys by queries" else largest)


@each("device", ["cpu", "meta"])
@each("scales", [(1.0, ROOT, ROOT), (ROOT, ROOT, 2 * ROOT), (ROOT, ROOT**2, ROOT)])
def test_unlike_scales_are_told_by_block(scales: Scales, device: str) -> None:
    call = only(side_by_side(scales, hide=True), device)
    assert call.unlike_blocks
    assert call.formula == "softmax(scale[block] * q.k + causal)"
    assert call.scale.effective is None
    assert [block.scale.symbolic for block in call.blocks] == pytest.approx(list(scales))
    if device == "cpu":
        assert [block.scale.numeric for block in call.blocks] == pytest.approx(list(scales), rel=1e-3)
    assert "keys 0 to " in (call.scale.reason or "")


def test_unlike_scales_of_logits_that_were_written_by_slice() -> None:
    call = only(written((ROOT, 1.0, ROOT)))
    assert [block.scale.numeric for block in call.blocks] == pytest.approx([ROOT, 1.0, ROOT], rel=1e-3)
    assert "keys 4 to 7 by 1" in (call.scale.reason or "")


def test_products_side_by_side_along_the_heads_are_no_blocks_of_keys() -> None:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = torch.cat([q[:, [h]] @ k[:, [h]].mT * ROOT for h in range(H)], 1)
        return z.softmax(-1) @ v

    assert only(attend).blocks == ()


# -- a running sum -----------------------------------------------------------------------------------------------------

BY_SUMS = [name for name in WAYS if name not in MERGED]
MASKED = [name for name in BY_SUMS if WAYS[name].masks]


def check_running_sum(call: AttentionCall, name: str) -> None:
    hide = WAYS[name].masks
    assert call.formula == ("softmax(0.25 * q.k + causal)" if hide else "softmax(0.25 * q.k)")
    assert (call.site, call.index, call.kind, call.score) == ("", 0, "eager", "dot")
    assert (call.batch, call.heads, call.kv_heads, call.head_dim) == (B, H, H, E)
    assert (call.query_len, call.key_len, call.value_dim) == (L, L, E + (name == "column_of_ones"))
    assert call.scale.effective == pytest.approx(ROOT)
    assert call.scale.agree is (True if call.device == "cpu" else None)
    assert [(block.first, block.last) for block in call.blocks] == KEYS
    assert [block.scale.symbolic for block in call.blocks] == pytest.approx(list(ONE))
    if call.device == "cpu":
        assert [block.scale.numeric for block in call.blocks] == pytest.approx(list(ONE), rel=1e-3)
    if hide:
        assert call.mask is not None
        assert (call.mask.kind, call.mask.least, call.mask.greatest, call.mask.blind_rows) == ("causal", 0, L - 1, 0)


@pytest.mark.parametrize("name", WAYS)
def test_a_running_sum_is_one_call(name: str) -> None:
    """Each way is the dense attention; the record of those that sum says so, with its statistics."""
    attend, hide = online(name, ONE, hide=WAYS[name].masks), WAYS[name].masks
    run, observed, model, x = traced(attend)
    logits = products(model, x) * ROOT
    logits = logits.masked_fill(causal(L, L), -math.inf) if hide else logits
    with torch.no_grad():
        v = model.v(x).double().unflatten(-1, (H, E)).transpose(1, 2)
    expected = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    assert float((observed.double() - expected).abs().max()) < 1e-5
    if name in BY_SUMS:
        (call,) = run.calls
        check_running_sum(call, name)
        is_dense(call, logits)
        check_running_sum(only(attend, "meta"), name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", [name for name in MASKED if name != "without_a_maximum"])  # it divides 0 by 0
def test_padding_on_the_left_beside_a_causal_mask(name: str) -> None:
    run, _, model, x = traced(online(name, ONE, hide=True, pad=True))
    (call,) = run.calls
    assert call.formula == "softmax(0.25 * q.k + causal + padding)"
    assert call.mask is not None
    assert call.mask.blind_rows == H * 3
    assert call.scale.agree is True
    is_dense(call, (products(model, x) * ROOT).masked_fill(causal(L, L) | padding(), -math.inf))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", BY_SUMS)
@each("scale, device", [(1.0, "cpu"), (ROOT**2, "meta")])
def test_a_running_sum_with_a_wrong_scale(name: str, scale: float, device: str) -> None:
    """In every block, or in one of them alone."""
    call = only(online(name, (scale,) * 3), device)
    assert call.scale.effective == pytest.approx(scale)
    assert not call.unlike_blocks
    scales = (ROOT, ROOT, 2 * ROOT) if device == "meta" else (scale, ROOT, ROOT)
    call = only(online(name, scales), device)
    assert call.unlike_blocks
    assert call.scale.effective is None
    assert call.formula == "softmax(scale[block] * q.k)"
    assert [block.scale.symbolic for block in call.blocks] == pytest.approx(list(scales))


def test_an_exp_that_no_sum_of_it_divides_is_missed() -> None:
    run, *_ = traced(lambda m, q, k, v: torch.exp(q @ k.mT * ROOT) @ v)
    assert run.calls == ()
    assert ["no sum of it" in entry.reason for entry in run.not_measured] == [True]
    run, *_ = traced(lambda m, q, k, v: torch.exp(q @ k.mT * ROOT) @ v / L)
    assert (run.calls, len(run.not_measured)) == ((), 1)


def test_a_softmax_by_hand_is_as_before() -> None:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT * ROOT
        power = (z - z.amax(-1, keepdim=True)).exp()
        return power / power.sum(-1, keepdim=True) @ v

    call = only(attend)
    assert (call.formula, call.blocks, call.op) == ("softmax(0.25 * q.k)", (), "aten.div")


@pytest.mark.full
def test_nothing_is_held_after_the_block() -> None:
    model, x = Attend(online("running", ONE, hide=True)), torch.randn(B, L, 32)
    with torch.no_grad():
        model(x)
        gc.collect()
        before = {id(item) for item in gc.get_objects() if issubclass(type(item), Tensor)}
        with sqrtdk.trace(model) as run:
            model(x)
    left = [item for item in gc.get_objects() if issubclass(type(item), Tensor) and id(item) not in before]
    assert [tuple(item.shape) for item in left] == []
    assert len(run.calls) == 1


def test_layers_are_told_in_their_order() -> None:
    model = nn.Sequential(*(Attend(online("running", (scale,) * 3)) for scale in ONE))
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(torch.randn(B, L, 32))
    assert [call.site for call in run.calls] == ["0", "1", "2"]
