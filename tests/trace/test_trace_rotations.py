"""Rotations of q and k, however they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sqrtdk.tracing.trace import Trace
from tests.attentions.each import each
from tests.trace.sides_by_hand import (
    DIM,
    ROOT,
    Attention,
    B,
    E,
    H,
    L,
    everywhere,
    reads,
    rms,
    scores,
    softmax_of,
    table,
    traced,
    turned_as_a_whole,
    turned_by_halves,
)

# -- rotations as they are written -------------------------------------------------------------------------------------


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
@each("normed", [False, True])
@pytest.mark.parametrize("turn", ROTATIONS)
def test_a_rotation_is_one_however_it_is_written(turn: Callable[[Tensor], Tensor], normed: bool, meta: bool) -> None:
    """With a factor before it, and perhaps a norm, both of which the rotation must not hide."""
    norm = rms if normed else (lambda x: x)
    call = traced(lambda m, q, k, v: scores(turn(norm(q) * ROOT), turn(norm(k)), v, 1.0), meta=meta)
    side = "rope(rms({}))" if normed else "rope({})"
    reads(call, f"softmax(0.25 * {side.format('q')}.{side.format('k')})", ROOT, meta=meta)


@each("dtype", [torch.bfloat16, torch.float16])
def test_a_projection_of_lesser_precision_is_known_behind_points(dtype: torch.dtype) -> None:
    """There are no complex numbers of bfloat16: the model casts to float32 before it turns, and back."""
    model = Attention(lambda m, q, k, v: scores(*(in_single(x).to(x.dtype) for x in (q, k)), v, ROOT)).to(dtype)
    with Trace(model, stats=False, projections=True) as trace, torch.no_grad():
        model(torch.randn(B, L, DIM, dtype=dtype))
    names = [None if one is None else one.name.partition(".")[0] for one in trace.projections[0]]
    assert names == ["q", "k"]
    assert "layout" not in (trace.calls[0].scale.reason or "")  # so few bits may show no slope


@each("turn", ROTATIONS)
def test_the_rotations_keep_lengths(turn: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(B, H, L, E)
    torch.testing.assert_close(turn(x).norm(dim=-1), x.norm(dim=-1))
    assert float((turn(x) - x).abs().max()) > 0.1


@everywhere
@each("length", [0.5, 1.2])
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


@each("by", [1.0, 0.5])
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


def with_a_sign_lost(x: Tensor) -> Tensor:
    angle, (a, b) = torch.cat([table(x)] * 2, -1), x.chunk(2, -1)
    return x * angle.cos() + torch.cat([b, a], -1) * angle.sin()


def with_a_gain(x: Tensor) -> Tensor:
    return torch.addcmul(x, x, torch.cat([table(x)] * 2, -1).cos())


@each("turn", [with_a_sign_lost, with_a_gain])
def test_what_does_not_keep_lengths_is_no_rotation(turn: Callable[[Tensor], Tensor]) -> None:
    call = traced(lambda m, q, k, v: scores(turn(q), turn(k), v))
    assert call.unknown
    assert call.scale.effective is None


class Turning:
    """A rotation that is no module, and keeps its tables by device and length."""

    def __init__(self, by: str) -> None:
        angle = table(torch.empty(L, E))
        c, s = angle.cos(), angle.sin()
        self.by = by
        whole = torch.stack([c, -s, s, c], -1).view(*angle.shape, 2, 2) if by == "matrices" else torch.stack([c, s])
        self.tables = {None: {L: whole if by == "matrices" else tuple(torch.cat([x, x], -1) for x in whole)}}

    def __call__(self, x: Tensor) -> Tensor:
        held = self.tables[x.device.index][x.shape[-2]]
        if self.by == "matrices":  # as FMS does it: the sum's axis is counted from the front
            return (held * x.unflatten(-1, (-1, 2))[..., None, :]).sum(x.dim() + 1).flatten(-2)
        a, b = x.chunk(2, -1)
        return x * held[0] + torch.cat([-b, a], -1) * held[1]


@each("by", ["matrices", "cosines"])
def test_tables_in_an_object_that_is_no_module(by: str) -> None:
    """They were made before the trace began: what the model holds is no input, however deep it lies."""
    call = traced(lambda m, q, k, v: scores(m.turn(q), m.turn(k), v), turn=Turning(by))
    reads(call, "softmax(0.25 * rope(q).rope(k))", ROOT, meta=False)


def test_keys_in_an_object_are_no_table() -> None:
    """A cache of keys by layer, say: what attends to them meets activations."""
    cache = type("Cache", (), {})()
    cache.layers = [torch.randn(B, H, L, E)]
    call = traced(lambda m, q, k, v: scores(q, m.cache.layers[0], v), cache=cache)
    reads(call, "softmax(0.25 * q.k)", ROOT, meta=False)


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


@each("op", [rotary_op, rotary_both_op])
@each("before, outer", [(1.0, ROOT), (ROOT, 1.0), (ROOT, ROOT), (1.0, 1.0)])
def test_an_operation_that_is_not_seen_may_be_a_rotation_by_its_effect(op: Any, before: float, outer: float) -> None:
    call, scale = traced(by_op(op, outer, before)), before * outer
    reads(call, softmax_of("rope(q).rope(k)", scale), scale, meta=False)


@each("op, meta", [(rotary_op, True), (rotary_both_op, True), (stretch_op, False), (rotary_in_place_op, False)])
def test_an_operation_that_is_not_seen_is_named_else(op: Any, meta: bool) -> None:
    call = traced(by_op(op, ROOT), meta=meta)
    (name,) = call.unknown
    assert name.startswith(("rotary", "stretch"))
    assert call.scale.effective is None


class OfPositions(nn.Module):
    """Positions are an input, so that the rotation's matrices are data as well."""

    def __init__(self, turn: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.turn, (self.query, self.key, self.value) = turn, (nn.Linear(DIM, H * E) for _ in range(3))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, E)).transpose(1, 2) for p in (self.query, self.key, self.value))
        angle = positions[..., None] * 0.1 ** torch.arange(E // 2)
        return scores(self.turn(q, angle), self.turn(k, angle), v, ROOT)


def by_small_matrices(x: Tensor, angle: Tensor) -> Tensor:
    c, s = angle.cos(), angle.sin()
    turn = torch.stack([torch.stack([c, -s], -1), torch.stack([s, c], -1)], -2)[:, None]
    return (turn @ x.unflatten(-1, (-1, 2, 1))).flatten(-3)


def by_blocks_in_a_matrix(x: Tensor, angle: Tensor) -> Tensor:
    c, s = angle.cos(), angle.sin()
    turn = torch.zeros(*angle.shape[:-1], E, E)
    for i in range(0, E, 2):
        a, b = c[..., i // 2], s[..., i // 2]
        turn[..., i : i + 2, i : i + 2] = torch.stack([a, -b, b, a], -1).unflatten(-1, (2, 2))
    return (turn[:, None] @ x[..., None]).squeeze(-1)


@each("turn", [by_small_matrices, by_blocks_in_a_matrix])
def test_matrices_of_positions_that_are_an_input(turn: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    with torch.no_grad(), Trace() as run:
        OfPositions(turn)(torch.randn(B, L, DIM), torch.arange(float(L)).expand(B, L))
    (call,) = run.calls
    reads(call, "softmax(0.25 * rope(q).rope(k))", ROOT, meta=False)


class Written(OfPositions):
    """Channels of the projection, with two of the positions written beside them."""

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (H, E)).transpose(1, 2) for p in (self.query, self.key, self.value))
        for side in (q, k):
            side[..., -2:] = torch.stack([positions.cos(), positions.sin()], -1)[:, None]
        return scores(q, k, v, ROOT)


def test_vectors_into_which_cosines_were_written_are_no_table() -> None:
    torch.manual_seed(0)
    with torch.no_grad(), Trace() as run:
        Written(by_small_matrices)(torch.randn(B, L, DIM), torch.arange(float(L)).expand(B, L))
    (call,) = run.calls
    assert call.formula == "softmax(0.25 * unknown(cos, sin)(q).unknown(cos, sin)(k))"
