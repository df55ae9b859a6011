"""Scale and softcap, recovered from the outputs of torch's attention and of the plain formula."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.compare.infer.fit import USUAL_SOFTCAPS, fit_scale
from sqrtdk.compare.inside.program import Formula
from sqrtdk.compare.rounding.attention import output_allowed
from sqrtdk.compare.rounding.precision import Precision

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
B, HQ, H, L, S, E = 2, 4, 2, 20, 24, 16


def sides(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    visible = torch.ones(L, S).tril(S - L).bool()
    q, k, v = (torch.randn(B, h, n, E).to(dtype) for h, n in ((HQ, L), (H, S), (H, S)))
    return q, k, v, visible


def wide(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(HQ // H, 1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, E**-0.5, 1.0 / E, 0.9 * E**-0.5])
def test_the_scale_of_torchs_attention(scale: float, dtype: torch.dtype) -> None:
    q, k, v, visible = sides(dtype)
    output = functional.scaled_dot_product_attention(q, k, v, visible, scale=scale, enable_gqa=True)
    fit = fit_scale(q, k, v, output, formula=Formula(visible=visible))
    assert fit is not None
    assert fit.common is not None
    assert abs(fit.common / scale - 1.0) < 3 * torch.finfo(dtype).eps
    assert bool(((fit.scale / scale).log().abs() < 6 * fit.error + 1e-7).all())
    side = Precision(dtype)
    assert fit.residual < float(output_allowed(q, k, v, Formula(scale, visible=visible), (side, side)).max())


def test_a_scale_of_each_head() -> None:
    q, k, v, visible = sides(torch.float32)
    scales = torch.tensor([0.1, 0.2, 0.4, 0.8])
    output = functional.scaled_dot_product_attention(q * scales[:, None, None], wide(k), wide(v), visible, scale=1.0)
    fit = fit_scale(q, k, v, output, formula=Formula(visible=visible))
    assert fit is not None
    assert fit.common is None
    torch.testing.assert_close(fit.scale, scales.double(), rtol=1e-5, atol=0.0)


def test_the_lse_tells_it_where_the_output_does_not() -> None:
    q, k, v, visible = sides(torch.float32)
    z = (0.3 * q @ wide(k).mT).masked_fill(~visible, -math.inf)
    v = torch.ones_like(v)  # the output is 1, whatever the weights
    fit = fit_scale(q, k, v, z.softmax(-1) @ wide(v), z.logsumexp(-1), formula=Formula(visible=visible))
    assert fit is not None
    assert fit.common is not None
    assert abs(fit.common / 0.3 - 1.0) < 1e-5


def test_values_that_say_nothing_of_the_scale() -> None:
    q, k, v, _ = sides(torch.float32)
    plain = Formula()
    assert (
        fit_scale(q, k[:, :, :1], v[:, :, :1], wide(v[:, :, :1]).expand(B, HQ, L, E), formula=plain) is None
    )  # one key
    zero = fit_scale(q, k, torch.zeros_like(v), torch.zeros(B, HQ, L, E), formula=plain)
    assert zero is None or bool(zero.error.isinf().all())


def test_a_formula_that_has_more_than_a_scale() -> None:
    q, k, v, visible = sides(torch.float32)
    bias, sinks = torch.randn(HQ, L, S), torch.randn(HQ)
    z = (0.3 * q @ wide(k).mT + bias).masked_fill(~visible, -math.inf)
    z = torch.cat([z, sinks.view(1, HQ, 1, 1).expand(B, HQ, L, 1)], -1)
    output = z.softmax(-1)[..., :S] @ wide(v)
    fit = fit_scale(q, k, v, output, formula=Formula(bias=bias, sinks=sinks, visible=visible))
    assert fit is not None
    assert fit.common is not None
    assert abs(fit.common / 0.3 - 1.0) < 1e-5
    without = fit_scale(q, k, v, output, formula=Formula(visible=visible))
    assert without is not None
    assert without.residual > 0.01


@pytest.mark.sampled(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cap", [2.0, 20.0])
def test_scale_and_softcap(cap: float, dtype: torch.dtype) -> None:
    q, k, v, visible = sides(dtype)
    z = cap * ((q.double() @ wide(k).double().mT) / cap).tanh()
    output = (z.masked_fill(~visible, -math.inf).softmax(-1) @ wide(v).double()).to(dtype)
    fit = fit_scale(q, k, v, output, formula=Formula(visible=visible), caps=USUAL_SOFTCAPS)
    assert fit is not None
    assert fit.softcap is not None
    assert fit.common is not None
    # a cap c far above the logits z leaves z^3 / 3 c^2 to tell it by
    assert abs(fit.softcap / cap - 1.0) < 20 * cap * torch.finfo(dtype).eps
    assert abs(fit.common - 1.0) < 4 * torch.finfo(dtype).eps
    assert fit.residual < 2 * torch.finfo(dtype).eps


def test_a_softcap_that_is_not_there_is_told_by_its_error_or_its_size() -> None:
    q, k, v, visible = sides(torch.float32)
    output = functional.scaled_dot_product_attention(q, wide(k), wide(v), visible, scale=0.25)
    fit = fit_scale(q, k, v, output, formula=Formula(visible=visible), caps=USUAL_SOFTCAPS)
    assert fit is not None
    assert fit.softcap is not None
    assert fit.softcap > 300
