"""Norms of q and k: gains are no scale, lengths with a constant are rms, and what only cuts a length off is no norm."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from tests.attentions.each import each
from tests.trace.sides_by_hand import (
    ROOT,
    E,
    H,
    Turn,
    everywhere,
    reads,
    rms,
    scales,
    scores,
    softmax_of,
    traced,
)


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
