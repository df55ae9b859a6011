"""Edges, each on every implementation that takes the call; what is known beforehand is asserted, not compared."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sqrtdk
from sqrtdk import scales
from sqrtdk.errors import UnsupportedError
from tests.attention.calls import close, close_gradients, every, qkv, refuses, with_aux
from tests.attention.oracle import attend


def some_rows_blind(length: int, keys: int, kind: str) -> dict[str, Any]:
    """Rows 1 and 4 see nothing."""
    visible = torch.ones(length, keys, dtype=torch.bool)
    visible[[1, 4]] = False
    if kind == "bool":
        return {"attn_mask": visible}
    return {"attn_mask": torch.zeros(length, keys).masked_fill(~visible, -math.inf)}


# a row that sees nothing


@every
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_blind_row_gives_zero_and_lse_minus_infinity_and_is_counted(impl: str, kind: str) -> None:
    q, k, v = qkv()
    output, aux = with_aux(q, k, v, impl=impl, **some_rows_blind(7, 9, kind))
    assert (output[..., [1, 4], :] == 0).all()
    assert (aux.lse[..., [1, 4]] == -math.inf).all()
    assert (aux.keys[..., [1, 4]] == 0).all()
    assert (aux.max_logit[..., [1, 4]] == -math.inf).all()
    seen = [0, 2, 3, 5, 6]
    assert (aux.keys[..., seen] == 9).all()
    assert (output[..., seen, :] != 0).all()
    assert all(statistic[..., seen].isfinite().all() for statistic in aux)


@every
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_blind_row_has_zero_gradients(impl: str, kind: str) -> None:
    q, k, v = qkv()
    output = sqrtdk.attention(q, k, v, impl=impl, **some_rows_blind(7, 9, kind))
    dq, dk, dv = torch.autograd.grad(output[..., [1, 4], :].sum(), (q, k, v), retain_graph=True)
    assert (dq == 0).all()
    assert (dk == 0).all()
    assert (dv == 0).all()
    dq, dk, dv = torch.autograd.grad(output.square().sum(), (q, k, v))
    assert (dq[..., [1, 4], :] == 0).all()
    assert all(grad.isfinite().all() for grad in (dq, dk, dv))
    assert dk.abs().max() > 0


# NaN and infinity


@every
@pytest.mark.parametrize("keys", [1, 3, 9, 40])
def test_a_row_whose_logits_are_nan_gives_nan(impl: str, keys: int) -> None:
    q, k, v = qkv(keys=keys)
    q = q.detach().clone()
    q[0, 0, 2, 3] = math.nan
    try:
        output, aux = with_aux(q, k, v, impl=impl)
    except UnsupportedError:  # torch's kernel gives 0 for fewer keys than a vector holds
        assert impl in ("cpu", "fused")
        assert keys < 32
        return
    assert output[0, 0, 2].isnan().all()
    assert aux.lse[0, 0, 2].isnan()
    for statistic in set(sqrtdk.AuxRequest.all().wanted) - {"lse", "keys"}:
        assert getattr(aux, statistic)[0, 0, 2].isnan(), statistic
    others = torch.ones(2, 2, 7, dtype=torch.bool)
    others[0, 0, 2] = False
    assert output[others].isfinite().all()
    assert aux.lse[others].isfinite().all()


@every
@pytest.mark.parametrize("keys", [3, 9, 40])
def test_a_visible_key_of_nan_gives_nan(impl: str, keys: int) -> None:
    q, k, v = qkv(keys=keys)
    k = k.detach().clone()
    k[0, 1, 2, 0] = math.nan
    try:
        output = sqrtdk.attention(q, k, v, impl=impl)
    except UnsupportedError:
        assert impl in ("cpu", "fused")
        assert keys < 32
        return
    assert output[0, 1].isnan().all()
    assert output[1].isfinite().all()
    assert output[0, 0].isfinite().all()


@every
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value", "both"])
def test_what_a_bool_mask_hides_does_not_leak(impl: str, where: str, bad: float) -> None:
    q, k, v = qkv()
    visible = torch.ones(7, 9, dtype=torch.bool)
    visible[:, 3] = False
    clean = sqrtdk.attention(q, k, v, visible, impl=impl)
    clean_grads = torch.autograd.grad(clean.square().sum(), (q, k, v))
    bad_k, bad_v = k.detach().clone(), v.detach().clone()
    if where in ("key", "both"):
        bad_k[..., 3, :] = bad
    if where in ("value", "both"):
        bad_v[..., 3, :] = bad
    bad_k.requires_grad_()
    bad_v.requires_grad_()
    try:
        dirty = sqrtdk.attention(q, bad_k, bad_v, visible, impl=impl)
    except UnsupportedError:
        assert impl in ("cpu", "fused")
        return
    close(dirty, clean)
    close_gradients(torch.autograd.grad(dirty.square().sum(), (q, bad_k, bad_v)), clean_grads)


@pytest.mark.parametrize("impl", ["auto", "dense", "tiled"])
def test_a_key_of_nan_that_only_some_rows_see_spoils_these_alone(impl: str) -> None:
    q, k, v = qkv()
    k = k.detach().clone()
    visible = torch.ones(7, 9, dtype=torch.bool)
    visible[:5, 3] = False
    clean = with_aux(q, k, v, visible, impl=impl)
    k[..., 3, :] = math.nan
    dirty = with_aux(q, k, v, visible, impl=impl)
    close(dirty[0][..., :5, :], clean[0][..., :5, :])
    assert dirty[0][..., 5:, :].isnan().all()
    for ours, theirs in zip(dirty[1], clean[1], strict=True):
        close(ours[..., :5], theirs[..., :5])
    assert dirty[1].lse[..., 5:].isnan().all()


@every
def test_logits_that_overflow_to_minus_infinity_are_not_taken_for_masked(impl: str) -> None:
    q, k, v = (t.detach().clone() for t in qkv())
    q[..., 0, :] = 2e30
    k[..., :3, :] = -2e30  # product -8 * 4e60: minus infinity in float32, at visible keys
    k[..., 3:, :] = k[..., 3:, :].abs()
    visible = torch.ones(7, 9, dtype=torch.bool)
    visible[0, 8] = False
    try:
        _, aux = with_aux(q, k, v, visible, impl=impl)
    except UnsupportedError:
        assert impl in ("cpu", "fused")
        return
    assert aux.keys[0, 0, 0] == 8  # seven visible keys and the three overflowed ones, one hidden
    assert aux.min_logit[0, 0, 0] == -math.inf


@every
def test_a_row_of_overflowed_logits_alone_is_counted_and_not_blind(impl: str) -> None:
    q, k, v = (t.detach().clone() for t in qkv())
    q[..., 0, :], k[:] = 1e30, -1e30
    try:
        output, aux = with_aux(q, k, v, impl=impl)
    except UnsupportedError:
        assert impl in ("cpu", "fused")
        return
    assert output[..., 0, :].isnan().all()
    assert sqrtdk.attention(q, k, v, impl=impl)[..., 0, :].isnan().all()
    assert (aux.keys[..., 0] == 9).all()
    assert (aux.max_logit[..., 0] == -math.inf).all()


# masks


@every
@pytest.mark.parametrize("value_dim", [8, 6])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_mask_and_is_causal_whatever_kernel_torch_would_take(impl: str, kind: str, value_dim: int) -> None:
    # torch's kernels but one refuse the two together, and which one runs depends on the value's dimension
    q, k, _ = qkv()
    v = torch.randn(2, 2, 9, value_dim)
    shown = torch.rand(7, 9) > 0.4
    mask = shown if kind == "bool" else torch.zeros(7, 9).masked_fill(~shown, -math.inf)
    output = sqrtdk.attention(q, k, v, mask, is_causal=True, impl=impl)
    close(output, attend(q, k, v, scale=8**-0.5, attn_mask=mask, is_causal=True).output)


@every
@pytest.mark.parametrize("scale", [0.0, -0.5])
@pytest.mark.parametrize("given", [{"is_causal": True}, {"causal_lower_right": True}, {"window": (2, 0)}])
def test_scale_of_zero_or_below_under_a_causal_mask(impl: str, given: dict[str, Any], scale: float) -> None:
    # torch's CPU kernel multiplies the hidden logits by the scale as well: -inf * 0 is NaN, -inf * -0.5 is +inf
    q, k, v = qkv(length=7, keys=7)
    output, aux = with_aux(q, k, v, scale=scale, impl=impl, **given)
    answer = attend(q, k, v, scale=scale, **given)
    close(output, answer.output)
    close(aux.lse, answer.statistics["lse"])
    ours = torch.autograd.grad(sqrtdk.attention(q, k, v, scale=scale, impl=impl, **given).sum(), (q, k, v))
    close_gradients(ours, torch.autograd.grad(answer.output.sum(), (q, k, v)))


@every
def test_a_finite_mask_hides_nothing(impl: str) -> None:
    q, k, v = qkv()
    mask = torch.full((7, 9), torch.finfo(torch.float32).min)
    output, aux = with_aux(q, k, v, mask, impl=impl)
    close(output, v.mean(-2, keepdim=True).expand_as(output))
    assert (aux.keys == 9).all()


# empty calls


@every
def test_no_keys(impl: str) -> None:
    q, k, v = qkv(keys=0)
    output, aux = with_aux(q, k, v, impl=impl)
    assert output.shape == (2, 2, 7, 8)
    assert (output == 0).all()
    assert (aux.lse == -math.inf).all()
    assert (aux.keys == 0).all()
    grads = torch.autograd.grad(sqrtdk.attention(q, k, v, impl=impl).sum(), (q, k, v), allow_unused=True)
    assert all(grad is None or (grad == 0).all() for grad in grads)


@every
@pytest.mark.parametrize("lead", [(0, 2), (2, 0), (0, 0)])
def test_empty_batch_or_heads(impl: str, lead: tuple[int, int]) -> None:
    q, k, v = (torch.randn(*lead, n, 8) for n in (7, 9, 9))
    output, aux = with_aux(q, k, v, impl=impl)
    assert output.shape == (*lead, 7, 8)
    assert all(statistic.shape == (*lead, 7) for statistic in aux)


# head dimensions


@every
@pytest.mark.parametrize("dim", [3, 33, 257])
def test_head_dimensions(impl: str, dim: int) -> None:
    q, k, v = qkv(dim=dim)
    output, aux = with_aux(q, k, v, impl=impl)
    answer = attend(q, k, v, scale=dim**-0.5)
    close(output, answer.output, logit=answer.size)
    close(aux.lse, answer.statistics["lse"], logit=answer.size)


@every
@pytest.mark.parametrize("scale", [None, 2.0, scales.log_n()])
def test_head_dimension_zero_gives_the_mean_of_what_is_seen(impl: str, scale: Any) -> None:
    """As torch's function: an empty product is 0, whatever its scale."""
    q, k, v = torch.randn(2, 2, 7, 0), torch.randn(2, 2, 9, 0), torch.randn(2, 2, 9, 4, requires_grad=True)
    if refuses(impl, lambda: sqrtdk.attention(q, k, v, impl=impl), {"cpu": "the head dimension is 0"}):
        return
    seen = torch.ones(7, 9).tril().bool()
    mean = (seen.double() / seen.sum(-1, keepdim=True)) @ v.double()
    for given in ({"is_causal": True}, {"attn_mask": seen}):
        output, aux = with_aux(q, k, v, scale=scale, impl=impl, **given)
        close(output, mean)
        close(aux.lse, seen.double().sum(-1).log().expand(2, 2, 7))
    learning = sqrtdk.attention(q, k, v, scale=scale, is_causal=True, impl=impl)
    close_gradients(torch.autograd.grad(learning.square().sum(), v), torch.autograd.grad(mean.square().sum(), v))


@every
def test_value_dimension_zero_gives_an_empty_output(impl: str) -> None:
    q, k, _ = qkv()
    output, aux = with_aux(q, k, torch.randn(2, 2, 9, 0), impl=impl)
    assert output.shape == (2, 2, 7, 0)
    assert aux.lse.isfinite().all()
