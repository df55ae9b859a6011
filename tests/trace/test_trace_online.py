"""What stands around a running sum over blocks of keys, and softmaxes that are merged by their sums."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sqrtdk
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
    online,
    only,
    traced,
)

# -- what stands around the running sum --------------------------------------------------------------------------------


def steps(
    score: Callable[[Tensor, Tensor, int], Tensor],
    *,
    keep: Callable[[Tensor], Tensor] = lambda keep: keep,
    thin: Callable[[Tensor, int], Tensor] = lambda power, first: power,
) -> Attending:
    """A running sum of a score, of which the older part is kept as `keep` says, over weights changed by `thin`."""

    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        top = q.new_full((*q.shape[:-1], 1), -1e30)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for first in range(0, L, BLOCK):
            z = score(q, k[:, :, first : first + BLOCK], first)
            new = torch.maximum(top, z.amax(-1, keepdim=True))
            power, old = thin((z - new).exp(), first), (top - new).exp()
            total = total * old + power.sum(-1, keepdim=True)
            out = keep(old) * out + power @ v[:, :, first : first + BLOCK]
            top = new
        return out / total

    return attend


def turned(x: Tensor, first: int) -> Tensor:
    """Rotated by its positions."""
    angle = torch.arange(first, first + x.shape[-2])[:, None] * 100.0 ** (-torch.arange(0, E, 2) / E)
    cos, sin = angle.cos().repeat(1, 2), angle.sin().repeat(1, 2)
    return x * cos + torch.cat([-x[..., E // 2 :], x[..., : E // 2]], -1) * sin


def scaled(q: Tensor, k: Tensor, first: int) -> Tensor:
    return q @ k.mT * ROOT


AROUND: dict[str, tuple[Attending, str]] = {
    "rotated whole": (
        lambda m, q, k, v: steps(scaled)(m, turned(q, 0), turned(k, 0), v),
        "softmax(0.25 * rope(q).rope(k))",
    ),
    "rotated by block": (
        steps(lambda q, k, first: scaled(turned(q, 0), turned(k, first), first)),
        "softmax(0.25 * rope(q).rope(k))",
    ),
    "softcap": (
        steps(lambda q, k, first: 5 * torch.tanh(scaled(q, k, first) / 5)),
        "softmax(5 * tanh(0.25 * q.k / 5))",
    ),
    "alibi": (
        steps(
            lambda q, k, first: scaled(q, k, 0) - (torch.arange(L)[:, None] - torch.arange(first, first + BLOCK)).abs()
        ),
        "softmax(0.25 * q.k + alibi)",
    ),
    "scale on q": (lambda m, q, k, v: steps(lambda q, k, first: q @ k.mT)(m, q * ROOT, k, v), "softmax(0.25 * q.k)"),
    "mask on the weights": (
        steps(scaled, thin=lambda power, first: power * ~causal(L, BLOCK, 0, first)),
        "softmax(0.25 * q.k + causal)",
    ),
    "one key head": (
        lambda m, q, k, v: steps(scaled)(m, q, *(t[:, :1].expand(-1, H, -1, -1) for t in (k, v))),
        "softmax(0.25 * q.k)",
    ),
    "folded heads": (
        lambda m, q, k, v: (
            WAYS["running"].way(*(t.flatten(0, 1) for t in (q, k, v)), ONE, (None, None)).view(B, H, L, E)
        ),
        "softmax(0.25 * q.k)",
    ),
    "rows of an odd number": (
        lambda m, q, k, v: WAYS["by_blocks_of_queries"].way(q[:, :, :9], k, v, ONE, (None, None)),
        "softmax(0.25 * q.k)",
    ),
    "one row": (lambda m, q, k, v: steps(scaled)(m, q[:, :, -1:], k, v), "softmax(0.25 * q.k)"),
    "one division": (
        lambda m, q, k, v: (lambda power: (power @ v) / power.sum(-1, keepdim=True))(torch.exp(scaled(q, k, 0))),
        "softmax(0.25 * q.k)",
    ),
}


@each("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", AROUND)
def test_what_stands_around_a_running_sum(name: str, device: str) -> None:
    attend, formula = AROUND[name]
    call = only(attend, device)
    assert call.formula == formula
    assert call.scale.effective == pytest.approx(ROOT)
    assert call.scale.agree is (True if device == "cpu" else None)
    assert (call.batch, call.heads, call.kv_heads) == (B, H, 1 if name == "one key head" else H)
    assert call.key_len == L


def test_dropout_of_a_running_sum_is_told() -> None:
    call = only(steps(scaled, thin=lambda power, first: torch.dropout(power, 0.0, True)))
    assert call.dropout == 0.0
    torch.manual_seed(0)
    model = Attend(steps(scaled, thin=lambda power, first: torch.dropout(power, 0.25, True)))
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(torch.randn(B, L, 32))
    assert [(call.dropout, call.scale.agree) for call in run.calls] == [(0.25, True)]


@each("device", ["cpu", "meta"])
def test_sums_that_are_never_brought_to_one_maximum_are_not_judged(device: str) -> None:
    call = only(steps(scaled, keep=torch.ones_like), device)
    assert call.scale.effective is None
    assert call.unknown == ("blocks summed under unlike maxima",)


def test_sums_that_come_to_something_else_are_not_judged() -> None:
    call = only(steps(scaled, keep=lambda keep: keep * keep))
    assert call.scale.effective is None
    assert call.unknown == ("blocks that do not add up to the softmax of their logits",)


def test_two_attentions_of_one_module_stay_two() -> None:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        way = WAYS["by_blocks_of_queries"].way
        return way(q, k, v, ONE, (None, None)) + way(k, q, v, (1.0,) * 3, (None, None))

    run, *_ = traced(attend)
    assert [(call.index, call.scale.effective, call.query_len) for call in run.calls] == [(0, ROOT, L), (1, 1.0, L)]


def test_logits_of_many_blocks_are_not_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sqrtdk.tracing.lower.online.MOST_HELD_LOGITS", B * H * L * BLOCK)
    call = only(online("running", ONE, hide=True))
    assert call.scale.effective == pytest.approx(ROOT)
    assert (call.formula, call.stats) == ("softmax(0.25 * q.k + mask)", None)
    assert "too many" in (call.stats_reason or "")
    assert call.blocks[0].scale.numeric == pytest.approx(ROOT, rel=1e-3)


def test_an_autograd_function_of_a_running_sum() -> None:
    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return WAYS["in_pieces_of_buffers"].way(q, k, v, ONE, (None, None))

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return grad, grad, grad

    model = Attend(lambda m, q, k, v: Flash.apply(q, k, v))
    with sqrtdk.trace(model) as run:
        model(torch.randn(B, L, 32)).sum().backward()
    assert [(call.formula, len(call.blocks)) for call in run.calls] == [("softmax(0.25 * q.k)", 3)]


# -- results of several softmaxes, weighed by their sums ---------------------------------------------------------------


def merged_by_rows(scales: Scales) -> Attending:
    """Blocks of queries outside, each with a softmax of every block of keys."""

    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = q.split(BLOCK, -2)
        return torch.cat([WAYS["merged"].way(part, k, v, scales, (None, None)) for part in rows], -2)

    return attend


@each("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MERGED)
def test_results_that_are_merged_are_one_call(name: str, device: str) -> None:
    call = only(online(name, ONE), device)
    assert (call.formula, call.query_len, call.key_len, call.index) == ("softmax(0.25 * q.k)", L, L, 0)
    assert [(block.first, block.last) for block in call.blocks] == KEYS
    assert (call.scale.effective, call.mask) == (pytest.approx(ROOT), None)
    assert call.scale.agree is (True if device == "cpu" else None)
    assert (call.stats is None, bool(call.stats_reason)) == (True, True)


@pytest.mark.parametrize("name", MERGED)
def test_masks_of_results_that_are_merged(name: str) -> None:
    call = only(online(name, ONE, hide=True))
    assert call.formula == "softmax(0.25 * q.k + mask)"
    assert call.mask is not None
    assert (call.mask.kind, call.mask.least, call.mask.greatest) == ("mask", 0, L - 1)


@each("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", MERGED)
def test_unlike_scales_of_results_that_are_merged(name: str, device: str) -> None:
    call = only(online(name, (ROOT, 1.0, ROOT), hide=device == "cpu"), device)
    assert call.unlike_blocks
    assert call.formula == ("softmax(scale[block] * q.k + mask)" if device == "cpu" else "softmax(scale[block] * q.k)")
    assert [block.scale.symbolic for block in call.blocks] == pytest.approx([ROOT, 1.0, ROOT])


def test_results_that_are_merged_row_by_row() -> None:
    run, *_ = traced(merged_by_rows(ONE))
    assert [(call.index, call.query_len, call.key_len) for call in run.calls] == [(i, BLOCK, L) for i in range(3)]


def test_results_that_are_added_or_gated_stay_apart() -> None:
    """Two attentions whose results are summed, as adapters do, are no blocks of one."""

    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pairs = zip(k.split(6, -2), v.split(6, -2), strict=True)
        halves = [(q @ key.mT * ROOT).softmax(-1) @ value for key, value in pairs]
        return halves[0] + 0.5 * halves[1] * torch.sigmoid(q)

    run, *_ = traced(attend)
    assert [(call.key_len, call.blocks) for call in run.calls] == [(6, ())] * 2


# -- several attentions in one loop ------------------------------------------------------------------------------------


def test_each_head_and_sequence_alone() -> None:
    """Loops over the batch and the heads around the running sum: matrices, one attention each."""

    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = [[steps(scaled)(m, *(t[b, h][None, None] for t in (q, k, v)))[0, 0] for h in range(H)] for b in range(B)]
        return torch.stack([torch.stack(row) for row in rows])

    run, *_ = traced(attend)
    assert [(call.query_len, call.key_len, call.heads, call.mask) for call in run.calls] == [(L, L, 1, None)] * (B * H)
    assert [call.scale.agree for call in run.calls] == [True] * (B * H)


@each("device", ["cpu", "meta"])
def test_blocks_that_see_all_of_their_own_and_of_the_earlier_ones(device: str) -> None:
    """Nothing is masked: what is not computed is not seen."""

    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for row in range(0, L, BLOCK):
            keys = slice(0, row + BLOCK)
            scales = (ROOT,) * (row // BLOCK + 1)
            part = q[:, :, row : row + BLOCK]
            rows.append(WAYS["from_the_first_block"].way(part, k[:, :, keys], v[:, :, keys], scales, (None, None)))
        return torch.cat(rows, 2)

    call = only(attend, device)
    assert (call.formula, call.query_len, call.key_len) == ("softmax(0.25 * q.k + mask)", L, L)
    assert call.mask is not None
    assert (call.mask.form, call.mask.least, call.mask.greatest) == ("implicit", 1 - BLOCK, L - 1)


@each("way", ["by_blocks_of_queries", "divided_at_every_block", "in_pieces_of_buffers", "running"])
def test_the_callers_default_device_changes_no_record(way: str) -> None:
    """What ends with the trace is read under it, too."""
    model, x = Attend(online(way, ONE)), torch.randn(B, L, 32)
    plain, moved = sqrtdk.trace(model), sqrtdk.trace(model)
    with torch.no_grad(), plain:
        model(x)
    with torch.no_grad(), torch.device("meta"), moved:
        model(x)
    assert len(plain.calls) == 1
    assert (moved.not_attention, moved.not_measured) == ((), ())
    assert moved.calls == plain.calls
