"""sigma-reparametrisation: the spectral norm, the gradient, what state_dict holds."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import sqrtdk
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.repair import qk_clip_, sigma_reparam
from tests.repair.modules import Attention, randomised, states


def _layer(**options: Any) -> nn.Linear:
    return nn.Linear(6, 4, **{"dtype": torch.float64, **options})


def _norm(weight: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(weight.detach().flatten(1), 2))


@pytest.mark.parametrize("gamma", [1.0, 2.5])
def test_the_spectral_norm_is_gamma(gamma: float) -> None:
    layer = _layer()
    plain = layer.weight.detach().clone()
    assert sigma_reparam(layer, gamma=gamma, iterations=200) is layer
    assert _norm(layer.weight) == pytest.approx(gamma)
    torch.testing.assert_close(layer.weight, plain * gamma / _norm(plain))
    with torch.no_grad():  # training may do to W what it likes
        layer.parametrizations.weight.original.mul_(1e3)
    assert _norm(layer.weight) == pytest.approx(gamma)


def test_without_a_gamma_the_module_computes_what_it_did() -> None:
    layer, x = _layer(), torch.randn(3, 6, dtype=torch.float64)
    expected = layer(x)
    torch.testing.assert_close(sigma_reparam(layer, gamma=None).eval()(x), expected)


def test_gradcheck_with_the_singular_vectors_as_they_are() -> None:
    layer, x = sigma_reparam(_layer()).eval(), torch.randn(3, 6, dtype=torch.float64)
    parameters = dict(layer.named_parameters())
    assert set(parameters) == {"bias", "parametrizations.weight.original", "parametrizations.weight.0.gamma"}

    def run(*values: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(layer, dict(zip(parameters, values, strict=True)), (x,))

    assert torch.autograd.gradcheck(run, tuple(p.detach().clone().requires_grad_() for p in parameters.values()))


def test_the_gradient_is_that_of_the_singular_value() -> None:
    """At the singular vectors themselves, u v^T is the derivative of sigma: against torch's own norm."""
    layer = sigma_reparam(_layer(), iterations=300)
    weight = layer.weight
    original = layer.parametrizations.weight.original
    ours = torch.autograd.grad(weight.sin().sum(), original)[0]
    expected = torch.autograd.grad((original / torch.linalg.matrix_norm(original, 2)).sin().sum(), original)[0]
    torch.testing.assert_close(ours, expected)


def test_power_iteration_runs_in_train_mode_only_and_is_saved() -> None:
    layer = sigma_reparam(_layer())
    with torch.no_grad():
        layer.parametrizations.weight.original.copy_(torch.randn(4, 6))
    held = {key: value.clone() for key, value in layer.state_dict().items()}
    assert {"parametrizations.weight.0.u", "parametrizations.weight.0.v"} <= set(held)
    layer.eval()
    _ = layer.weight
    assert all(torch.equal(value, held[key]) for key, value in layer.state_dict().items())
    layer.train()
    _ = layer.weight
    changed = {key for key, value in layer.state_dict().items() if not torch.equal(value, held[key])}
    assert changed == {"parametrizations.weight.0.u", "parametrizations.weight.0.v"}
    other = sigma_reparam(_layer())
    other.load_state_dict(layer.state_dict())
    assert torch.equal(other.eval().weight, layer.eval().weight)
    assert torch.equal(copy.deepcopy(layer).weight, layer.weight)
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(layer.weight, other.weight)
    assert "weight" in layer.state_dict()


def test_two_forwards_before_a_backward() -> None:
    layer, x = sigma_reparam(_layer()), torch.randn(3, 6, dtype=torch.float64)
    (layer(x).sum() + layer(2 * x).sum()).backward()
    assert layer.parametrizations.weight[0].gamma.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types(dtype: torch.dtype) -> None:
    layer = sigma_reparam(_layer(dtype=dtype))
    assert layer.weight.dtype is dtype
    assert layer.parametrizations.weight[0].u.dtype is torch.float32
    assert _norm(layer.weight.float()) == pytest.approx(1.0, rel=4 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_module_that_is_cast_afterwards(dtype: torch.dtype) -> None:
    """Its vectors are rounded with it: sigma changes by the square of that, and the weight by one rounding."""
    layer = sigma_reparam(_layer(), iterations=100).to(dtype)
    layer(torch.ones(2, layer.in_features, dtype=dtype)).sum().backward()
    assert layer.weight.dtype is dtype
    assert _norm(layer.weight.float()) == pytest.approx(1.0, rel=4 * torch.finfo(dtype).eps)


def test_other_shapes_and_a_weight_of_zeros() -> None:
    conv = sigma_reparam(nn.Conv1d(3, 4, 5), iterations=100)
    assert _norm(conv.weight) == pytest.approx(1.0, rel=1e-5)
    layer = _layer()
    nn.init.zeros_(layer.weight)
    assert not sigma_reparam(layer).weight.any()


def test_random_numbers_of_the_caller_stay() -> None:
    layer, state = _layer(), torch.get_rng_state()
    sigma_reparam(layer)
    assert torch.equal(state, torch.get_rng_state())


def test_logits_stay_bounded_and_the_clip_says_why_it_does_nothing() -> None:
    model, x = randomised(Attention(), size=30.0), states()
    sigma_reparam(model.q, gamma=2.0)
    sigma_reparam(model.k, gamma=3.0)
    with sqrtdk.trace(model.eval(), keep=True) as run:
        model(x)
    stats = run.calls[0].stats
    assert stats is not None
    with torch.no_grad():
        size = float(x.norm(dim=-1).max())
        bound = (2 * size + float(model.q.bias.norm())) * (3 * size + float(model.k.bias.norm())) * 8**-0.5
    assert max(stats.max_logit) < bound
    refused = qk_clip_(model, run, threshold=1e-3)[0].refused
    assert refused is not None
    assert "parametrization" in refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "bias"}, r"bias is a weight of two dimensions or more; got \(4,\)"),
        ({"name": "nothing"}, "nothing is a weight of two dimensions or more; got NoneType"),
        ({"gamma": 0.0}, "gamma is a finite number above 0; got 0.0"),
        ({"iterations": 0}, "iterations is a number from 1; got 0"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        sigma_reparam(_layer(), **options)


def test_wrong_modules() -> None:
    with pytest.raises(InvalidTypeError, match=r"module is an nn.Module; got Parameter"):
        sigma_reparam(_layer().weight)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="reparametrised by its spectral norm already"):
        sigma_reparam(sigma_reparam(_layer()))
    layer = _layer()
    layer.weight = nn.Parameter(torch.ones(4, 6, dtype=torch.int8), requires_grad=False)
    with pytest.raises(InvalidTypeError, match=r"weight has a floating dtype; got torch.int8"):
        sigma_reparam(layer)
