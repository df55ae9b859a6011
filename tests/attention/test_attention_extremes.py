"""Numbers near the ends of the dtype's range: a mean that is finite stays so, and what overflows says so."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import AuxRequest
from sqrtdk.errors import UnsupportedError
from sqrtdk.impl.extremes import largest
from sqrtdk.stats import RowStats, row_stats
from tests.attention.calls import close, every, refuses, with_aux
from tests.attention.oracle import attend
from tests.tolerances import allowed

OVERFLOW = "can't run this call: .* or q and k may overflow"
NOT_FLOAT64 = {"cpu": "it takes float32, bfloat16, float16"}
LOW = {dtype: torch.finfo(dtype).min for dtype in (torch.float32, torch.float64)}
wide = pytest.mark.parametrize("dtype", LOW, ids=lambda dtype: str(dtype)[6:])


def exact_mean(logits: Tensor) -> Tensor:
    """(..., S) to (...), in rational numbers: a sum of float64 may leave float64."""
    rows = logits.double().reshape(-1, logits.shape[-1]).tolist()
    means = [float(sum(map(Fraction, row)) / len(row)) for row in rows]
    return torch.tensor(means, dtype=torch.float64).reshape(logits.shape[:-1])


def check_mean(mean: Tensor, logits: Tensor) -> None:
    """The rounding of a mean is relative to the largest of its logits."""
    error = (mean.double() * 0.5 - exact_mean(logits) * 0.5).abs().max().item()
    share = error / logits.abs().max().item() * 2.0
    assert share <= allowed(mean.dtype, length=logits.shape[-1], logit=0.0, magnitude=1.0), share


def far_logits(dtype: torch.dtype, keys: int = 40) -> dict[str, Tensor]:
    """Rows whose sum leaves the dtype; in the last two also the distance of two logits does."""
    z = torch.randn(6, keys, dtype=torch.float64).to(dtype)
    some = torch.zeros(keys, dtype=torch.bool)
    some[::3] = True
    return {
        "a third of them lowest": z.masked_fill(some, LOW[dtype]),
        "all but one lowest": z.masked_fill(torch.arange(keys) > 0, LOW[dtype]),
        "all lowest": torch.full_like(z, LOW[dtype]),
        "all highest": torch.full_like(z, -LOW[dtype]),
        "lowest and highest": z.masked_fill(some, LOW[dtype]).masked_fill(some.roll(1), -LOW[dtype]),
        "two thirds lowest, the others highest": torch.full_like(z, LOW[dtype]).masked_fill(some, -LOW[dtype]),
    }


@wide
@pytest.mark.parametrize("name", far_logits(torch.float32))
def test_the_mean_of_rows_is_finite_where_it_is(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = far_logits(dtype)[name]
    rows = row_stats(logits)
    check_mean(rows.mean, logits)
    spread = logits.max() - logits.min()
    assert bool((rows.variance == (0.0 if spread == 0 else math.inf)).all())
    blocks = row_stats(logits.unflatten(1, (4, 10)).transpose(0, 1).contiguous())
    check_mean(blocks.merged(0).mean, logits)
    left, right = row_stats(logits[:, :7].contiguous()), row_stats(logits[:, 7:].contiguous())
    check_mean(left.merge(right).mean, logits)
    assert bool((left.merge(right).variance == rows.variance).all())
    monkeypatch.setattr("sqrtdk.stats._sweep.MOST_TILE_KEYS", 1024)
    monkeypatch.setattr("sqrtdk.stats._sweep.TILE", 2**21)
    check_mean(row_stats(logits).mean, logits)


def test_the_variance_is_infinite_only_where_its_sum_is() -> None:
    """Logits of +-1e18: squares of 1e36, forty of which float32 holds; of +-1e19 it does not."""
    signs = torch.ones(1, 40).masked_fill(torch.arange(40) % 2 == 0, -1.0)
    assert row_stats(signs * 1e18).variance.item() == pytest.approx(1e36, rel=1e-5)
    assert row_stats(signs * 1e19).variance.item() == math.inf


def test_rows_of_blocks_without_a_key_merge_with_far_ones() -> None:
    far = row_stats(torch.tensor([[torch.finfo(torch.float32).min, 1.0]]))
    for merged in (far.merge(RowStats.empty((1,))), RowStats.empty((1,)).merge(far)):
        assert torch.equal(merged.mean, far.mean)
        assert bool((merged.m2 == math.inf).all())


@every
@wide
@pytest.mark.parametrize("how", ["attn_mask", "bias"])
@pytest.mark.parametrize("name", far_logits(torch.float32))
def test_the_mean_beside_a_call_with_such_a_bias(name: str, how: str, impl: str, dtype: torch.dtype) -> None:
    bias = far_logits(dtype)[name]
    q, k, v = (torch.randn(1, 2, length, 8, dtype=torch.float64).to(dtype) for length in (6, 40, 40))
    logits = q @ k.mT * 8**-0.5 + bias

    def call() -> tuple[Tensor, Any]:
        return with_aux(q, k, v, impl=impl, **{how: bias})

    if refuses(impl, call, NOT_FLOAT64 if dtype == torch.float64 else {}):
        return
    _, aux = call()
    check_mean(aux.mean, logits)
    rows = sqrtdk.measure(q, k, bias=bias)
    check_mean(rows.mean, logits)
    assert not aux.variance.isnan().any()
    assert torch.equal(aux.variance.isinf(), (logits.amax(-1) > logits.amin(-1)))


@every
@pytest.mark.parametrize("size", [3e30, 3e35])
def test_equal_logits_have_no_variance_whatever_their_size(impl: str, size: float) -> None:
    q, k, v = torch.zeros(1, 2, 6, 8), torch.randn(1, 2, 41, 8), torch.randn(1, 2, 41, 8)
    _, aux = with_aux(q, k, v, bias=torch.full((6, 41), size), impl=impl)
    assert bool((aux.variance == 0.0).all())
    assert bool((aux.mean == torch.tensor(size)).all())


@every
def test_a_row_whose_only_key_overflowed_has_no_entropy(impl: str) -> None:
    """Its weights are NaN, so is what follows of them; a row that sees nothing has weights of 0 and entropy 0."""
    q, k = torch.full((1, 2, 1, 4), 1e30), torch.full((1, 2, 40, 4), -1e30)

    def call() -> tuple[Tensor, Any]:
        return with_aux(q, k, k.sign(), window=(2, 0), impl=impl)

    if refuses(impl, call, {"cpu": OVERFLOW, "fused": OVERFLOW}):
        return
    output, aux = call()
    assert output.isnan().all()
    assert aux.entropy_nats.isnan().all()
    assert aux.max_logit.eq(-math.inf).all()


@every
def test_no_entropy_of_a_key_of_minus_infinity(impl: str) -> None:
    q = torch.full((1, 2, 1, 4), -math.inf)
    k = torch.ones(1, 2, 40, 4)
    _, aux = with_aux(q, k, k, impl=impl)
    assert aux.entropy_nats.isnan().all()
    assert aux.lse.eq(-math.inf).all()


@every
@pytest.mark.parametrize("how", ["attn_mask", "bias"])
@pytest.mark.parametrize("keys", [9, 40])
def test_a_float32_mask_beside_float64_is_read_as_what_it_is(impl: str, how: str, keys: int) -> None:
    """Torch's CPU kernel reads its memory as float64."""
    q, k, v = (torch.randn(1, 2, length, 8, dtype=torch.float64) for length in (5, keys, keys))
    mask = torch.randn(5, keys)

    def call() -> Tensor:
        return sqrtdk.attention(q, k, v, impl=impl, **{how: mask})

    if refuses(impl, call, NOT_FLOAT64):
        return
    close(call(), attend(q, k, v, scale=8**-0.5, bias=mask.double()).output)


