"""Q and k that were pooled, cut into windows, picked by the data, or multiplied by what the data or the rows say."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from tests.attentions.each import each
from tests.trace.sides_by_hand import (
    DIM,
    ROOT,
    B,
    E,
    H,
    L,
    Turn,
    angles,
    everywhere,
    reads,
    scales,
    scores,
    softmax_of,
    table,
    traced,
    turned_as_a_whole,
    turned_by_halves,
)

# -- q or k pooled -----------------------------------------------------------------------------------------------------


def image(x: Tensor) -> Tensor:
    """(B * H, E, 2, L / 2)."""
    return x.mT.reshape(B * H, E, 2, L // 2)


def rows(x: Tensor) -> Tensor:
    return x.reshape(B, H, E, -1).mT


def by_greatest(x: Tensor) -> Tensor:
    return rows(functional.max_pool2d(image(x), 2))


def by_average(x: Tensor) -> Tensor:
    return rows(functional.avg_pool2d(image(x), 2))


def by_size(x: Tensor) -> Tensor:
    return rows(functional.adaptive_avg_pool2d(image(x), (1, 2)))


def by_mean(x: Tensor) -> Tensor:
    return x.unflatten(-2, (-1, 2)).mean(-2)


def by_amax(x: Tensor) -> Tensor:
    return x.unflatten(-2, (-1, 2)).amax(-2)


POOLS = [by_greatest, by_average, by_size, by_mean, by_amax]


@everywhere
@each("before, outer", [(1.0, ROOT), (ROOT, 1.0), (ROOT, ROOT), (1.0, 1.0)])
@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_keeps_the_factors_before_it(
    pool: Callable[[Tensor], Tensor], before: float, outer: float, meta: bool
) -> None:
    call = traced(lambda m, q, k, v: scores(q, pool(k * before), pool(v), outer), meta=meta)
    scale = before * outer
    reads(call, softmax_of("q.k", scale), scale, meta=meta)
    assert ("k", "pool") in [(stage.where, stage.name) for stage in call.stages]
    assert call.key_len < call.query_len


@everywhere
@each("before, outer", [(1.0, ROOT), (ROOT, 1.0), (ROOT, ROOT), (1.0, 1.0)])
def test_a_convolution_a_channel_is_a_pool(before: float, outer: float, meta: bool) -> None:
    """As MViT has it, on q and k alike."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(*(rows(m.pool(image(x))) for x in (q * before, k, v)), scale=outer)

    call = traced(attend, meta=meta, pool=nn.Conv2d(E, E, 2, 2, groups=E))
    scale = before * outer
    formula = softmax_of("q.k", scale)
    reads(call, formula, scale, meta=meta, numeric=before == 1.0)
    assert [stage.where for stage in call.stages if stage.name == "pool"] == ["q", "k"]


def test_a_pooled_rotation_has_no_diagonal() -> None:
    call = traced(lambda m, q, k, v: scores(*(by_mean(turned_by_halves(x, table(x))) for x in (q, k)), by_mean(v)))
    assert call.formula == "softmax(0.25 * rope(q).rope(k))"
    assert (call.scale.effective, call.scale.numeric) == (ROOT, None)


# -- local attention ---------------------------------------------------------------------------------------------------


