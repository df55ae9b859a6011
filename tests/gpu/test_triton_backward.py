"""Gradients of the Triton kernel against those of the formula in float64, also through lse and entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

import sqrtdk
from sqrtdk import AuxRequest, positions
from sqrtdk.errors import UnsupportedError
from tests.attention.hidden_rows import HiddenRows, hidden_rows
from tests.attention.hidden_rows import wrong as hidden_rows_wrong
from tests.support.triton_here import DEVICE, needs_triton
from tests.tolerances import gradient_complaints

pytestmark = needs_triton
LENGTH, KEYS, HEADS = 40, 70, 2  # tiles of 32: an edge in both
LOGIT = 12.0  # no logit below is larger

Leaves = dict[str, Tensor]


def operands(
    batch: int = 1, length: int = LENGTH, keys: int = KEYS, width: int = 16, value_width: int = 16
) -> dict[str, Tensor]:
    """Two heads of queries that share one of keys."""
    shapes = {
        "query": (batch, HEADS, length, width),
        "key": (batch, 1, keys, width),
        "value": (batch, 1, keys, value_width),
    }
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def attend(leaves: Leaves, impl: str, **options: Any) -> tuple[Tensor, Any]:
    """Output and statistics; what is no operand among the leaves is an option."""
    rest = {name: leaf for name, leaf in leaves.items() if name not in ("query", "key", "value")}
    tensors = (leaves["query"], leaves["key"], leaves["value"])
    request = AuxRequest(lse=True, entropy_nats=True)
    return sqrtdk.attention(*tensors, enable_gqa=True, impl=impl, return_aux=request, **rest, **options)


def total(leaves: Leaves, impl: str, **options: Any) -> Tensor:
    """A weighted sum of output, lse (where it is finite) and entropy."""
    output, aux = attend(leaves, impl, **options)
    generator = torch.Generator().manual_seed(1)
    sums = []
    for result in (output, aux.lse.masked_fill(aux.lse.isneginf(), 0.0), aux.entropy_nats):
        weights = torch.randn(result.shape, generator=generator).to(output.dtype).double()
        sums.append((result.double() * weights.to(result.device)).sum())
    return sum(sums)


def gradients(given: Leaves, impl: str, dtype: torch.dtype, **options: Any) -> Leaves:
    leaves = {name: leaf.to(DEVICE, dtype).requires_grad_() for name, leaf in given.items()}
    options = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in options.items()}
    found = torch.autograd.grad(total(leaves, impl, **options), list(leaves.values()), allow_unused=True)
    return {name: g if g is None else g.cpu() for name, g in zip(leaves, found, strict=True)}


def wrong(given: Leaves, **options: Any) -> list[str]:
    """What is wrong with the gradients of a float32 call, nothing if all are right."""
    mine = gradients(given, "triton", torch.float32, **options)
    expected = gradients(given, "dense", torch.float64, **options)
    batch, heads, length, _ = given["query"].shape
    keys = given["key"].shape[-2]
    return gradient_complaints(mine, expected, torch.float32, length=keys, logit=LOGIT, rows=batch * heads * length)


BIASES = {
    "of all": (2, HEADS, LENGTH, KEYS),
    "of rows and keys": (LENGTH, KEYS),
    "of heads and keys": (HEADS, 1, KEYS),
    "of batches and rows": (2, 1, LENGTH, 1),
    "one number": (1, 1),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", BIASES)
def test_a_bias_has_a_gradient_of_its_own_shape(name: str) -> None:
    added = {"bias": torch.randn(BIASES[name])}
    assert wrong(operands(batch=2, length=LENGTH) | added, is_causal=True, softcap=4.0) == []


BANDS: dict[str, dict[str, Any]] = {
    "all keys": {"softcap": 4.0},
    "causal": {"is_causal": True},
    "a window": {"window": (20, 9)},
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("heads", [1, HEADS])
@pytest.mark.parametrize("name", BANDS)
def test_a_table_of_distances_has_its_gradient_summed_along_the_diagonals(
    name: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Table(positions.Alibi):
        """A learned number for each distance, in place of slopes."""

        def term(self, query: Tensor, key: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
            largest.append(len(rows) * len(columns))
            return self.of_distance(rows.unsqueeze(-1) - columns, query)

        def of_distance(self, distance: Tensor, query: Tensor) -> Tensor:
            return self.slopes[:, distance + self.slopes.shape[1] // 2]

    largest: list[int] = []
    given = operands(batch=2) | {"bias": torch.randn(heads, 2 * KEYS + 1)}
    own = sqrtdk.attention
    monkeypatch.setattr(sqrtdk, "attention", lambda *args, bias, **rest: own(*args, bias=Table(bias, True), **rest))
    expected = gradients(given, "dense", torch.float64, **BANDS[name])
    largest.clear()
    mine = gradients(given, "triton", torch.float32, **BANDS[name])
    assert largest == [1]  # the first pair, to check the sizes
    rows = 2 * HEADS * LENGTH
    assert gradient_complaints(mine, expected, torch.float32, length=KEYS, logit=LOGIT, rows=rows) == []


def test_tensors_may_lie_any_way_in_memory() -> None:
    given = {name: t.transpose(1, 2).contiguous().transpose(1, 2) for name, t in operands().items()}
    leaves = {name: t.to(DEVICE).requires_grad_() for name, t in given.items()}
    output, aux = attend(leaves, "triton")
    mine = torch.autograd.grad(output.sum() + aux.lse.sum(), list(leaves.values()))  # gradients of stride 0
    doubles = {name: t.to(DEVICE).double().requires_grad_() for name, t in given.items()}
    output, aux = attend(doubles, "dense")
    expected = torch.autograd.grad(output.sum() + aux.lse.sum(), list(doubles.values()))
    named = [dict(zip(given, found, strict=True)) for found in (mine, expected)]
    assert gradient_complaints(*named, torch.float32, length=KEYS, logit=LOGIT, rows=HEADS * LENGTH) == []


def test_a_broken_row_reaches_all_that_it_sees_and_no_other_row() -> None:
    from sqrtdk.impl.gpu.operators import forward

    given = operands(length=4, keys=5)
    given["query"][0, 1, 2] = torch.nan
    leaves = [t.to(DEVICE).requires_grad_() for t in given.values()]
    output = forward(*leaves, 0.25, None, 0.0, None, None, None, None, None, None, None, 0)[0]
    found = [g.isnan() for g in torch.autograd.grad(output.sum(), leaves)]
    assert found[0].any(-1).nonzero().tolist() == [[0, 1, 2]]
    assert found[1].all()
    assert found[2].all()


def test_rows_that_are_close_to_one_hot() -> None:
    given = operands(length=8)
    mine = gradients(given, "triton", torch.float32, scale=40.0)
    expected = gradients(given, "dense", torch.float64, scale=40.0)
    largest = max(g.abs().max().item() for g in expected.values())
    for name, its in expected.items():  # logits of 600, of which an eps is 7e-5
        assert (mine[name] - its).abs().max() < 1e-3 * largest, name


def test_sampled_rows_have_no_gradient() -> None:
    from sqrtdk.impl.gpu.operators import forward

    q, k, v = (t.to(DEVICE).requires_grad_() for t in operands(length=3).values())
    places = torch.tensor([0, 5, 9], device=DEVICE)
    output = forward(q, k, v, 0.25, None, 0.0, None, None, None, None, 0, None, places, 0)[0]
    with pytest.raises(UnsupportedError, match="sampled rows"):
        output.sum().backward()


def test_torch_s_own_check_of_the_backward_operators_passes() -> None:
    from sqrtdk.impl.gpu import gradients as operators

    q, k, v = (t.to(DEVICE) for t in operands(length=5, keys=7).values())
    rows = torch.rand(1, HEADS, 5, device=DEVICE)
    bias = torch.randn(1, HEADS, 1, 7, device=DEVICE)
    scale = torch.rand(1, HEADS, 5, 1, device=DEVICE)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    levels = torch.stack([rows + 4, rows + 5])
    numbers = (q, q, k, v, levels, rows, rows, 1.0, scale, 2.0, bias, False, None, 3, None, True, True)
    for operator, given in ((operators.backward, numbers), (operators.constant, (q, q, rows, rows, rows))):
        assert set(torch.library.opcheck(operator, given, test_utils=tests).values()) == {"SUCCESS"}


@pytest.mark.full
@settings(max_examples=12, deadline=None)
@drawn(call=hidden_rows(longest=24), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
def test_rows_that_a_mask_hides_whole_by_a_number(call: HiddenRows, dtype: torch.dtype) -> None:
    assert hidden_rows_wrong(call, "triton", dtype, DEVICE.type) == []
