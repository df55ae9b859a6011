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
    rms,
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


# -- gains of norms ----------------------------------------------------------------------------------------------------


def by_std(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


def gained(x: Tensor, gain: Tensor) -> Tensor:
    return rms(x) * gain


def gained_behind_a_factor(x: Tensor, gain: Tensor) -> Tensor:
    return rms(x) * 0.5 * gain * 2.0


def gained_in_columns(x: Tensor, gain: Tensor) -> Tensor:
    return (rms(x).transpose(-1, -2) * gain[:, None]).transpose(-1, -2)


def gained_by_std(x: Tensor, gain: Tensor) -> Tensor:
    return gain * by_std(x)


@everywhere
@scales
@each("norm", [gained, gained_behind_a_factor, gained_in_columns, gained_by_std])
@each("gain", [torch.full((E,), 2.0), torch.linspace(1.0, 7.0, E)])
def test_a_gain_a_channel_is_no_scale(gain: Tensor, norm: Turn, scale: float, meta: bool) -> None:
    call = traced(
        lambda m, q, k, v: scores(norm(q, m.gain), norm(k, m.gain), v, scale), meta=meta, gain=nn.Parameter(gain)
    )
    kind = "layer" if norm is gained_by_std else "rms"  # its mean is taken off
    if meta and norm is gained_behind_a_factor:
        assert call.norm == kind
        return
    reads(call, softmax_of(f"{kind}(q).{kind}(k)", scale), scale, meta=meta)
    assert (call.norm, call.norm_gain) == (kind, True)


@everywhere
def test_a_learned_scale_a_head_is_no_gain(meta: bool) -> None:
    gain = nn.Parameter(torch.full((H, 1, 1), ROOT))
    call = traced(lambda m, q, k, v: scores(rms(q) * m.gain, rms(k), v, 1.0), meta=meta, gain=gain)
    assert not call.norm_gain
    assert [f.learned for f in call.scale.factors if f.where == "q"] == [True]


# -- lengths with a constant -------------------------------------------------------------------------------------------


def length(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True)


def to_root_of_width(x: Tensor) -> Tensor:
    return x * (E**0.5 / length(x).clamp_min(1e-7))


def by_part_of_the_length(x: Tensor) -> Tensor:
    return x / (length(x) * E**-0.5 + 1e-7)


def by_the_sum_of_squares(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / E + 1e-7)


@everywhere
@scales
@each("norm", [to_root_of_width, by_part_of_the_length, by_the_sum_of_squares])
def test_a_length_over_the_root_of_the_width_is_rms(norm: Turn, scale: float, meta: bool) -> None:
    call = traced(lambda m, q, k, v: scores(norm(q), norm(k), v, scale), meta=meta)
    reads(call, softmax_of("rms(q).rms(k)", scale), scale, meta=meta)


@everywhere
@each("norm", [lambda x: x * (10.0 / length(x)), lambda x: x / (length(x) / 10.0)])
def test_what_a_length_is_brought_to_is_a_factor(norm: Turn, meta: bool) -> None:
    unit = torch.nn.functional.normalize
    call = traced(lambda m, q, k, v: scores(norm(q), unit(k, dim=-1), v, 0.5), meta=meta)
    reads(call, "softmax(5 * l2(q).l2(k))", 5.0, meta=meta)


@everywhere
@each("by", [0.25, 4.0])
def test_constants_of_a_vector_and_of_its_length_cancel(by: float, meta: bool) -> None:
    def norm(x: Tensor) -> Tensor:
        return (x * by) / (length(x) * by)

    call = traced(lambda m, q, k, v: scores(norm(q), norm(k), v, 10.0), meta=meta)
    reads(call, "softmax(10 * l2(q).l2(k))", 10.0, meta=meta)
    call = traced(lambda m, q, k, v: scores(E**0.5 * q / length(q), E**0.5 * k / length(k), v, 0.5), meta=meta)
    reads(call, "softmax(0.5 * rms(q).rms(k))", 0.5, meta=meta)


@each("sign", [1.0, -1.0])
def test_the_sign_of_a_length_is_kept(sign: float) -> None:
    call = traced(lambda m, q, k, v: scores(q * (sign * 3.0 / length(q)), k / length(k), v, 1.0))
    assert call.scale.effective == pytest.approx(3.0 * sign)


@everywhere
@each("norm", [lambda x, g: x * (g / length(x).clamp_min(1e-5)), lambda x, g: x * (length(x).reciprocal() * g)])
def test_a_gain_that_learns_is_one_beside_the_length(norm: Callable[..., Tensor], meta: bool) -> None:
    gain = nn.Parameter(torch.tensor(2.5))
    call = traced(lambda m, q, k, v: scores(norm(q, m.gain), k / length(k), v, 3.0), meta=meta, gain=gain)
    (learned,) = (factor for factor in call.scale.factors if factor.learned)
    assert learned.source == "parameter gain"
    assert call.norm == "l2"
    assert meta or call.scale.effective == pytest.approx(7.5)


def rms_with_a_gain_inside(x: Tensor, gain: Tensor) -> Tensor:
    return x * (gain * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6))


