"""Decays beside a rotation, q times s^i and k times s^-j (xPos), and those that do not cancel."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from tests.attentions.each import each
from tests.trace.sides_by_hand import (
    E,
    H,
    L,
    Turn,
    everywhere,
    reads,
    scales,
    scores,
    softmax_of,
    table,
    traced,
    turned_as_a_whole,
)
from tests.trace.test_trace_rotations import circle, points


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
@each("fused", [False, True])
@pytest.mark.parametrize("turn", DECAYS)
def test_decays_that_cancel_are_xpos(turn: Turn, fused: bool, scale: float, meta: bool) -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        by = xpos_scale(q)
        q, k = turn(q, by), turn(k, 1 / by)
        return functional.scaled_dot_product_attention(q, k, v, scale=scale) if fused else scores(q, k, v, scale)

    call = traced(attend, meta=meta)
    reads(call, softmax_of("xpos(q).xpos(k)", scale), scale, meta=meta)
    assert call.rope


@everywhere
@pytest.mark.parametrize("turn", DECAYS)
@each("on_k", [1.0, -1.0])
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

    reads(traced(attend, meta=meta), softmax_of("decay(q).decay(k)", scale), scale, meta=meta)
