"""Rows that a mask hides whole by a finite number: their weights are equal, and so are those that gradients use.

The backward pass that makes them from lse alone loses log n beside -3.4e38, and gives every one of n keys the weight 1.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sqrtdk
from sqrtdk.impl.extremes import may_lose_mass
from tests.attention.calls import IMPLEMENTATIONS
from tests.attention.hidden_rows import F64, HiddenRows, derivatives, hidden_rows, wrong
from tests.attention.small import SIZES
from tests.support.kernel_here import needs_kernel
from tests.tolerances import gradient_complaints

LOWEST = torch.finfo(torch.float32).min
DTYPES = (torch.float32, F64, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@settings(max_examples=25, deadline=None)
@given(call=hidden_rows(), dtype=st.sampled_from(DTYPES))
def test_gradients_are_those_of_the_formula(impl: str, call: HiddenRows, dtype: torch.dtype) -> None:
    if impl == "cpu" and dtype == F64:
        dtype = torch.float32
    assert wrong(call, impl, dtype) == []


@settings(max_examples=25, deadline=None)
@given(call=hidden_rows(), dtype=st.sampled_from(DTYPES))
def test_gradients_of_blocks_are_those_of_the_formula(call: HiddenRows, dtype: torch.dtype) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for module, names in SIZES.items():
            for name, value in names.items():
                patch.setattr(f"{module}.{name}", value)
        assert wrong(call, "tiled", dtype) == []


def whole(hiding: Any, length: int, keys: int) -> tuple[Tensor, Tensor]:
    """A mask of one hidden row, and random q, k, v as one tensor (3, B, H, L or S, E)."""
    mask = torch.zeros(length, keys)
    mask[length // 2] = hiding
    return mask, torch.randn(3, 1, 2, max(length, keys), 15)


@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
@pytest.mark.parametrize("hiding", [LOWEST, -1e30, 1e30])
@pytest.mark.parametrize(("length", "keys"), [(31, 513), (130, 130)])
def test_of_long_calls_too(impl: str, hiding: float, length: int, keys: int) -> None:
    """Over several blocks of the kernel's keys and of torch's rows; an added 1e30 moves a row as far."""
    mask, (q, k, v) = whole(hiding, length, keys)
    given = {"query": q[..., :length, :], "key": k[..., :keys, :], "value": v[..., :keys, :]}
    found = []
    for dtype, name in ((torch.float32, impl), (F64, "dense")):
        leaves = {name: leaf.to(dtype).requires_grad_() for name, leaf in given.items()}
        found.append(derivatives([sqrtdk.attention(**leaves, attn_mask=mask, impl=name)], leaves))
    assert gradient_complaints(*found, torch.float32, length=keys, logit=6.0, rows=2 * length) == []


@needs_kernel
def test_second_derivatives_of_the_compiled_kernel() -> None:
    mask, (q, k, v) = whole(LOWEST, 5, 9)
    found = []
    for dtype, impl in ((torch.float32, "cpu"), (F64, "dense")):
        leaves = {name: t.to(dtype).requires_grad_() for name, t in (("query", q), ("key", k), ("value", v))}
        output = sqrtdk.attention(leaves["query"][..., :5, :], leaves["key"], leaves["value"], mask, impl=impl)
        first = torch.autograd.grad(output.square().sum(), list(leaves.values()), create_graph=True)
        found.append(derivatives(list(first), leaves))
    assert gradient_complaints(*found, torch.float32, length=9 * 9, logit=6.0, rows=2 * 5) == []


# the choice


@pytest.mark.parametrize("hiding", [LOWEST, -1e30, -1e9, 1e9])
def test_auto_leaves_torch_s_kernels_only_where_they_are_wrong(hiding: float) -> None:
    mask, (q, k, v) = whole(hiding, 9, 9)
    q.requires_grad_()
    chosen = sqrtdk.explain(q, k, v, mask)
    assert chosen.impl != "fused"
    assert "wrong gradients" in chosen.reason or chosen.impl == "cpu"
    assert sqrtdk.explain(q, k, v, bias=mask).impl != "fused"
    with torch.no_grad():
        assert sqrtdk.explain(q, k, v, mask).impl == "fused"
    if hiding < 0:  # of a row that sees a key, 0 is the largest
        assert sqrtdk.explain(q, k, v, mask.tril(-1)).impl == "fused"
    assert sqrtdk.explain(q, k, v, mask == 0).impl == "fused"


def test_what_a_mask_may_lose() -> None:
    mask = torch.zeros(2, 1, 4, 4)
    assert not may_lose_mass(mask)
    mask[1, 0, 2] = -torch.inf
    assert not may_lose_mass(mask)
    mask[1, 0, 2, :3] = LOWEST
    assert may_lose_mass(mask)
    assert may_lose_mass(mask[1:].expand(2, 3, 4, 4))
    assert may_lose_mass(mask.to("meta"))
    assert not may_lose_mass(mask != 0)
    assert not may_lose_mass(mask[:, :, :0])