@every
def test_half_queries_that_a_scale_takes_out_of_their_range(impl: str) -> None:
    q, k, v = (torch.randn(1, 2, length, 8).half() for length in (5, 40, 40))
    q[..., 0, :] = 6e4
    scale = torch.full((5, 1), 2.0)
    for request in (None, AuxRequest(lse=True)):

        def call(request: AuxRequest | None = request) -> Any:
            return sqrtdk.attention(q, k, v, scale=scale, impl=impl, return_aux=request)

        if not refuses(impl, call, {"cpu": OVERFLOW, "fused": OVERFLOW}):
            output = call() if request is None else call()[0]
            assert output.isfinite().all()


INFINITE = ("+inf in a key", "-inf in a key", "+inf in a query", "rows of -inf", "rows that overflow", "NaN beside it")


def infinite(name: str, dtype: torch.dtype, rows: int, keys: int) -> list[Tensor]:
    """q, k, v with an infinite logit; `rows of -inf` is where all keys of a row have it."""
    q, k, v = (torch.randn(1, 2, n, 16).to(dtype) for n in (rows, keys, keys))
    if "key" in name:
        k[0, 0, keys // 2, 3] = float(name[:4])
    elif name == "+inf in a query":
        q[0, 0, rows // 2, 3] = math.inf
    elif name == "NaN beside it":
        k[0, 0, 1, 3], k[0, 1, keys // 2, 3] = math.inf, math.nan
    else:
        k = k.abs() + 1.0
        q[0, 0, 0] = -math.inf if name == "rows of -inf" else torch.finfo(dtype).min
    return [q, k, v]


@pytest.mark.sampled(48)
@every
@pytest.mark.parametrize("name", INFINITE)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("rows", "keys"), [(40, 40), (1, 300)])
def test_infinite_logits_of_visible_keys_give_nan(
    impl: str, name: str, dtype: torch.dtype, rows: int, keys: int
) -> None:
    """Torch's CPU kernels give 0 for some of these rows, in half types for all."""
    q, k, v = infinite(name, dtype, rows, keys)
    expected = attend(q, k, v, scale=0.25).output.isnan()
    if name == "rows that overflow" and dtype in (torch.float32, torch.bfloat16):  # where float64 does not
        expected[0, 0, 0] = True
    for options in ({}, {"return_aux": True}, {"window": (400, 400)}):
        try:
            output = sqrtdk.attention(q, k, v, impl=impl, **options)
        except UnsupportedError:
            if impl not in ("fused", "cpu"):
                raise
            continue
        output = output[0] if isinstance(output, tuple) else output
        assert torch.equal(output.isnan(), expected), options


LAID: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda t: t.mT,
    "permuted": lambda t: t.permute(1, 2, 0),
    "every second number": lambda t: t[..., ::2],
    "repeated": lambda t: t[:, :1].expand(2, 3, 4, 5),
    "repeated, transposed": lambda t: t[..., :1].expand(3, 4, 5).mT,
    "one number": lambda t: t[0, 0, 0].expand(4, 5),
}


@pytest.mark.parametrize("name", LAID)
def test_the_largest_number_is_found_wherever_it_lies(name: str) -> None:
    for place in range(60):
        tensor = torch.randn(60)
        tensor[place] = -7.0
        laid = LAID[name](tensor.view(3, 4, 5))
        assert largest(laid) == laid.abs().max().item()
        tensor[place] = math.nan
        assert math.isinf(largest(laid)) == laid.isnan().any().item()
