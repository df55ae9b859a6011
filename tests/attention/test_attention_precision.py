"""Precision of the statistics, their gradients, dropout, and gradients that many blocks add up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import sqrtdk
from sqrtdk import positions, scales, scores
from sqrtdk.impl import rows as tiled_module
from tests.attention.calls import close, close_gradients, every, lse_and_entropy, qkv, with_aux
from tests.attention.oracle import attend

UNDERFLOW = 1e-30  # weights below it, next to a peak of 1, may count as 0


# precision of the statistics


@every
@pytest.mark.parametrize("offset", [1e2, 1e4])
def test_variance_of_logits_with_a_large_offset(impl: str, offset: float) -> None:
    # logits offset + (0, 1, 2, ..): a one-pass variance gives -8 or so at an offset of 1e4
    k = torch.stack([torch.arange(9.0), torch.full((9,), offset)], -1).expand(1, 1, 9, 2)
    q = torch.ones(1, 1, 4, 2)
    _, aux = with_aux(q, k, k, scale=1.0, impl=impl)
    assert (aux.variance - 60 / 9).abs().max() <= 1e-5 * 60 / 9
    assert (aux.mean - (offset + 4)).abs().max() <= 1e-5 * offset


@every
@pytest.mark.parametrize("row", ["near one-hot", "uniform", "offset", "spread"])
@pytest.mark.parametrize("size", [1.0, 1e2, 1e4])
def test_statistics_within_1e_5_of_dense_float64(impl: str, row: str, size: float) -> None:
    # whole numbers in key and query: the logits are exact in float32, so only the statistics' own rounding shows
    generator = torch.Generator().manual_seed(3)
    keys = 300
    z = {
        "near one-hot": torch.where(torch.arange(keys) == 7, 24.0, 0.0)
        + torch.randint(0, 3, (keys,), generator=generator),
        "uniform": torch.full((keys,), size),
        "offset": size + torch.randint(-3, 4, (keys,), generator=generator),
        "spread": (torch.randn(keys, generator=generator) * size).round(),
    }[row].float()
    q, k = torch.ones(1, 1, 5, 1), z.view(1, 1, keys, 1)
    _, aux = with_aux(q, k, torch.randn(1, 1, keys, 3), scale=1.0, impl=impl)
    expected = attend(q, k, k, scale=1.0).statistics
    for name, value in expected.items():
        found = getattr(aux, name).double()
        assert ((found - value).abs() <= 1e-5 * value.abs() + UNDERFLOW).all(), (name, found[0, 0, 0], value[0, 0, 0])


@every
def test_one_key_rows(impl: str) -> None:
    q, k, v = qkv(keys=1)
    _, aux = with_aux(q, k, v, impl=impl)
    assert (aux.entropy_nats == 0).all()
    assert (aux.peak == 1).all()
    assert (aux.collision == 1).all()
    assert (aux.jacobian_norm == 0).all()
    assert (aux.variance == 0).all()
    assert torch.equal(aux.lse, aux.max_logit)


@pytest.mark.parametrize("impl", ["auto", "dense", "tiled"])
def test_gradient_of_entropy_is_finite_at_masked_keys(impl: str) -> None:
    q, k, v = qkv()
    mask = torch.zeros(7, 9).masked_fill(torch.rand(7, 9) > 0.5, -math.inf).requires_grad_()
    aux = lse_and_entropy(q, k, v, mask, impl=impl)
    found = torch.autograd.grad(aux.entropy_nats.sum(), (q, k, mask))
    q64, k64, mask64 = (t.detach().double().requires_grad_() for t in (q, k, mask))
    expected = attend(q64, k64, v, scale=8**-0.5, attn_mask=mask64).statistics["entropy_nats"]
    assert all(gradient.isfinite().all() for gradient in found)
    close_gradients(found, torch.autograd.grad(expected.sum(), (q64, k64, mask64)))


@pytest.mark.parametrize("impl", ["auto", "dense", "tiled"])
def test_gradient_of_entropy_is_finite_where_weights_underflow(impl: str) -> None:
    q, k, v = qkv()
    aux = lse_and_entropy(q, k, v, scale=200.0, impl=impl)
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(aux.entropy_nats.sum(), (q, k)))


@pytest.mark.parametrize("impl", ["auto", "dense", "tiled"])
@pytest.mark.parametrize("name", ["query", "key", "scale", "bias", "mask", "slopes", "weight", "sinks", "theta"])
def test_statistics_carry_the_gradient_of_whatever_alone_needs_one(impl: str, name: str) -> None:
    q, k, v = (t.detach() for t in qkv())
    leaf = {
        "query": q,
        "key": k,
        "scale": torch.rand(2, 1, 1),
        "bias": torch.randn(7, 9),
        "mask": torch.randn(7, 9),
        "slopes": torch.rand(2),
        "weight": torch.randn(8, 8),
        "sinks": torch.randn(2),
        "theta": torch.zeros(2),  # stands for the rule's own parameter
    }[name].requires_grad_()
    learned = scales.learned(2)
    leaf = learned.log_factor if name == "theta" else leaf
    makers: dict[str, Callable[[], dict[str, Any]]] = {
        "scale": lambda: {"scale": leaf},
        "bias": lambda: {"bias": leaf},
        "mask": lambda: {"attn_mask": leaf},
        "slopes": lambda: {"bias": positions.alibi(slopes=leaf)},
        "weight": lambda: {"score": scores.bilinear(leaf)},
        "sinks": lambda: {"sinks": leaf},
        "theta": lambda: {"scale": learned},
    }
    given = makers[name]() if name in makers else {}
    aux = lse_and_entropy(q, k, v, impl=impl, **given)
    for statistic in (aux.lse, aux.entropy_nats):
        (grad,) = torch.autograd.grad(statistic.sum(), leaf, retain_graph=True)
        assert grad.abs().max() > 0


# dropout


@every
def test_dropout_of_everything_and_of_nothing(impl: str) -> None:
    q, k, v = qkv()
    assert (sqrtdk.attention(q, k, v, dropout_p=1.0, impl=impl) == 0).all()
    close(sqrtdk.attention(q, k, v, dropout_p=0.0, impl=impl), functional.scaled_dot_product_attention(q, k, v))


@every
def test_dropout_keeps_the_mean_and_scales_what_stays(impl: str) -> None:
    q, k = torch.zeros(1, 1, 400, 4), torch.zeros(1, 1, 50, 4)
    v = torch.eye(50).view(1, 1, 50, 50).requires_grad_()
    output = sqrtdk.attention(q, k, v, dropout_p=0.3, impl=impl)
    values = output.detach() * 50  # weights are 1/50: what stays is 1 / 0.7, what goes 0
    stays = (values - 1 / 0.7).abs() < 1e-4
    assert (stays | (values == 0)).all()
    # 20,000 coins: five standard deviations
    assert abs(stays.float().mean().item() - 0.7) < 5 * math.sqrt(0.21 / 20_000)
    # the backward pass has the same mask, a block that is computed again included
    (grad,) = torch.autograd.grad(output.sum(), v)
    close(grad.sum(-1)[0, 0] / 50, output.detach().sum(-2)[0, 0], logit=100.0)


@every
def test_statistics_are_those_before_dropout(impl: str, without_kernel: None) -> None:
    q, k, v = qkv()
    _, dropped = with_aux(q, k, v, dropout_p=0.5, impl=impl)
    _, whole = with_aux(q, k, v, impl=impl)
    for ours, theirs in zip(dropped, whole, strict=True):
        assert torch.equal(ours, theirs)


# half types over many blocks


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_gradients_of_many_blocks_are_as_good_as_those_of_one(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = qkv(length=256, keys=16, dtype=dtype)

    def gradients(height: int) -> tuple[Tensor, ...]:
        monkeypatch.setattr(tiled_module, "block_rows", lambda call: height)
        output = sqrtdk.attention(q, k, v, impl="tiled")
        return torch.autograd.grad((output * (1 + output.detach())).sum(), (q, k, v))

    wide = [t.detach().double().requires_grad_() for t in (q, k, v)]
    output = attend(*wide, scale=8**-0.5).output
    exact = torch.autograd.grad((output * (1 + output.detach())).sum(), wide)
    for name, one, many, true in zip("qkv", gradients(256), gradients(2), exact, strict=True):
        of_one, of_many = ((t.double() - true).abs().mean().item() for t in (one, many))
        assert of_many <= 1.1 * of_one, f"d{name}: {of_many:.3g} in the mean against {of_one:.3g} in one block"
