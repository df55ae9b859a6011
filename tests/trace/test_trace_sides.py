"""What happens to q and k between projection and product: the record says so, and takes the scale from beneath it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.tracing import AttentionCall
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
    traced,
    turned_as_a_whole,
    turned_by_halves,
)


def test_keys_joined_by_cat_keep_their_groups() -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.cat([part.repeat_interleave(2, dim=1) for part in k.chunk(2, dim=-2)], -2)
        return scores(q, k, v.repeat_interleave(2, dim=1))

    call = traced(attend, kv_heads=H // 2)
    assert (call.heads, call.kv_heads, call.formula) == (H, H // 2, "softmax(0.25 * q.k)")


# -- positions that are data -------------------------------------------------------------------------------------------

POSITIONS = torch.arange(L).float().expand(B, L).contiguous()


def turned_as_points(x: Tensor, angle: Tensor) -> Tensor:
    points = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(points * torch.polar(torch.ones_like(angle), angle)).flatten(-2)


TURNS = [turned_by_halves, turned_as_a_whole, turned_as_points]


@everywhere
@scales
@pytest.mark.parametrize("turn", TURNS)
def test_tables_of_float_positions_are_tables(turn: Turn, scale: float, meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        angle = angles(positions)
        return scores(turn(functional.rms_norm(q, (E,)), angle), turn(functional.rms_norm(k, (E,)), angle), v, scale)

    call = traced(attend, POSITIONS, meta=meta)
    reads(call, softmax_of("rope(rms(q)).rope(rms(k))", scale), scale, meta=meta)
    assert (call.rope, call.norm, call.self_attention) == (True, "rms", True)


@everywhere
def test_a_factor_before_such_a_table_is_seen(meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        angle = angles(positions)
        return scores(turned_as_a_whole(q * ROOT, angle), turned_as_a_whole(k, angle), v)

    reads(traced(attend, POSITIONS, meta=meta), "softmax(0.0625 * rope(q).rope(k))", ROOT**2, meta=meta)


# -- sums of branches --------------------------------------------------------------------------------------------------


def with_sum(first: float, second: float, outer: float, *, in_place: bool = False) -> Callable[..., Tensor]:
    """Q with a part of another projection, each with a factor of its own."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, y: Tensor) -> Tensor:
        q, other = q * first, m.other(y).unflatten(-1, (-1, E)).transpose(1, 2) * second
        if in_place:
            q += other
        else:
            q = q + other
        return scores(q, k, v, outer)

    return attend


def summed(first: float, second: float, outer: float, *, meta: bool, in_place: bool = False) -> AttentionCall:
    other = nn.Linear(DIM, H * E)
    attend = with_sum(first, second, outer, in_place=in_place)
    return traced(attend, torch.randn(B, L, DIM), meta=meta, other=other)


@everywhere
@each("in_place", [False, True])
@scales
def test_a_factor_of_both_branches_is_one_of_their_sum(scale: float, in_place: bool, meta: bool) -> None:
    call = summed(ROOT, ROOT, scale / ROOT, meta=meta, in_place=in_place)
    reads(call, softmax_of("q.k", scale), scale, meta=meta)


@everywhere
@each("in_place", [False, True])
def test_unlike_factors_of_branches_are_no_scale(in_place: bool, meta: bool) -> None:
    call = summed(ROOT, 1.0, ROOT, meta=meta, in_place=in_place)
    assert call.unknown == ("pieces with unlike factors",)
    reads(call, call.formula, None, meta=meta)


@everywhere
def test_a_sum_without_factors_is_a_start(meta: bool) -> None:
    reads(summed(1.0, 1.0, ROOT, meta=meta), "softmax(0.25 * q.k)", ROOT, meta=meta)


class Stream(nn.Module):
    """Attention over hidden states themselves, which branches with a factor were added to."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        x = x + 0.22 * self.out(x.relu())
        x = x + 0.22 * self.out(x.relu())
        return (x @ x.mT * DIM**-0.5).softmax(-1) @ x


def test_a_residual_stream_is_a_start() -> None:
    model = Stream()
    with sqrtdk.trace(model) as run:
        model(torch.randn(B, L, DIM))
    assert run.calls[0].formula == f"softmax({DIM**-0.5:.4g} * q.k)"
    assert run.calls[0].scale.agree is True


# -- zeros around the values -------------------------------------------------------------------------------------------


def pad(x: Tensor) -> Tensor:
    return functional.pad(x, (0, 1))


def with_zeros(x: Tensor) -> Tensor:
    return torch.cat([x, torch.zeros(*x.shape[:-1], 1, device=x.device)], -1)


def written_into_zeros(x: Tensor) -> Tensor:
    wider = torch.zeros(*x.shape[:-1], x.shape[-1] + 1, device=x.device)
    wider[..., :-1] = x
    return wider


WIDER = [pad, with_zeros, written_into_zeros]


@everywhere
@each("fused", [False, True])
@pytest.mark.parametrize("wider", WIDER)
def test_a_key_of_zeros_is_no_wider_head(wider: Callable[[Tensor], Tensor], fused: bool, meta: bool) -> None:
    """Keys in (B, H, E, S) that get one more, along their last axis."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = wider(k.transpose(-1, -2).contiguous()).transpose(-1, -2), functional.pad(v, (0, 0, 0, 1))
        return functional.scaled_dot_product_attention(q, k, v) if fused else scores(q, k, v)

    call = traced(attend, meta=meta)
    assert (call.head_dim, call.padded_head_dim, call.key_len) == (E, E, L + 1)
    reads(call, "softmax(0.25 * q.k)", ROOT, meta=meta)


@everywhere
@pytest.mark.parametrize("wider", WIDER)
def test_a_wider_head_of_transposed_keys_is_one(wider: Callable[[Tensor], Tensor], meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (wider(q) @ wider(k).transpose(-1, -2) * ROOT).softmax(-1) @ v

    call = traced(attend, meta=meta)
    assert (call.head_dim, call.padded_head_dim) == (E, E + 1)


@everywhere
def test_features_padded_before_the_rows_are_a_wider_head(meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = functional.pad(k.transpose(-1, -2), (0, 0, 0, 8))
        return (functional.pad(q, (0, 8)) @ k * 24**-0.5).softmax(-1) @ v

    call = traced(attend, meta=meta)
    assert (call.head_dim, call.padded_head_dim) == (E, 24)


@everywhere
def test_zeros_that_are_cut_off_again_widen_nothing(meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(pad(q)[..., :E], pad(k)[..., :E], v)

    call = traced(attend, meta=meta)
    assert (call.head_dim, call.padded_head_dim) == (E, E)
