"""The tolerances themselves: sums in any order pass, and a gradient that is a little wrong does not."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tests.tolerances import FOUND, allowed, complaint, gradient_complaints

B, H, L, S, E = 8, 3, 12, 10, 8
ROWS = B * H * L
SHARED = ("gain", "bias", "sinks", "weight")  # by all rows, by batches, by batches and rows, by all rows
F64 = torch.float64
dtypes = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)


def leaves(dtype: torch.dtype) -> dict[str, Tensor]:
    sizes = {"query": (B, H, L, E), "key": (B, H, S, E), "value": (B, H, S, E)}
    sizes |= {"gain": (1,), "bias": (L, S), "sinks": (H, 1, 1), "weight": (E, E)}
    return {name: torch.randn(size, dtype=F64).to(dtype).requires_grad_() for name, size in sizes.items()}


def attend(given: dict[str, Tensor], batch: Tensor) -> tuple[Tensor, Tensor]:
    """Output and logits of these elements of the batch."""
    q, k, v = (given[name][batch] for name in ("query", "key", "value"))
    z = given["gain"] * (q @ given["weight"] @ k.mT) / E + given["bias"]
    columns = torch.cat([z, given["sinks"].expand(*z.shape[:-1], 1)], -1)
    return columns.softmax(-1)[..., :-1] @ v, z


def gradients(given: dict[str, Tensor], probe: Tensor, order: list[Tensor]) -> dict[str, Tensor]:
    """Of the output times the probe; the batch in parts, which are added up one after the other."""
    found = {name: torch.zeros_like(leaf) for name, leaf in given.items()}
    for batch in order:
        total = (attend(given, batch)[0] * probe[batch].to(given["query"].dtype)).sum()
        for name, gradient in zip(given, torch.autograd.grad(total, list(given.values())), strict=True):
            found[name] += gradient
    return found


def wrong(actual: dict[str, Tensor], expected: dict[str, Tensor], dtype: torch.dtype, logit: float) -> list[str]:
    return gradient_complaints(actual, expected, dtype, length=L, logit=logit, rows=ROWS)


def case(dtype: torch.dtype) -> tuple[dict[str, Tensor], Tensor, dict[str, Tensor], float]:
    """Leaves, a probe, the gradients in float64, the largest logit."""
    given, probe = leaves(dtype), torch.randn(B, H, L, E, dtype=F64)
    wide = {name: leaf.detach().double().requires_grad_() for name, leaf in given.items()}
    whole = torch.arange(B)
    return given, probe, gradients(wide, probe, [whole]), attend(wide, whole)[1].abs().max().item()


@dtypes
def test_every_order_of_a_sum_is_admissible(dtype: torch.dtype) -> None:
    given, probe, expected, logit = case(dtype)
    orders = [[torch.arange(B)], list(torch.arange(B).split(1))]
    orders += [list(torch.randperm(B).split(size)) for size in (1, 2, 3, 8) for _ in range(5)]
    for order in orders:
        assert not wrong(gradients(given, probe, order), expected, dtype, logit)


@pytest.mark.parametrize("name", ["query", "key", "value", *SHARED])
def test_a_wrong_factor_or_a_term_left_out_is_found(name: str) -> None:
    given, probe, expected, logit = case(F64)
    right = gradients(given, probe, [torch.arange(B)])
    assert not wrong(right, expected, F64, logit)
    for factor in (1.0 + FOUND, 1.0 - 1e-9, -1.0):
        (found,) = wrong(right | {name: factor * right[name]}, expected, F64, logit)
        assert found.startswith(f"gradient of {name}: off by")
    without_one = gradients(given, probe, [torch.arange(B - 1)])
    assert len(wrong(right | {name: without_one[name]}, expected, F64, logit)) == 1


def test_in_float32_a_wrong_factor_on_the_largest_gradient_is_found() -> None:
    given, probe, expected, logit = case(torch.float32)
    right = gradients(given, probe, [torch.arange(B)])
    largest = max(expected, key=lambda name: expected[name].abs().max().item())
    for factor in (1.0 + FOUND, 1.0 - FOUND):
        assert len(wrong(right | {largest: factor * right[largest]}, expected, torch.float32, logit)) == 1


def test_what_no_factor_would_be_found_in_is_not_judged() -> None:
    one = {"gain": torch.ones(1)}
    assert not gradient_complaints(one, one, torch.float64, length=4096, logit=100.0, rows=2**20)
    with pytest.raises(AssertionError, match=r"a factor of \d\.\d+ on a gradient would pass: judge it in float64"):
        gradient_complaints(one, one, torch.float32, length=4096, logit=100.0, rows=2**20)


def test_a_gradient_that_one_of_the_two_has_not_is_found() -> None:
    one = {"query": torch.ones(1), "bias": None}
    assert not gradient_complaints(one, one, F64, length=1, logit=1.0, rows=1)
    other = one | {"bias": torch.zeros(1)}
    for pair in ((one, other), (other, one)):
        (found,) = gradient_complaints(*pair, F64, length=1, logit=1.0, rows=1)
        assert found == "gradient of bias: one of the two has no gradient"


def test_each_number_by_its_own_size() -> None:
    expected = torch.tensor([1.0, 1e-20], dtype=F64)
    near = expected * torch.tensor([1.0, 1.0 + 1e-6], dtype=F64)
    assert complaint(near, expected, F64, length=1, logit=0.0) is None
    assert complaint(near, expected, F64, length=1, logit=0.0, each=True) == (
        "off by 1e-26, 8.88e-36 is allowed (torch.float64, size 1e-20)"
    )
    assert complaint(near, expected, F64, length=1, logit=0.0, each=True, magnitude=1e-10) is None


def test_the_length_is_the_row_s_times_the_rows() -> None:
    one = allowed(F64, length=16, logit=99.0, magnitude=0.1)
    assert math.isclose(allowed(F64, length=16, logit=99.0, magnitude=0.1, uses=96), one * math.sqrt(96))
    assert allowed(F64, length=16 * 96, logit=99.0, magnitude=0.1) == allowed(
        F64, length=16, logit=99.0, magnitude=0.1, uses=96
    )
