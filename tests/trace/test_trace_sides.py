"""What happens to q and k between projection and product: the record says so, and takes the scale from beneath it."""

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
from sqrtdk.tracing import AttentionCall

B, L, DIM, H, E = 2, 8, 24, 4, 16
ROOT = E**-0.5

Turn = Callable[[Any, Tensor], Tensor]


class Attention(nn.Module):
    """Attention whose `attend` gets (B, H, L, E) of q, k and v."""

    def __init__(self, attend: Callable[..., Tensor], *, kv_heads: int = H, **parts: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, h * E) for h in (H, kv_heads, kv_heads))
        self.attend = attend
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, E)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.attend(self, q, k, v, *others)


def scores(q: Tensor, k: Tensor, v: Tensor, scale: float = ROOT) -> Tensor:
    """The plain attention."""
    return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v


def traced(attend: Callable[..., Tensor], *others: Tensor, meta: bool = False, **options: Any) -> AttentionCall:
    """The one record of a model's run."""
    with torch.device("meta" if meta else "cpu"):
        model, x = Attention(attend, **options), torch.randn(B, L, DIM)
        model = model.to(x.device)
        with sqrtdk.trace(model) as run:
            model(x, *(other.to(x.device) for other in others))
    assert len(run.calls) == 1, (run.not_attention, run.not_measured)
    return run.calls[0]


def reads(call: AttentionCall, formula: str, scale: float | None, *, meta: bool, numeric: bool = True) -> None:
    """The record says this formula and this scale, by both readings where there is data."""
    assert call.formula == formula
    assert call.scale.effective == (None if scale is None else pytest.approx(scale, rel=1e-4))
    if numeric and not meta and scale is not None:
        assert call.scale.agree is True
        assert call.scale.numeric == pytest.approx(scale, rel=1e-4)
        assert call.scale.r_squared == pytest.approx(1.0, abs=1e-4)


everywhere = pytest.mark.parametrize("meta", [False, True])
scales = pytest.mark.parametrize("scale", [ROOT, 1.0, ROOT**2])


