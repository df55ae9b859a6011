"""Normalisations, recovered from what torch gave before and after them."""

import math

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.compare.infer.fit import NormFit, fit_norm
from sqrtdk.compare.inside.compute import apply_norm

B, H, L, E = 2, 4, 24, 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def tokens(dtype: torch.dtype, heads: int = H, length: int = L) -> Tensor:
    """Channels and tokens of unlike sizes, as projections give them."""
    channels, rows = (torch.randn(E) * 0.5).exp(), (torch.randn(B, 1, length, 1) * 0.3).exp()
    return ((torch.randn(B, heads, length, E) + 0.5) * channels * rows).to(dtype)


def normalise(x: Tensor, kind: str, gain: Tensor, shift: Tensor | None, eps: float, over: str) -> Tensor:
    """By torch, in the dtype of x."""
    batch, heads, length, features = x.shape
    if over == "heads":
        x = x.transpose(1, 2).reshape(batch, length, heads * features)
        flat = normalise(
            x[:, None], kind, gain.reshape(1, -1), None if shift is None else shift.reshape(1, -1), eps, "head"
        )
        return flat.view(batch, length, heads, features).transpose(1, 2)
    if kind == "rms":
        return functional.rms_norm(x, (features,), eps=eps) * gain[:, None]
    if kind == "layer":
        unit = functional.layer_norm(x, (features,), eps=eps) * gain[:, None]
        return unit if shift is None else unit + shift[:, None]
    return functional.normalize(x, dim=-1) * gain[:, None]


def recover(x: Tensor, y: Tensor, kind: str | None = None) -> NormFit:
    fit = fit_norm(x, y, kind)
    assert fit is not None
    return fit


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("over", ["head", "heads"])
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_kind_axis_gain_and_eps_are_recovered(kind: str, over: str, dtype: torch.dtype) -> None:
    x = tokens(dtype)
    gain = (torch.randn(H if over == "heads" else 1, E) * 0.3 + 1).to(dtype)
    shift = (torch.randn_like(gain) * 0.3).to(dtype) if kind == "layer" else None
    fit = recover(x, normalise(x, kind, gain, shift, 1e-3, over))
    assert (fit.norm.kind, fit.norm.over) == (kind, over)
    assert fit.allows(1e-3)
    assert fit.norm.gain.shape == gain.shape
    # a rounding of a gain is seen in every row, so that it is known better than one value; eps takes a share of it
    torch.testing.assert_close(fit.norm.gain, gain.double(), rtol=4 * torch.finfo(dtype).eps, atol=0.0)
    assert fit.residual < 8
    beside = (apply_norm(fit.norm, x) - normalise(x, kind, gain, shift, 1e-3, over).double()).abs()
    assert float(beside.max()) < 8 * torch.finfo(dtype).eps * 10


def test_eps_is_told_in_float32_and_left_open_in_bfloat16() -> None:
    for dtype, told in ((torch.float32, True), (torch.bfloat16, False)):
        x = tokens(dtype)
        fit = recover(x, functional.rms_norm(x, (E,), eps=1e-5))
        assert fit.allows(1e-5)
        assert fit.allows(1e-6) is not told
        assert fit.allows(3e-5) is not told
        assert not fit.allows(0.1)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("shape", [(1, 1, 8, 64), (1, 2, 6, 16), (2, 2, 24, 16)])
def test_eps_is_in_its_interval_where_one_token_decides_it(shape: tuple[int, ...]) -> None:
    """The shortest token of a few leaves no residual by which to know how well it tells the eps."""
    for seed in range(60):
        torch.manual_seed(seed)
        x = 0.1 * torch.randn(shape) * torch.randn(shape[0], 1, shape[2], 1).exp()
        assert recover(x, functional.rms_norm(x, shape[-1:], eps=1e-6) * torch.randn(shape[-1]), "rms").allows(1e-6)


def test_a_gain_of_each_head() -> None:
    x, gain = tokens(torch.float32), torch.rand(H, E) + 0.5
    fit = recover(x, normalise(x, "rms", gain, None, 1e-6, "head"))
    assert fit.norm.over == "head"
    torch.testing.assert_close(fit.norm.gain, gain.double(), rtol=1e-5, atol=0.0)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_length_is_told_from_the_root_of_the_mean_square(dtype: torch.dtype) -> None:
    x = tokens(dtype)
    fit = recover(x, functional.normalize(x, dim=-1))
    assert (fit.norm.kind, fit.norm.eps) == ("l2", 0.0)
    assert fit.norm.gain.shape == (1, 1) or fit.norm.gain.shape == (1, E)
    torch.testing.assert_close(fit.norm.gain, torch.ones_like(fit.norm.gain), rtol=2 * torch.finfo(dtype).eps, atol=0.0)
    same = recover(x, functional.rms_norm(x, (E,), eps=0.0))
    assert same.norm.kind == "rms"
    asked = recover(x, functional.rms_norm(x, (E,), eps=0.0), "l2")
    torch.testing.assert_close(
        asked.norm.gain, torch.full_like(asked.norm.gain, math.sqrt(E)), rtol=torch.finfo(dtype).eps, atol=0.0
    )


def test_a_layer_norm_is_no_root_of_the_mean_square() -> None:
    x = tokens(torch.bfloat16)
    y = functional.layer_norm(x, (E,))
    assert fit_norm(x, y, "rms") is None
    assert recover(x, y, "layer").norm.kind == "layer"


def test_what_is_no_norm_is_none() -> None:
    x = tokens(torch.float32)
    assert fit_norm(x, x) is None
    assert fit_norm(x, torch.randn_like(x)) is None
    assert fit_norm(x, torch.zeros_like(x)) is None
    y = functional.rms_norm(x, (E,))
    assert fit_norm(x, y * torch.linspace(1.0, 1.001, L)[:, None]) is None  # a gain of each row
    y[0, 0, 0, 0] = math.nan
    assert fit_norm(x, y) is None


def test_few_rows_tell_a_gain_that_is_one() -> None:
    x = tokens(torch.float32, heads=H, length=1)[:1]
    fit = recover(x, functional.rms_norm(x, (E,), eps=1e-6))
    assert fit.norm.kind == "rms"
    torch.testing.assert_close(fit.norm.gain, torch.ones_like(fit.norm.gain), rtol=1e-5, atol=0.0)
    assert fit_norm(x[:, :1], functional.rms_norm(x[:, :1], (E,)) * torch.rand(E)) is None


def test_rows_of_zeros_do_no_harm() -> None:
    x = tokens(torch.bfloat16)
    x[:, :, -3:] = 0.0
    assert recover(x, functional.rms_norm(x, (E,), eps=1e-6)).norm.kind == "rms"


def test_a_large_tensor_is_looked_at_in_part() -> None:
    x = torch.randn(1, 8, 3000, 64)
    assert recover(x, functional.rms_norm(x, (64,), eps=1e-4)).allows(1e-4)
