"""`assert_gradients`: right kernels pass in every dtype, planted faults are named, wrong formulas are told apart."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import sqrtdk
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.testing import assert_gradients
from tests.laws.backward_models import FAULTS, SIZES, Formula, Kernel
from tests.support.kernel_here import needs_kernel

HALF = (torch.bfloat16, torch.float16)
IMPLEMENTATIONS = ["tiled", "dense", pytest.param("cpu", marks=needs_kernel)]
ELSEWHERE = ("dropout", "no_dropout", "sinks", "padding")  # of a module, or with a mask that the other arguments hide
KERNELS = [name for name, fault in FAULTS.items() if fault.own is None and name not in ELSEWHERE]


def vectors(dtype: torch.dtype = torch.float32, key_heads: int = 4, length: int = 37) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, length, 16), (2, key_heads, length, 16), (2, key_heads, length, 16)
    q, k, v = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return q, k, v


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_our_own_kernels_have_the_gradients_of_their_formulas(impl: str, dtype: torch.dtype) -> None:
    q, k, v = vectors(dtype, 2)
    sinks = torch.randn(4, requires_grad=True)
    options = {"is_causal": True, "softcap": 2.0, "window": 9, "sinks": sinks}
    assert_gradients(
        lambda q, k, v: sqrtdk.attention(q, k, v, enable_gqa=True, impl=impl, **options), q, k, v, **options
    )
    bias = torch.randn(4, 37, 37, dtype=dtype, requires_grad=True)

    def with_lse(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, aux = sqrtdk.attention(q, k, v, bias, enable_gqa=True, impl=impl, return_aux=True)
        return out, aux.lse

    report = assert_gradients(with_lse, q, k, v, bias)
    assert report.cases[0].kept == ("q", "k", "v", "bias")
    blind = torch.ones(37, 37, dtype=torch.bool).tril(-1)  # row 0 sees no key
    assert_gradients(lambda q, k, v: sqrtdk.attention(q, k, v, blind, enable_gqa=True, impl=impl), q, k, v, blind)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, *HALF], ids=str)
def test_torchs_attention_has_the_gradients_of_its_formula(dtype: torch.dtype) -> None:
    q, k, v = vectors(dtype)
    assert_gradients(lambda q, k, v: sdpa(q, k, v, is_causal=True), q, k, v, is_causal=True)
    mask = torch.rand(37, 37, generator=torch.Generator().manual_seed(1)) > 0.3
    assert_gradients(lambda q, k, v: sdpa(q, k, v, mask), q, k, v, mask)


def _of_torch(backend: SDPBackend) -> Callable[..., Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        with sdpa_kernel(backend):
            return sdpa(q, k, v, **options)

    return attend


BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "more keys": {"keys": 50},
    "one feature": {"width": 1},
    "more than a tile": {"length": 150, "is_causal": True},
    "groups": {"key_heads": 2, "is_causal": True},
    "scale": {"scale": 0.7},
    "padding": {"attn_mask": torch.arange(37) < torch.tensor([37, 30]).view(2, 1, 1, 1)},
    "any mask": {"attn_mask": torch.rand(37, 37, generator=torch.Generator().manual_seed(1)) > 0.3},
    "values of another width": {"value_width": 8},
    "the last key": {"keys": 50, "is_causal": True, "window": 9, "causal_lower_right": True},
}
NOT_FLASH = ("values of another width",)  # torch's flash kernel of a CPU refuses it
OURS_ALONE = ("the last key",)


@pytest.mark.full
@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("impl", [*IMPLEMENTATIONS, "fused", *BACKENDS])
def test_kernels_have_the_gradients_of_their_formulas_over_the_grid(impl: str, dtype: torch.dtype) -> None:
    attend = _of_torch(BACKENDS[impl]) if impl in BACKENDS else partial(sqrtdk.attention, impl=impl)
    for name, case in OPTIONS.items():
        if (impl == "flash" and name in NOT_FLASH) or (impl in ("fused", *BACKENDS) and name in OURS_ALONE):
            continue
        formula = dict(case)
        length, width, key_heads = (formula.pop(x, y) for x, y in (("length", 37), ("width", 16), ("key_heads", 4)))
        keys, value_width = formula.pop("keys", length), formula.pop("value_width", width)
        q, _, _ = vectors(dtype, length=length)
        _, k, v = vectors(dtype, key_heads, keys)
        function = partial(attend, **formula, enable_gqa=key_heads < 4)
        report = assert_gradients(function, q[..., :width], k[..., :width], v[..., :value_width], **formula)
        assert all(one.kept == ("q", "k", "v") for one in report.cases), name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", KERNELS)
def test_a_planted_fault_of_a_kernel_is_named(name: str) -> None:
    fault = FAULTS[name]
    formula = Formula(SIZES["small"], name, **fault.options)
    q, k, v = vectors(key_heads=2 if fault.groups else 4)
    mask = formula.visible(37) if formula.padding else None
    with pytest.raises(AssertionError) as failed:
        assert_gradients(
            lambda q, k, v: Kernel.apply(q, k, v, None, formula), q, k, v, mask, mask is None,
            softcap=formula.cap or None, window=formula.window or None, grid=name == "strided",
        )  # fmt: skip
    text = str(failed.value)
    assert "no known mistake" not in text
    for operand in fault.operands.split(", "):
        assert operand in text.partition(": ")[2]


def mine(scale: float = 0.25) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2]).triu(1).bool()
        return (q @ k.mT * scale).masked_fill(later, -math.inf).softmax(-1) @ v

    return attend


def test_a_formula_that_is_not_the_functions_is_no_wrong_gradient() -> None:
    assert_gradients(mine(), *vectors(), is_causal=True, grid=False)
    with pytest.raises(AssertionError, match="the output is not that of the formula"):
        assert_gradients(mine(0.3), *vectors(), is_causal=True, grid=False)
    with pytest.raises(AssertionError, match="the output is not that of the formula"):
        assert_gradients(mine(), *vectors(), grid=False)


def test_bad_arguments_are_refused() -> None:
    q, k, v = vectors()
    with pytest.raises(InvalidTypeError):
        assert_gradients(mine(), q, k.double(), v)
    with pytest.raises(InvalidValueError):
        assert_gradients(mine(), q, k[:, :3], v)
    with pytest.raises(InvalidValueError, match="function returns"):
        assert_gradients(lambda q, k, v: mine()(q, k, v).transpose(1, 2), q, k, v, is_causal=True)
    with pytest.raises(AssertionError, match="the function raises ZeroDivisionError"):
        assert_gradients(lambda q, k, v: 1 / 0, q, k, v)  # type: ignore[arg-type, return-value]


def test_weights_below_the_least_normal_number_have_few_digits() -> None:
    hidden = torch.rand(4, 37, 37, generator=torch.Generator().manual_seed(1)) > 0.5
    bias = torch.zeros(4, 37, 37).masked_fill(hidden, -100.0).requires_grad_()
    report = assert_gradients(lambda q, k, v: (q @ k.mT * 0.25 + bias).softmax(-1) @ v, *vectors(), bias)
    assert report.cases[0].kept == ("q", "k", "v", "bias")


def test_a_case_that_the_function_can_not_take_is_one_of_the_report() -> None:
    def padded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = sdpa(q, k, v)
        return torch.nn.functional.pad(out, (0, 0, 0, -out.shape[2] % 37))  # whole blocks of rows

    with pytest.raises(AssertionError) as failed:
        assert_gradients(partial(padded), *vectors())
    assert str(failed.value).splitlines()[:2] == [
        "gradients of padded in float32: wrong in 4 of 11 cases",
        "  1 token: the function returns (2, 4, 37, 16) for (2, 4, 1, 16)",
    ]


def test_lengths_that_a_kernel_refuses_are_no_fault() -> None:
    def blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        assert q.shape[2] % 37 == 0
        return sdpa(q, k, v)

    report = assert_gradients(blocks, *vectors())
    assert repr(report) == "GradientReport(blocks; float32; 11 cases, 4 refused)"
    assert {case.name for case in report.cases if case.refused} == {
        "1 token", "17 tokens", "36 tokens", "fewer rows than keys",
    }  # fmt: skip
    with pytest.raises(AssertionError, match="wrong in 10 of 11 cases, 1 refused"):
        assert_gradients(lambda q, k, v: sdpa(q, k.detach(), v) if q.shape[2] > 1 else 1 / 0, *vectors())


def test_a_difference_without_a_name_is_shown_once_and_gets_no_wrong_one() -> None:
    class Noisy(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient + torch.linspace(0, 0.1, gradient.numel()).view_as(gradient).square()

    with pytest.raises(AssertionError) as failed:
        assert_gradients(lambda q, k, v: sdpa(q, Noisy.apply(k), v), *vectors())
    _, line, one_token = str(failed.value).splitlines()
    assert line.startswith("  as given and 9 more: the gradient of k is off by ")
    assert line.endswith("no known mistake gives it")
    assert one_token == "  1 token: the gradient of k is not zero, but the formula's is"