def test_keys_joined_by_cat_keep_their_groups() -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.cat([part.repeat_interleave(2, dim=1) for part in k.chunk(2, dim=-2)], -2)
        return scores(q, k, v.repeat_interleave(2, dim=1))

    call = traced(attend, kv_heads=H // 2)
    assert (call.heads, call.kv_heads, call.formula) == (H, H // 2, "softmax(0.25 * q.k)")


# -- positions that are data -------------------------------------------------------------------------------------------

POSITIONS = torch.arange(L).float().expand(B, L).contiguous()


def angles(positions: Tensor) -> Tensor:
    """(B, 1, L, E / 2)."""
    return positions[:, None, :, None] * 100.0 ** (-torch.arange(0, E, 2, device=positions.device) / E)


def turned_by_halves(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def turned_as_a_whole(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    angle = torch.cat([angle, angle], -1)
    return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()


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
    coefficient = "" if scale == 1.0 else f"{scale:.4g} * "
    reads(call, f"softmax({coefficient}rope(rms(q)).rope(rms(k)))", scale, meta=meta)
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
@pytest.mark.parametrize("in_place", [False, True])
@scales
def test_a_factor_of_both_branches_is_one_of_their_sum(scale: float, in_place: bool, meta: bool) -> None:
    call = summed(ROOT, ROOT, scale / ROOT, meta=meta, in_place=in_place)
    formula = "softmax(q.k)" if scale == 1.0 else f"softmax({scale:.4g} * q.k)"
    reads(call, formula, scale, meta=meta)


@everywhere
@pytest.mark.parametrize("in_place", [False, True])
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
@pytest.mark.parametrize("fused", [False, True])
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


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


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
@pytest.mark.parametrize("norm", [gained, gained_behind_a_factor, gained_in_columns, gained_by_std])
@pytest.mark.parametrize("gain", [torch.full((E,), 2.0), torch.linspace(1.0, 7.0, E)])
def test_a_gain_a_channel_is_no_scale(gain: Tensor, norm: Turn, scale: float, meta: bool) -> None:
    call = traced(
        lambda m, q, k, v: scores(norm(q, m.gain), norm(k, m.gain), v, scale), meta=meta, gain=nn.Parameter(gain)
    )
    if meta and norm is gained_behind_a_factor:
        assert call.norm == "rms"
        return
    coefficient = "" if scale == 1.0 else f"{scale:.4g} * "
    reads(call, f"softmax({coefficient}rms(q).rms(k))", scale, meta=meta)
    assert (call.norm, call.norm_gain) == ("rms", True)


@everywhere
def test_a_learned_scale_a_head_is_no_gain(meta: bool) -> None:
    gain = nn.Parameter(torch.full((H, 1, 1), ROOT))
    call = traced(lambda m, q, k, v: scores(rms(q) * m.gain, rms(k), v, 1.0), meta=meta, gain=gain)
    assert not call.norm_gain
    assert [f.learned for f in call.scale.factors if f.where == "q"] == [True]


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
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("pick", [by_gather, by_index, by_index_select])
def test_keys_in_an_order_of_the_data_have_no_causal_mask(pick: Turn, fused: bool, scale: float, meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        index = order(k)
        k, v = pick(k, index), pick(v, index)
        if fused:
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
        hidden = ~CAUSAL.to(q.device)
        return (q @ k.mT * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v

    call = traced(attend, meta=meta)
    coefficient = "" if scale == 1.0 else f"{scale:.4g} * "
    reads(call, f"softmax({coefficient}q.k + mask)", scale, meta=meta)
    assert ("k", "gather") in [(stage.where, stage.name) for stage in call.stages]
    assert call.mask is not None
    assert (call.mask.kind, call.mask.least, call.mask.band, call.future_weight) == ("mask", None, None, None)


def test_rotated_keys_in_an_order_of_the_data_have_no_diagonal() -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> Tensor:
        q, k = (turned_as_a_whole(x, angles(positions)) for x in (q, k))
        return scores(q, by_gather(k, order(k)), by_gather(v, order(k)))

    call = traced(attend, POSITIONS)
    assert (call.scale.effective, call.scale.numeric) == (ROOT, None)
    assert call.scale.reason == "q and k are rotated by different positions"


@everywhere
def test_keys_in_an_order_of_the_model_keep_their_mask(meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        order = torch.arange(L, device=q.device)
        return functional.scaled_dot_product_attention(q, k[:, :, order], v[:, :, order], is_causal=True)

    assert traced(attend, meta=meta).formula == "softmax(0.25 * q.k + causal)"


@pytest.mark.parametrize("added", [False, True])
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


# -- rotations as they are written -------------------------------------------------------------------------------------


def table(x: Tensor, width: int = E, speed: float = 1.0) -> Tensor:
    """Angles (L, width / 2)."""
    positions = torch.arange(L, device=x.device)[:, None]
    return speed * positions * 100.0 ** (-torch.arange(0, width, 2, device=x.device) / width)


def points(x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.view_as_complex(x.to(dtype).unflatten(-1, (-1, 2)))


def circle(x: Tensor, length: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    angle = table(x).to(dtype)
    return torch.polar(torch.full_like(angle, length), angle)


def in_single(x: Tensor) -> Tensor:
    return torch.view_as_real(points(x) * circle(x)).flatten(-2)


def in_double(x: Tensor) -> Tensor:
    turned = points(x, torch.float64) * circle(x, dtype=torch.float64)[None, None]
    return torch.view_as_real(turned).flatten(-2).type_as(x)


def by_exponential(x: Tensor) -> Tensor:
    return torch.view_as_real(points(x) * torch.exp(1j * table(x))).flatten(-2)


def in_parts(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    y = torch.complex(a, b) * circle(x)
    return torch.cat([y.real, y.imag], -1)


def matrices(x: Tensor) -> Tensor:
    """(L, E / 2, 2, 2)."""
    c, s = table(x).cos(), table(x).sin()
    return torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)


def by_einsum(x: Tensor) -> Tensor:
    return torch.einsum("ldij,bhldj->bhldi", matrices(x), x.unflatten(-1, (-1, 2))).flatten(-2)


def by_matmul(x: Tensor) -> Tensor:
    return (matrices(x) @ x.unflatten(-1, (-1, 2))[..., None]).squeeze(-1).flatten(-2)


def by_sum(x: Tensor) -> Tensor:
    return (matrices(x) * x.unflatten(-1, (-1, 2))[..., None, :]).sum(-1).flatten(-2)


def by_columns(x: Tensor) -> Tensor:
    """As FLUX does it."""
    turn, pairs = matrices(x), x.unflatten(-1, (-1, 1, 2))
    return (turn[..., 0] * pairs[..., 0] + turn[..., 1] * pairs[..., 1]).flatten(-2)


def in_part(x: Tensor) -> Tensor:
    return torch.cat([turned_by_halves(x[..., :8], table(x, 8)), x[..., 8:]], -1)


def in_part_by_points(x: Tensor) -> Tensor:
    """As DeepSeek has it."""
    angle = table(x, 8)
    turned = points(x[..., 8:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([x[..., :8], torch.view_as_real(turned).flatten(-2)], -1)


def in_two_dimensions(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([turned_by_halves(a, table(x, 8)), turned_by_halves(b, table(x, 8, speed=2.0))], -1)


def every_second(x: Tensor) -> Tensor:
    angle = table(x).repeat_interleave(2, -1)
    return x * angle.cos() + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * angle.sin()


def in_sections(x: Tensor) -> Tensor:
    """Qwen2-VL: sections of the channels follow time, height and width."""
    angle = torch.stack([table(x, speed=speed) for speed in (1.0, 2.0, 3.0)])
    cos, sin = (torch.cat([t, t], -1).split([4, 2, 2] * 2, -1) for t in (angle.cos(), angle.sin()))
    cos, sin = (torch.cat([part[i % 3] for i, part in enumerate(t)], -1) for t in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


def with_signs(x: Tensor) -> Tensor:
    angle = torch.cat([table(x)] * 2, -1)
    sign = torch.cat([-torch.ones(E // 2, device=x.device), torch.ones(E // 2, device=x.device)])
    return torch.addcmul(x * angle.cos(), x.roll(E // 2, -1) * sign, angle.sin())


ROTATIONS = [
    in_single, in_double, by_exponential, in_parts, by_einsum, by_matmul, by_sum, by_columns, in_part,
    in_part_by_points, in_two_dimensions, every_second, in_sections, with_signs,
]  # fmt: skip


@everywhere
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("turn", ROTATIONS)
def test_a_rotation_is_one_however_it_is_written(turn: Callable[[Tensor], Tensor], normed: bool, meta: bool) -> None:
    """With a factor before it, and perhaps a norm, both of which the rotation must not hide."""
    norm = rms if normed else (lambda x: x)
    call = traced(lambda m, q, k, v: scores(turn(norm(q) * ROOT), turn(norm(k)), v, 1.0), meta=meta)
    side = "rope(rms({}))" if normed else "rope({})"
    reads(call, f"softmax(0.25 * {side.format('q')}.{side.format('k')})", ROOT, meta=meta)


@pytest.mark.parametrize("turn", ROTATIONS)
def test_the_rotations_keep_lengths(turn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(B, H, L, E)
    torch.testing.assert_close(turn(x).norm(dim=-1), x.norm(dim=-1))
    assert float((turn(x) - x).abs().max()) > 0.1


@everywhere
@pytest.mark.parametrize("length", [0.5, 1.2])
def test_the_length_of_points_is_a_factor(length: float, meta: bool) -> None:
    def turn(x: Tensor) -> Tensor:
        return torch.view_as_real(points(x) * circle(x, length)).flatten(-2)

    scale = ROOT * length**2
    call = traced(lambda m, q, k, v: scores(turn(q), turn(k), v), meta=meta)
    reads(call, f"softmax({scale:.4g} * rope(q).rope(k))", scale, meta=meta)


@everywhere
def test_a_part_of_another_length_is_no_scale(meta: bool) -> None:
    def turn(x: Tensor) -> Tensor:
        angle = table(x, 8)
        c, s = 1.2 * torch.cat([angle, angle], -1).cos(), 1.2 * torch.cat([angle, angle], -1).sin()
        a, b = x[..., :4], x[..., 4:8]
        return torch.cat([x[..., :8] * c + torch.cat([-b, a], -1) * s, x[..., 8:]], -1)

    call = traced(lambda m, q, k, v: scores(turn(q), turn(k), v), meta=meta)
    assert call.scale.effective is None


@pytest.mark.parametrize("by", [1.0, 0.5])
def test_one_number_times_the_parts_of_a_rotation_is_a_factor(by: float) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def turn(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            c, s = table(x).cos(), table(x).sin()
            return torch.cat([(a * c - b * s) * m.by, (b * c + a * s) * m.by], -1)

        return scores(turn(q), turn(k), v)

    call = traced(attend, by=nn.Parameter(torch.tensor([by])))
    reads(call, f"softmax({ROOT * by**2:.4g} * rope(q).rope(k))", ROOT * by**2, meta=False)


def test_a_number_of_unknown_value_inside_a_rotation_is_not_guessed() -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        def turn(x: Tensor) -> Tensor:
            return turned_as_a_whole(x, table(x)) if m.by is None else x * (torch.cat([table(x)] * 2, -1).cos() * m.by)

        a, b = (torch.cat([-x[..., E // 2 :], x[..., : E // 2]], -1) for x in (q, k))
        sin = torch.cat([table(q)] * 2, -1).sin() * m.by
        return scores(turn(q) + a * sin, turn(k) + b * sin, v)

    call = traced(attend, by=nn.Parameter(torch.tensor([0.5])), meta=True)
    assert call.scale.effective is None
    assert traced(attend, by=nn.Parameter(torch.tensor([0.5]))).scale.effective == pytest.approx(ROOT / 4)


def test_one_matrix_for_all_positions_is_no_position() -> None:
    """Hadamard transforms of q and k, as QuaRot has them: the scale before them is seen, and nothing is rotated."""

    def hadamard() -> Tensor:
        matrix = torch.full((1, 1), 0.25)
        for _ in range(4):
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        return matrix

    call = traced(lambda m, q, k, v: scores(q * ROOT @ hadamard(), k @ hadamard(), v, 1.0))
    reads(call, "softmax(0.25 * q.k)", ROOT, meta=False)
    assert not call.rope


# -- operations that are not seen --------------------------------------------------------------------------------------


@torch.library.custom_op("sides::rotary", mutates_args=())
def rotary_op(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


@torch.library.custom_op("sides::rotary_both", mutates_args=())
def rotary_both_op(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q, k = (turned_by_halves(x, torch.atan2(sin, cos)) for x in (q, k))
    return q, k


@torch.library.custom_op("sides::rotary_", mutates_args={"x"})
def rotary_in_place_op(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    x.copy_(turned_by_halves(x, torch.atan2(sin, cos)))


@torch.library.custom_op("sides::stretch", mutates_args=())
def stretch_op(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return 2 * turned_by_halves(x, torch.atan2(sin, cos))


rotary_op.register_fake(lambda x, cos, sin: torch.empty_like(x))
stretch_op.register_fake(lambda x, cos, sin: torch.empty_like(x))
rotary_both_op.register_fake(lambda q, k, cos, sin: (torch.empty_like(q), torch.empty_like(k)))


def by_op(op: Any, outer: float, before: float = 1.0) -> Callable[..., Tensor]:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        cos, sin = table(q).cos(), table(q).sin()
        q = q * before
        if op is rotary_both_op:
            q, k = op(q, k, cos, sin)
        elif op is rotary_in_place_op:
            q, k = q.contiguous(), k.contiguous()
            op(q, cos, sin)
            op(k, cos, sin)
        else:
            q, k = op(q, cos, sin), op(k, cos, sin)
        return scores(q, k, v, outer)

    return attend


@pytest.mark.parametrize("op", [rotary_op, rotary_both_op])
@pytest.mark.parametrize(("before", "outer"), [(1.0, ROOT), (ROOT, 1.0), (ROOT, ROOT), (1.0, 1.0)])
def test_an_operation_that_is_not_seen_may_be_a_rotation_by_its_effect(op: Any, before: float, outer: float) -> None:
    call, scale = traced(by_op(op, outer, before)), before * outer
    coefficient = "" if scale == 1.0 else f"{scale:.4g} * "
    reads(call, f"softmax({coefficient}rope(q).rope(k))", scale, meta=False)


@pytest.mark.parametrize(
    ("op", "meta"), [(rotary_op, True), (rotary_both_op, True), (stretch_op, False), (rotary_in_place_op, False)]
)
def test_an_operation_that_is_not_seen_is_named_else(op: Any, meta: bool) -> None:
    call = traced(by_op(op, ROOT), meta=meta)
    (name,) = call.unknown
    assert name.startswith(("rotary", "stretch"))
    assert call.scale.effective is None


# -- decays ------------------------------------------------------------------------------------------------------------


def xpos_scale(x: Tensor) -> Tensor:
    """(L, E), as Sun et al. 2022 have it, about the middle of the sequence."""
    base = (torch.arange(0, E, 2, device=x.device) / E + 0.4) / 1.4
    scale = base ** ((torch.arange(L, device=x.device) - L // 2)[:, None] / 4)
    return torch.cat([scale, scale], -1)


def in_the_tables(x: Tensor, scale: Tensor) -> Tensor:
    angle = torch.cat([table(x)] * 2, -1)
    a, b = x.chunk(2, -1)
    return x * (angle.cos() * scale) + torch.cat([-b, a], -1) * (angle.sin() * scale)


def after_the_tables(x: Tensor, scale: Tensor) -> Tensor:
    angle = torch.cat([table(x)] * 2, -1)
    a, b = x.chunk(2, -1)
    return x * angle.cos() * scale + torch.cat([-b, a], -1) * angle.sin() * scale


def after_the_rotation(x: Tensor, scale: Tensor) -> Tensor:
    return turned_as_a_whole(x, table(x)) * scale


def in_the_points(x: Tensor, scale: Tensor) -> Tensor:
    return torch.view_as_real(points(x) * (circle(x) * scale[..., : E // 2])).flatten(-2)


DECAYS = [in_the_tables, after_the_tables, after_the_rotation, in_the_points]


@everywhere
@scales
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("turn", DECAYS)
def test_decays_that_cancel_are_xpos(turn: Turn, fused: bool, scale: float, meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by = xpos_scale(q)
        q, k = turn(q, by), turn(k, 1 / by)
        return functional.scaled_dot_product_attention(q, k, v, scale=scale) if fused else scores(q, k, v, scale)

    call = traced(attend, meta=meta)
    coefficient = "" if scale == 1.0 else f"{scale:.4g} * "
    reads(call, f"softmax({coefficient}xpos(q).xpos(k))", scale, meta=meta)
    assert call.rope


@everywhere
@pytest.mark.parametrize("turn", DECAYS)
@pytest.mark.parametrize("on_k", [1.0, -1.0])
def test_decays_that_do_not_cancel_are_no_scale(turn: Turn, on_k: float, meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by = xpos_scale(q)
        return scores(turn(q, by), turn(k, by if on_k > 0 else torch.ones_like(by)), v)

    call = traced(attend, meta=meta)
    assert call.unknown == ("a decay that the other side does not cancel",)
    assert call.scale.effective is None


@everywhere
@scales
def test_a_decay_a_head_without_a_rotation(scale: float, meta: bool) -> None:
    """The powers of one number for each head, on q and inverse on k, as retention has them."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rate = torch.linspace(0.8, 0.95, H, device=q.device)[:, None, None]
        by = rate ** torch.arange(L, device=q.device)[:, None]
        return scores(q * by, k / by, v, scale)

    coefficient = "" if scale == 1.0 else f"{scale:.4g} * "
    reads(traced(attend, meta=meta), f"softmax({coefficient}decay(q).decay(k))", scale, meta=meta)


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
@pytest.mark.parametrize(("before", "outer"), [(1.0, ROOT), (ROOT, 1.0), (ROOT, ROOT), (1.0, 1.0)])
@pytest.mark.parametrize("pool", POOLS)
def test_a_pool_keeps_the_factors_before_it(
    pool: Callable[[Tensor], Tensor], before: float, outer: float, meta: bool
) -> None:
    call = traced(lambda m, q, k, v: scores(q, pool(k * before), pool(v), outer), meta=meta)
    scale = before * outer
    reads(call, "softmax(q.k)" if scale == 1.0 else f"softmax({scale:.4g} * q.k)", scale, meta=meta)
    assert ("k", "pool") in [(stage.where, stage.name) for stage in call.stages]
    assert call.key_len < call.query_len


@everywhere
@pytest.mark.parametrize(("before", "outer"), [(1.0, ROOT), (ROOT, 1.0), (ROOT, ROOT), (1.0, 1.0)])
def test_a_convolution_a_channel_is_a_pool(before: float, outer: float, meta: bool) -> None:
    """As MViT has it, on q and k alike."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scores(*(rows(m.pool(image(x))) for x in (q * before, k, v)), scale=outer)

    call = traced(attend, meta=meta, pool=nn.Conv2d(E, E, 2, 2, groups=E))
    scale = before * outer
    formula = "softmax(q.k)" if scale == 1.0 else f"softmax({scale:.4g} * q.k)"
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
@pytest.mark.parametrize("attend", [around, in_chunks, in_windows])
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
@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("on", ["q", "logits"])
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


@pytest.mark.parametrize(
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
