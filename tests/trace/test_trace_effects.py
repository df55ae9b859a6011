"""Operations that no table lists are read from what they do to other values; what is no factor is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.tracing import AttentionCall
from tests.attentions.asked import (
    PERMUTED,
    READ,
    ROOT,
    UNREAD,
    WIDTH,
    Asked,
    B,
    H,
    L,
    Middle,
    on_both,
    on_logits,
    on_weights,
)
from tests.support.needs import needs


def read(middle: Middle, dtype: torch.dtype = torch.float32) -> AttentionCall:
    model, x = Asked(middle).to(dtype), torch.randn(B, L, WIDTH, dtype=dtype)
    with torch.no_grad():
        plain = model(x)
        with sqrtdk.trace(model) as run:
            observed = model(x)
    assert torch.equal(plain, observed)
    (call,) = run.calls
    return call


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", READ)
def test_what_moves_and_multiplies_is_read(name: str) -> None:
    middle, scale = READ[name]
    call = read(middle)
    assert call.unknown == ()
    assert call.scale.effective == pytest.approx(scale, rel=1e-4)
    assert call.scale.agree in (True, None)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", UNREAD)
def test_what_is_no_factor_is_named(name: str) -> None:
    middle, operation = UNREAD[name]
    call = read(middle)
    assert operation in " ".join(call.unknown)
    assert call.scale.effective is None


@pytest.mark.parametrize(
    ("name", "effects", "norms"),
    [
        ("kernel that doubles", ["effect of twice"] * 2, []),
        pytest.param("ldexp on logits", ["effect of ldexp"], [], marks=needs("ldexp as an operator", torch="2.11")),
        ("kernel that normalises", [], ["rms", "rms"]),
        ("Fourier transform and back", [], []),
        ("where on logits", [], []),
    ],
)
def test_the_factor_says_what_gave_it_and_one_of_1_is_none(name: str, effects: list[str], norms: list[str]) -> None:
    call = read(READ[name][0])
    assert [factor.source for factor in call.scale.factors if factor.source.startswith("effect")] == effects
    assert [stage.detail for stage in call.stages if stage.name == "norm"] == norms


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", PERMUTED)
def test_channels_that_do_not_belong_together_are_told(name: str) -> None:
    call = read(PERMUTED[name])
    assert "permuted" in [stage.name for stage in call.stages]
    assert call.formula == "softmax(0.3536 * permuted(q).k)"


@pytest.mark.parametrize("name", READ)
def test_of_channels_that_belong_together_none_is_told(name: str) -> None:
    assert "permuted" not in [stage.name for stage in read(READ[name][0]).stages]


def test_what_is_straight_near_0_alone_is_no_factor() -> None:
    """min(x, 2 x + 8) is x above -8, where all of these q and k lie."""
    call = read(on_both(lambda x: torch.minimum(x, 2 * x + 8)))
    assert "minimum" in " ".join(call.unknown)
    assert call.scale.effective is None


@pytest.mark.parametrize("name", ["weights by a sum that was cast", "weights by a reciprocal"])
def test_a_softmax_by_hand_in_half_precision_has_its_precision(name: str) -> None:
    middle, scale = READ[name]
    call = read(middle, torch.bfloat16)
    assert (call.logits_dtype, call.unknown) == ("bfloat16", ())
    assert call.scale.effective == pytest.approx(scale, rel=1e-4)


def test_a_matrix_from_outside_is_no_linear_attention() -> None:
    model = Asked(UNREAD["matrix from outside on q"][0])
    with sqrtdk.trace(model) as run:
        model(torch.randn(B, L, WIDTH))
    assert run.not_measured == ()


def test_the_larger_of_logits_and_their_double_is_no_bound() -> None:
    call = read(on_logits(lambda z: torch.maximum(z, 2 * z)))
    assert "maximum" in " ".join(call.unknown)
    assert call.scale.effective is None


def test_a_cap_whose_factor_is_not_that_of_its_division_scales() -> None:
    """3 tanh(z / 2) has slope 3/2 at 0."""
    call = read(on_logits(lambda z: 3 * torch.tanh(z / 2)))
    assert call.softcap == pytest.approx(3.0)
    assert call.scale.effective == pytest.approx(1.5 * ROOT)
    assert call.scale.agree is True


@pytest.mark.parametrize(("bias_first", "scale"), [(True, 0.5 * ROOT), (False, ROOT)])
def test_the_alpha_of_an_addition_is_a_factor_of_the_second(bias_first: bool, scale: float) -> None:
    bias = torch.arange(float(L)).sin().expand(L, L).tril()
    call = read(on_logits(lambda z: torch.add(bias, z, alpha=0.5) if bias_first else torch.add(z, bias, alpha=0.5)))
    assert call.scale.effective == pytest.approx(scale)
    assert call.scale.agree is True


@pytest.mark.parametrize(
    "change",
    [
        lambda z: z * torch.tanh(z / 3),
        lambda z: torch.tanh(z / 3) * z,
        lambda z: z * torch.tanh(z * 0.5 / 1.5),
        lambda z: z * torch.tanh(z.double() / 3).float(),
    ],
)
def test_logits_in_the_place_of_a_cap(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In z * tanh(z / c), for c * tanh(z / c), there is no slope: the scale is that of the factors before it."""
    call = read(on_logits(change))
    assert call.formula == "softmax(0.3536 * q.k * tanh(0.3536 * q.k / 3))"
    assert (call.softcap, call.unknown) == (None, ())
    assert [stage.detail for stage in call.stages if stage.name == "softcap"] == ["z * tanh(z / 3)"]
    assert call.scale.effective == pytest.approx(ROOT)
    assert (call.scale.numeric, call.scale.reason) == (None, "z * tanh(z / 3) has no inverse")
    other = read(on_logits(lambda z: z * torch.tanh((z + 1) / 3)))
    assert "mul by a function of the logits" in other.unknown


def test_a_clamp_that_can_bite_is_told() -> None:
    assert read(on_logits(lambda z: z.clamp(-0.1, 0.1))).formula == "softmax(clamp(0.3536 * q.k, -0.1, 0.1))"
    assert read(on_logits(lambda z: z.clamp(min=torch.finfo(z.dtype).min))).formula == "softmax(0.3536 * q.k)"


def test_the_beta_of_baddbmm_is_a_factor_of_the_bias() -> None:
    bias = 3.0 * torch.arange(float(L)).sin().expand(B * H, L, L).tril()

    def middle(_: nn.Module, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = torch.baddbmm(bias, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0.5, alpha=ROOT)
        return z.view(B, H, L, L).softmax(-1) @ v

    call = read(middle)
    assert call.formula == "softmax(0.3536 * q.k + bias)"
    assert call.scale.agree is True


def test_weights_that_were_changed_tell_no_slope() -> None:
    scale = read(on_weights(torch.square)).scale
    assert (scale.effective, scale.numeric) == (None, None)
    assert "the weights were changed after the softmax" in str(scale.reason)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_in_another_dtype(dtype: torch.dtype) -> None:
    middle, scale = READ["lerp"]
    assert read(middle, dtype).scale.effective == pytest.approx(scale, rel=1e-4)
