"""Logits written part by part: what stands around them, over them, and what was done to a part."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.attentions.each import each
from tests.attentions.heads import ROOT, Attend, B, H, Heads, L, logits, over_devices, read, trace
from tests.attentions.written import WRITTEN

TRIANGLE = torch.ones(L, L, dtype=torch.bool).tril()


@over_devices
@pytest.mark.parametrize("name", WRITTEN)
def test_logits_written_part_by_part_are_read(name: str, device: str) -> None:
    attend, mask, keys, one = WRITTEN[name]
    call = read(attend, device)
    assert (call.batch, call.heads, call.query_len, call.key_len, call.unknown) == (B, H, L, keys, ())
    assert (call.mask.kind if call.mask is not None else None, call.sinks) == (mask, name == "zero column")
    assert call.scale.effective == pytest.approx(ROOT)
    assert call.scale.agree is (True if device == "cpu" and one else None)
    if device == "cpu" and call.mask is not None:
        assert call.mask.masked_weight == 0.0


def _half_scaled(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q @ k.mT
    z[..., :4] *= ROOT
    return z.softmax(-1) @ v


def _half_raised(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = logits(m, q, k)
    z[..., :4] = z[..., :4] + 1.0
    return z.softmax(-1) @ v


def _beside_numbers(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q.new_ones(B, H, L, L + 2)
    z[..., :L] = logits(m, q, k)
    return z.softmax(-1)[..., :L] @ v


def _rows_of_unlike_scales(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q.new_empty(B, H, L, L)
    z[:, :, :4] = logits(m, q[:, :, :4], k)
    z[:, :, 4:] = q[:, :, 4:] @ k.mT
    return z.softmax(-1) @ v


def _raised_and_biased(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = logits(m, q, k)
    z[:, :, 1:, 1:] = z[:, :, 1:, 1:] + m.table[..., 0] + 1.0
    return z.softmax(-1) @ v


@over_devices
@each("attend", [_half_scaled, _half_raised, _raised_and_biased, _beside_numbers, _rows_of_unlike_scales])
def test_a_part_that_differs_is_not_guessed(attend: Attend, device: str) -> None:
    call = read(attend, device)
    assert len(call.unknown) == 1
    assert call.scale.effective is None
    assert call.formula.startswith("softmax(unknown(")


@over_devices
def test_what_was_added_to_a_part_is_a_bias(device: str) -> None:
    def constant(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = logits(m, q, k)
        z[:, :, 1:, 1:] = z[:, :, 1:, 1:] + m.table[..., 0]
        return z.softmax(-1) @ v

    call = read(constant, device)
    assert (call.formula, call.bias) == ("softmax(0.25 * q.k + bias)", "bias")
    call = read(WRITTEN["biased in part"][0], device)
    assert (call.formula, call.score, call.terms) == ("softmax(0.25 * q.k + relative)", "relative", 2)


def test_a_mask_built_in_place_is_known_without_data() -> None:
    def attend(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.zeros(L, L, device=q.device, dtype=q.dtype)
        for row in range(L):
            mask[row, row + 1 :] = -math.inf
        return (logits(m, q, k) + mask).softmax(-1) @ v

    for device in ("cpu", "meta"):
        assert read(attend, device).formula == "softmax(0.25 * q.k + causal)"


def _selected(fill: Tensor | float) -> Attend:
    def attend(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = q @ k.mT * ROOT
        return torch.where(TRIANGLE, z, fill).softmax(-1) @ v

    return attend


@each("fill", [-math.inf, -1e4, -1.0, 0.0])
def test_the_fill_of_a_whole_tensor_is_its_number(fill: float) -> None:
    """jnp.where and others make a tensor of it first."""
    for made in (torch.full((L, L), fill), torch.full((B, H, L, L), fill)):
        mask = read(_selected(made), "cpu").mask
        assert mask is not None
        assert (mask.kind, mask.fill) == ("causal", fill)


def test_logits_that_others_stand_in_for_are_not_hidden() -> None:
    call = read(_selected(torch.arange(float(L))), "cpu")
    assert call.unknown == ("where",)
    assert call.scale.effective is None


def test_a_mask_without_a_softmax_has_its_keys_where_the_values_are() -> None:
    """(v^T w^T)^T is w v."""

    def attend(m: Heads, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        weights = (q @ k.mT * ROOT).masked_fill(~TRIANGLE, -math.inf).relu()
        return (v.mT @ weights.mT).mT

    _, _, run = trace(attend)
    assert [missed.formula for missed in run.not_measured] == [f"relu({ROOT:.4g} * q.k) + causal"]