def layer_norm_by_hand(x: Tensor, gain: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return gain * (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-5)) + 0.1 * gain


@everywhere
@each("norm, kind", [(rms_with_a_gain_inside, "rms"), (layer_norm_by_hand, "layer")])
@each("gain", [torch.full((E,), 2.0), torch.linspace(1.0, 7.0, E)])
def test_where_the_gain_stands_does_not_matter(gain: Tensor, norm: Turn, kind: str, meta: bool) -> None:
    call = traced(
        lambda m, q, k, v: scores(norm(q, m.gain), norm(k, m.gain), v, 0.5), meta=meta, gain=nn.Parameter(gain)
    )
    reads(call, softmax_of(f"{kind}(q).{kind}(k)", 0.5), 0.5, meta=meta)
    assert (call.norm, call.norm_gain) == (kind, True)


@everywhere
@each("gain", [torch.full((H, 1, 1), 3.0), torch.arange(1.0, H + 1).view(H, 1, 1)])
def test_a_scale_a_head_inside_a_norm_is_no_gain(gain: Tensor, meta: bool) -> None:
    gain = nn.Parameter(gain)
    call = traced(lambda m, q, k, v: scores(q * (m.gain / length(q)), k / length(k), v, 2.0), meta=meta, gain=gain)
    uniform = not meta and bool((gain == 3.0).all())
    assert call.scale.effective == (pytest.approx(6.0) if uniform else None)
    assert not call.norm_gain


@everywhere
def test_what_leaves_rows_unlike_lengths_is_no_norm(meta: bool) -> None:
    def moved(x: Tensor) -> Tensor:
        return (x - x[..., :1]) * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)

    call = traced(lambda m, q, k, v: scores(moved(q), moved(k), v), meta=meta)
    assert call.norm is None
    assert call.unknown
    assert call.scale.effective is None


@each("rows", [1, 5])
@each("gain", [1.0, 2.0, None])
def test_a_gain_of_a_layer_norm_is_no_scale(rows: int, gain: float | None) -> None:
    """Neither of one row, whose length any gain changes by a number, nor where it is one number for all channels."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.norm = nn.Linear(8, 16), nn.Linear(8, 16), nn.LayerNorm(16)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.norm(self.q(x)), self.norm(self.k(x))
            return functional.scaled_dot_product_attention(q[:, None], k[:, None], k[:, None])

    model = Normed()
    with torch.no_grad():
        model.norm.weight.copy_(torch.linspace(1, 3, 16) if gain is None else torch.full((16,), gain))
        with sqrtdk.trace(model) as run:
            model(torch.randn(1, rows, 8))
    assert run.calls[0].formula == "softmax(0.25 * layer(q).layer(k))"


def test_a_norm_of_many_rows_is_seen_by_a_few() -> None:
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 1024), nn.Linear(8, 1024)

        def forward(self, x: Tensor) -> Tensor:
            q, k = self.q(x), self.k(x[:, :4])
            return (rms(q) @ rms(k).mT * 0.5).softmax(-1) @ k

    model = Long()
    with torch.no_grad(), sqrtdk.trace(model) as run:
        model(torch.randn(1, 4200, 8))  # more than 2^22 numbers
    assert run.calls[0].formula == "softmax(0.5 * rms(q).rms(k))"


@each("size", [lambda n: n * 0.0, lambda n: n * -1.0, lambda n: (n * 1e30) ** -9, lambda n: n**0])
def test_no_constant_of_a_length_stops_a_trace(size: Turn) -> None:
    call = traced(lambda m, q, k, v: scores(q * size(length(q)), k, v))
    assert call.norm is None  # q * -|q| and the others leave no row a length of its own


def test_a_length_on_which_much_is_done_stops_no_trace() -> None:
    def norm(x: Tensor) -> Tensor:
        size = length(x)
        for _ in range(1200):  # more than Python calls go into one another
            size = -size
        return x / size

    call = traced(lambda m, q, k, v: scores(norm(q), k / length(k), v, 3.0))
    assert (call.norm, call.scale.effective) == ("l2", pytest.approx(3.0))


@everywhere
@each("clip", [lambda x: x * (2.0 / (length(x) + 1e-6)).clamp(max=1.0), lambda x: x / length(x).clamp_min(1.0)])
def test_a_length_that_is_only_cut_off_is_no_norm(clip: Turn, meta: bool) -> None:
    call = traced(lambda m, q, k, v: scores(clip(q), clip(k), v), meta=meta)
    assert call.norm is None
    assert call.scale.effective is None
