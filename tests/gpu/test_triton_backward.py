"""Gradients of the Triton kernel against those of the formula in float64, also through lse and entropy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import AuxRequest
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.gpu.load import interpreted
from tests.tolerances import gradient_complaints, half_complaint

pytestmark = pytest.mark.skipif(not interpreted() and not torch.cuda.is_available(), reason="no GPU, no interpreter")
DEVICE = "cpu" if interpreted() else "cuda"
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
    request = AuxRequest(lse=True, entropy=True)
    return sqrtdk.attention(*tensors, enable_gqa=True, impl=impl, return_aux=request, **rest, **options)


def total(leaves: Leaves, impl: str, **options: Any) -> Tensor:
    """A weighted sum of output, lse (where it is finite) and entropy."""
    output, aux = attend(leaves, impl, **options)
    generator = torch.Generator().manual_seed(1)
    sums = []
    for result in (output, aux.lse.masked_fill(aux.lse.isneginf(), 0.0), aux.entropy):
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


def a_mask() -> Tensor:
    """Of no pattern; row 3 sees nothing."""
    mask = torch.rand(LENGTH, KEYS) < 0.6
    mask[3] = False
    return mask


CASES: dict[str, dict[str, Any]] = {
    "all keys": {},
    "causal": {"is_causal": True},
    "causal to the last key, a cap": {"causal_lower_right": True, "softcap": 2.0},
    "a window": {"window": (9, 4)},
    "before the first key": {"window": (0, -1), "is_causal": True},
    "a mask": {"attn_mask": a_mask},
    "a negative scale": {"scale": -0.7},
}


@pytest.mark.parametrize("name", CASES)
def test_what_a_row_sees_its_gradient_sees(name: str) -> None:
    options = {key: x() if callable(x) else x for key, x in CASES[name].items()}
    assert wrong(operands(), **options) == []


# One key more or less is another tile, or makes a tile that all its rows see.
@pytest.mark.parametrize("window", [(1, 1), (30, None), (None, 30)])
def test_the_band_ends_at_the_edge_of_a_tile(window: tuple[int | None, int | None]) -> None:
    assert wrong(operands(length=KEYS), window=window) == []


def test_scales_sinks_and_a_cap_have_gradients() -> None:
    added = {"scale": torch.randn(HEADS, LENGTH, 1), "sinks": torch.randn(HEADS)}
    assert wrong(operands() | added, softcap=3.0, is_causal=True) == []


def test_a_scale_and_a_sink_a_head_have_gradients() -> None:
    added = {"scale": torch.tensor([0.5, -0.2]).reshape(HEADS, 1, 1), "sinks": torch.randn(HEADS)}
    assert wrong(operands() | added, window=(20, None)) == []


BIASES = {
    "of all": (2, HEADS, LENGTH, KEYS),
    "of rows and keys": (LENGTH, KEYS),
    "of heads and keys": (HEADS, 1, KEYS),
    "of batches and rows": (2, 1, LENGTH, 1),
    "one number": (1, 1),
}


@pytest.mark.parametrize("name", BIASES)
def test_a_bias_has_a_gradient_of_its_own_shape(name: str) -> None:
    added = {"bias": torch.randn(BIASES[name])}
    assert wrong(operands(batch=2, length=LENGTH) | added, is_causal=True, softcap=4.0) == []


@pytest.mark.parametrize("sizes", [(33, 65, 24, 40), (1, 70, 16, 16), (40, 1, 40, 5), (5, 3, 1, 16)])
def test_odd_sizes(sizes: tuple[int, int, int, int]) -> None:
    length, keys, width, value_width = sizes
    assert wrong(operands(1, length, keys, width, value_width)) == []


@pytest.mark.parametrize("sizes", [(0, 7), (7, 0)])
def test_where_nothing_is_seen_gradients_are_zero(sizes: tuple[int, int]) -> None:
    given = operands(1, *sizes) | {"bias": torch.randn(HEADS, 1, 1), "scale": torch.ones(1, 1, 1)}
    found = gradients(given, "triton", torch.float32)
    assert all(g.shape == given[name].shape and not g.any() for name, g in found.items())


def plain_gradients(given: Leaves, dtype: torch.dtype, scale: float) -> Leaves:
    """The textbook's lines on whole matrices, each rounded to `dtype`; causal."""
    q, k, v = (t.to(dtype).requires_grad_() for t in given.values())
    z = (q @ k.mT * scale).masked_fill(~torch.ones(LENGTH, KEYS).tril().bool(), -torch.inf)
    p = z.softmax(-1)
    results = (p @ v, z.logsumexp(-1), -(p * torch.where(p > 0, p, 1.0).log()).sum(-1))
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(r.shape, generator=generator).to(dtype) for r in results]
    sums = sum((r * w).double().sum() for r, w in zip(results, weights, strict=True))
    return dict(zip(given, torch.autograd.grad(sums, (q, k, v)), strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_are_as_near_as_the_plain_formula(dtype: torch.dtype) -> None:
    given = {name: t.to(dtype).float() for name, t in operands().items()}
    mine = gradients(given, "triton", dtype, is_causal=True)
    expected = gradients(given, "dense", torch.float64, is_causal=True)
    plain = plain_gradients(given, dtype, 0.25)
    largest = max(g.abs().max().item() for g in expected.values())
    for name, its in expected.items():
        assert mine[name].dtype == dtype
        assert half_complaint(mine[name], its, [plain[name]], dtype, floor=largest) is None, name


def test_two_runs_are_equal_in_every_bit() -> None:
    given = operands() | {"bias": torch.randn(KEYS), "sinks": torch.randn(HEADS)}
    first, second = (gradients(given, "triton", torch.float32, window=(30, 9)) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in given)


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
    output = forward(*leaves, 0.25, None, 0.0, None, None, None, None, None, None, 0)[0]
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


def test_a_gradient_of_the_gradient_is_that_of_the_formula() -> None:
    added = {"bias": torch.randn(5, 7), "sinks": torch.randn(HEADS), "scale": torch.rand(5, 1)}
    given = operands(length=5, keys=7) | added
    found = []
    for impl, dtype in (("triton", torch.float32), ("dense", torch.float64)):
        leaves = {name: leaf.to(DEVICE, dtype).requires_grad_() for name, leaf in given.items()}
        first = torch.autograd.grad(total(leaves, impl), list(leaves.values()), create_graph=True)
        second = torch.autograd.grad(sum(g.square().sum() for g in first), list(leaves.values()))
        found.append(dict(zip(leaves, second, strict=True)))
    assert gradient_complaints(*found, torch.float32, length=7 * 7, logit=LOGIT, rows=HEADS * 5) == []


def test_sampled_rows_have_no_gradient() -> None:
    from sqrtdk.impl.gpu.operators import forward

    q, k, v = (t.to(DEVICE).requires_grad_() for t in operands(length=3).values())
    places = torch.tensor([0, 5, 9], device=DEVICE)
    output = forward(q, k, v, 0.25, None, 0.0, None, None, None, 0, None, places, 0)[0]
    with pytest.raises(UnsupportedError, match="sampled rows"):
        output.sum().backward()


def test_torch_s_own_check_of_the_backward_operators_passes() -> None:
    from sqrtdk.impl.gpu import gradients as operators

    q, k, v = (t.to(DEVICE) for t in operands(length=5, keys=7).values())
    rows = torch.rand(1, HEADS, 5, device=DEVICE)
    bias = torch.randn(1, HEADS, 1, 7, device=DEVICE)
    scale = torch.rand(1, HEADS, 5, 1, device=DEVICE)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    numbers = (q, q, k, v, rows + 9, rows, rows, 1.0, scale, 2.0, bias, None, 3, None, True, True)
    for operator, given in ((operators.backward, numbers), (operators.constant, (q, q, rows, rows, rows))):
        assert set(torch.library.opcheck(operator, given, test_utils=tests).values()) == {"SUCCESS"}
