"""Attention whose logits are computed block by block of keys: one call, its formula, one scale a block."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from attention_blocks import BLOCK, WAYS, Masks
from sqrtdk.stats import head_stats_from_logits
from sqrtdk.tracing import AttentionCall, Trace

B, H, L, E = 2, 2, 12, 16
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
    """Products of q and k in float64."""
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
    largest = float(products(model, x).abs().max())
    assert call.max_product == pytest.approx(largest * ROOT if name == "keys by queries" else largest)


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

ONE = (ROOT, ROOT, ROOT)
MERGED = ("merged", "by_a_softmax_of_sums", "by_shares", "ring")
BY_SUMS = [name for name in WAYS if name not in MERGED]
MASKED = [name for name in BY_SUMS if WAYS[name].masks]
KEYS = [(0, 3), (4, 7), (8, 11)]


def padding() -> Tensor:
    """Keys that are none, on the left of the second sequence."""
    return (torch.arange(L) < torch.tensor([0, 3])[:, None])[:, None, None]


def online(name: str, scales: Scales, *, hide: bool = False, pad: bool = False) -> Attending:
    """A way of attention with its masks."""

    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        masks: Masks = (causal(L, L) if hide else None, padding() if pad else None)
        return WAYS[name].way(q, k, v, scales, masks)

    return attend


@pytest.mark.parametrize("name", WAYS)
def test_every_way_is_attention(name: str) -> None:
    *_, observed, model, x = traced(online(name, ONE, hide=WAYS[name].masks))
    logits = products(model, x) * ROOT
    logits = logits.masked_fill(causal(L, L), -math.inf) if WAYS[name].masks else logits
    with torch.no_grad():
        v = model.v(x).double().unflatten(-1, (H, E)).transpose(1, 2)
    expected = (logits.softmax(-1) @ v).transpose(1, 2).flatten(2)
    assert float((observed.double() - expected).abs().max()) < 1e-5


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", BY_SUMS)
def test_a_running_sum_is_one_call(name: str, device: str) -> None:
    hide = WAYS[name].masks
    call = only(online(name, ONE, hide=hide), device)
    assert call.formula == ("softmax(0.25 * q.k + causal)" if hide else "softmax(0.25 * q.k)")
    assert (call.site, call.index, call.kind, call.score) == ("", 0, "eager", "dot")
    assert (call.batch, call.heads, call.kv_heads, call.head_dim) == (B, H, H, E)
    assert (call.query_len, call.key_len, call.value_dim) == (L, L, E + (name == "column_of_ones"))
    assert call.scale.effective == pytest.approx(ROOT)
    assert call.scale.agree is (True if device == "cpu" else None)
    assert [(block.first, block.last) for block in call.blocks] == KEYS
    assert [block.scale.symbolic for block in call.blocks] == pytest.approx(list(ONE))
    if device == "cpu":
        assert [block.scale.numeric for block in call.blocks] == pytest.approx(list(ONE), rel=1e-3)
    if hide:
        assert call.mask is not None
        assert (call.mask.kind, call.mask.least, call.mask.greatest, call.mask.blind_rows) == ("causal", 0, L - 1, 0)


@pytest.mark.parametrize("name", BY_SUMS)
def test_statistics_of_a_running_sum_are_those_of_the_whole(name: str) -> None:
    run, _, model, x = traced(online(name, ONE, hide=WAYS[name].masks))
    (call,) = run.calls
    logits = products(model, x) * ROOT
    is_dense(call, logits.masked_fill(causal(L, L), -math.inf) if WAYS[name].masks else logits)


@pytest.mark.parametrize("name", [name for name in MASKED if name != "without_a_maximum"])  # it divides 0 by 0
def test_padding_on_the_left_beside_a_causal_mask(name: str) -> None:
    run, _, model, x = traced(online(name, ONE, hide=True, pad=True))
    (call,) = run.calls
    assert call.formula == "softmax(0.25 * q.k + causal + padding)"
    assert call.mask is not None
    assert call.mask.blind_rows == H * 3
    assert call.scale.agree is True
    is_dense(call, (products(model, x) * ROOT).masked_fill(causal(L, L) | padding(), -math.inf))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", BY_SUMS)
@pytest.mark.parametrize("scales", [(1.0, 1.0, 1.0), (ROOT**2,) * 3])
def test_a_running_sum_with_a_wrong_scale(name: str, scales: Scales, device: str) -> None:
    call = only(online(name, scales), device)
    assert call.scale.effective == pytest.approx(scales[0])
    assert not call.unlike_blocks


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", BY_SUMS)
@pytest.mark.parametrize("scales", [(ROOT, ROOT, 2 * ROOT), (1.0, ROOT, ROOT)])
def test_a_running_sum_with_a_scale_of_one_block_alone(name: str, scales: Scales, device: str) -> None:
    call = only(online(name, scales), device)
    assert call.unlike_blocks
    assert call.scale.effective is None
    assert call.formula == "softmax(scale[block] * q.k)"
    assert [block.scale.symbolic for block in call.blocks] == pytest.approx(list(scales))


def test_an_exp_that_nothing_divides_is_missed() -> None:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.exp(q @ k.mT * ROOT) @ v

    run, *_ = traced(attend)
    assert run.calls == ()
    assert ["no sum of it" in entry.reason for entry in run.not_measured] == [True]


def test_an_exp_that_another_number_divides_is_missed() -> None:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.exp(q @ k.mT * ROOT) @ v / L

    run, *_ = traced(attend)
    assert (run.calls, len(run.not_measured)) == ((), 1)


def test_a_softmax_by_hand_is_as_before() -> None:
    def attend(m: Attend, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT * ROOT
        power = (z - z.amax(-1, keepdim=True)).exp()
        return power / power.sum(-1, keepdim=True) @ v

    call = only(attend)
    assert (call.formula, call.blocks, call.op) == ("softmax(0.25 * q.k)", (), "aten.div")


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


@pytest.mark.parametrize("device", ["cpu", "meta"])
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
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
    monkeypatch.setattr("sqrtdk.tracing.classify.online.LARGEST", B * H * L * BLOCK)
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
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


@pytest.mark.parametrize("device", ["cpu", "meta"])
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