def around(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each block of queries sees its own block of keys and the one before."""
    q, k, v = (x.unflatten(-2, (-1, 4)) for x in (q, k, v))
    k, v = (torch.cat([functional.pad(x, (0, 0, 0, 0, 1, 0))[:, :, :-1], x], -2) for x in (k, v))
    return ((q @ k.mT) * m.scale).softmax(-1) @ v


def in_chunks(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Chunks that overlap."""

    def chunks(x: Tensor) -> Tensor:
        x = x.reshape(B * H, L, E).contiguous()
        return x.as_strided((B * H, 3, 4, E), (L * E, 2 * E, E, 1))

    q, k, v = (chunks(x) for x in (q, k, v))
    return (torch.einsum("bcxd,bcyd->bcxy", q, k) * m.scale).softmax(-1) @ v


def in_windows(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Each query sees the keys around it."""
    k, v = (functional.pad(x, (0, 0, 2, 1)).unfold(-2, 4, 1) for x in (k, v))
    return ((q[..., None, :] @ k) * m.scale).softmax(-1) @ v.mT


@everywhere
@scales
@each("attend", [around, in_chunks, in_windows])
def test_local_attention_has_its_head_and_scale(attend: Callable[..., Tensor], scale: float, meta: bool) -> None:
    call = traced(attend, meta=meta, scale=scale)
    assert (call.head_dim, call.padded_head_dim, call.unknown) == (E, E, ())
    assert call.scale.effective == pytest.approx(scale)
    if not meta:
        assert call.scale.numeric == pytest.approx(scale, rel=1e-4)


# -- factors of the data and of the rows -------------------------------------------------------------------------------


@everywhere
def test_a_gate_on_q_is_a_factor_of_the_data(meta: bool) -> None:
    call = traced(
        lambda m, q, k, v: scores(q * m.gate(q).sigmoid(), k, v), meta=meta, gate=nn.Linear(E, 1)
    )  # one number a row
    assert call.formula == "softmax(0.25 * data * q.k)"
    assert [(f.where, f.source) for f in call.scale.factors] == [("q", "data"), ("logits", "number")]


def log_lengths(x: Tensor) -> Tensor:
    """(L, 1), 1 up to a length of 4, as Qwen has it."""
    return (torch.arange(1, L + 1, device=x.device).log() / math.log(4)).clamp(min=1.0)[:, None]


@everywhere
@each("rotated", [False, True])
@each("on", ["q", "logits"])
def test_a_factor_of_the_row_is_named(on: str, rotated: bool, meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k = (turned_by_halves(x, table(x)) if rotated else x for x in (q, k))
        if on == "q":
            return scores(q * log_lengths(q), k, v)
        return (q @ k.mT * ROOT * log_lengths(q)).softmax(-1) @ v

    call = traced(attend, meta=meta)
    product = "rope(q).rope(k)" if rotated else "q.k"
    assert call.formula == f"softmax(0.25 * rows * {product})"
    assert (on, "rows") in [(f.where, f.source) for f in call.scale.factors]
    assert call.unknown == ()


def test_rows_that_are_hidden_by_zeros_are_no_factor() -> None:
    shown = (torch.arange(L) < L - 2).float()[:, None]
    call = traced(lambda m, q, k, v: scores(q * torch.where(shown > 0, 1.0, 0.0), k, v))
    assert call.scale.effective is None


# -- rows and keys that the data picked --------------------------------------------------------------------------------

CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()


def order(k: Tensor) -> Tensor:
    """(B, H, L) indices of the keys, by their length."""
    return k.norm(dim=-1).argsort(-1)


def by_gather(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-2, index[..., None].expand_as(x))


def by_index(x: Tensor, index: Tensor) -> Tensor:
    b, h = torch.arange(B, device=x.device)[:, None, None], torch.arange(H, device=x.device)[:, None]
    return x[b, h, index]


def by_index_select(x: Tensor, index: Tensor) -> Tensor:
    return x.index_select(-2, index.flatten()[:L])


@everywhere
@scales
@each("fused", [False, True])
@each("pick", [by_gather, by_index, by_index_select])
def test_keys_in_an_order_of_the_data_have_no_causal_mask(pick: Turn, fused: bool, scale: float, meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = order(k)
        k, v = pick(k, index), pick(v, index)
        if fused:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        hidden = ~CAUSAL.to(q.device)
        return (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    call = traced(attend, meta=meta)
    reads(call, softmax_of("q.k + mask", scale), scale, meta=meta)
    assert ("k", "gather") in [(stage.where, stage.name) for stage in call.stages]
    assert call.mask is not None
    assert (call.mask.kind, call.mask.least, call.mask.band, call.future_weight) == ("mask", None, None, None)


def test_rotated_keys_in_an_order_of_the_data_have_no_diagonal() -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        q, k = (turned_as_a_whole(x, angles(positions)) for x in (q, k))
        return scores(q, by_gather(k, order(k)), by_gather(v, order(k)))

    call = traced(attend, torch.arange(L).float().expand(B, L).contiguous())
    assert (call.scale.effective, call.scale.numeric) == (ROOT, None)
    assert call.scale.reason == "q and k are rotated by different positions"


@everywhere
def test_keys_in_an_order_of_the_model_keep_their_mask(meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        order = torch.arange(L, device=q.device)
        return functional.scaled_dot_product_attention(q, k[:, :, order], v[:, :, order], is_causal=True)

    assert traced(attend, meta=meta).formula == "softmax(0.25 * q.k + causal)"


@each("added", [False, True])
def test_a_row_without_other_keys_sees_its_own(added: bool) -> None:
    """Hidden by less than the others, as Reformer does it."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z, own = q @ k.mT * ROOT, torch.eye(L, dtype=torch.bool)
        if added:
            z = z + torch.zeros(L, L).masked_fill(own, -5e4).masked_fill(~CAUSAL, -3e38)
        else:
            z = z.masked_fill(own, -5e4).masked_fill(~CAUSAL, -3e38)
        return z.softmax(-1) @ v

    call = traced(attend)
    assert call.formula == "softmax(0.25 * q.k + mask + causal)"
    assert call.mask is not None
    assert (call.mask.blind_rows, call.mask.uniform_rows, call.mask.least) == (0, 0, 0)
    assert call.mask.masked_weight == 0.0
    assert call.bias is None


# -- what is kept ------------------------------------------------------------------------------------------------------


class Recurrence(nn.Module):
    """A state that many steps change; how many tensors live after a few, and after all."""

    def __init__(self, step: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.step, self.other, self.live = step, nn.Linear(DIM, DIM), [0, 0]

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for i in range(40):
            state = self.step(self, state, x)
            if i in (9, 39):
                self.live[i > 9] = sum(issubclass(type(item), Tensor) for item in gc.get_objects())
        return state


@pytest.mark.full
@each(
    "step",
    [
        lambda m, state, x: state - m.other(x),
        lambda m, state, x: state * m.other(x) + m.other(x),
        lambda m, state, x: state @ torch.eye(DIM),
        lambda m, state, x: functional.conv1d(state, torch.ones(L, 1, 3), padding=1, groups=L),
    ],
)
def test_a_recurrence_is_let_go(step: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
    model = Recurrence(step)
    with torch.no_grad(), sqrtdk.trace(model):
        model(torch.randn(B, L, DIM))
    assert model.live[1] <= model.live[0] + 8
