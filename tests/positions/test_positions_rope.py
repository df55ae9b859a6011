"""Rotations of q and k against loops over positions and pairs of channels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sqrtdk.positions import (
    apply_rope,
    rope,
    rope_frequencies,
    rope_tables,
    yarn,
    yarn_attention_factor,
    yarn_frequencies,
)
from tests.positions import positions_oracle as oracle
from tests.tolerances import allowed, complaint

E, L, S = 12, 4, 6
LAYOUTS = ["half", "interleaved"]
YARN = {"factor": 6.0, "original_length": 90, "base": 400.0}


def frequencies(dim: int, base: float = 10000.0) -> list[float]:
    return [base ** (-2 * c / dim) for c in range(dim // 2)]


def turned(x: Tensor, at: list[float], w: list[float], layout: str, amplitude: float = 1.0) -> Tensor:
    rows = x.double().reshape(-1, len(at), x.shape[-1])
    out = [[oracle.rotated(r.tolist(), p, w, layout, amplitude) for p, r in zip(at, m, strict=True)] for m in rows]
    return torch.tensor(out, dtype=torch.float64).view(x.shape)


def inputs(dtype: torch.dtype = torch.float64, rows: int = L, columns: int = S) -> tuple[Tensor, Tensor]:
    """More query heads than key heads."""
    return torch.randn(2, 4, rows, E, dtype=dtype), torch.randn(2, 2, columns, E, dtype=dtype)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotary_dim", [None, 8, 2])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_law(layout: str, rotary_dim: int | None, dtype: torch.dtype) -> None:
    q, k = inputs(dtype)
    w = frequencies(rotary_dim or E, 50.0)
    at, key_at = torch.tensor([5, 9, 2, 70]), torch.arange(3, 3 + S)
    new = rope(q, k, base=50.0, layout=layout, positions=at, key_positions=key_at, rotary_dim=rotary_dim)
    for result, x, where in zip(new, (q, k), (at, key_at), strict=True):
        assert result.dtype == dtype
        assert complaint(result, turned(x, where.tolist(), w, layout), dtype, length=2, logit=70.0) is None


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_types_are_rounded_once(layout: str, dtype: torch.dtype) -> None:
    q, k = inputs(dtype, 64, 64)
    for result, x in zip(rope(q, k, layout=layout), (q, k), strict=True):
        assert result.dtype == dtype
        expected = turned(x, list(range(64)), frequencies(E), layout)
        rounding = expected.abs() * torch.finfo(dtype).eps / 2
        beside = allowed(torch.float32, length=2, logit=64.0, magnitude=expected.abs().max().item())
        assert ((result.double() - expected).abs() <= rounding + beside).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rotate", [rope, lambda q, k, **options: yarn(q, k, **YARN, **options)], ids=["rope", "yarn"])
def test_products_depend_on_distances_alone(layout: str, rotate: Callable[..., tuple[Tensor, Tensor]]) -> None:
    q, k = torch.randn(3, L, E).double(), torch.randn(3, S, E).double()
    products = []
    for shift in (0, 1000):
        at = {"positions": torch.arange(L) + shift, "key_positions": torch.arange(S) + shift}
        new_q, new_k = rotate(q, k, layout=layout, **at)
        products.append(new_q @ new_k.transpose(-1, -2))
    assert complaint(products[1], products[0], torch.float64, length=E, logit=1000.0) is None
    assert not torch.allclose(products[0], q @ k.transpose(-1, -2))


def test_layouts_are_one_rotation_of_channels_in_another_order() -> None:
    q, k = inputs()
    order = torch.arange(E).view(2, -1).T.flatten()
    half = rope(q, k, layout="half")
    interleaved = rope(q[..., order], k[..., order], layout="interleaved")
    for a, b in zip(half, interleaved, strict=True):
        torch.testing.assert_close(a[..., order], b)


def test_positions_not_given() -> None:
    """Rows and keys both start at 0; keys as many as rows stand where the rows do, others from 0 on."""
    q, k = inputs()
    for a, b in zip(rope(q, k), rope(q, k, positions=torch.arange(L), key_positions=torch.arange(S)), strict=True):
        assert torch.equal(a, b)
    at = torch.arange(S - L, S)
    new = rope(q, k, positions=at)
    assert torch.equal(new[1], rope(q, k)[1])
    assert torch.equal(new[0], rope(q, q, positions=at, key_positions=torch.arange(L))[0])
    same = rope(q, k[..., :L, :], positions=at)[1]
    expected = turned(k[..., :L, :], at.tolist(), frequencies(E), "half")
    assert complaint(same, expected, torch.float64, length=2, logit=S) is None


def test_a_cache_grows_row_by_row() -> None:
    q, k = torch.randn(2, 4, S, E).double(), torch.randn(2, 4, S, E).double()
    whole = rope(q, k)
    steps = [rope(q[..., t : t + 1, :], k[..., t : t + 1, :], positions=torch.tensor([t])) for t in range(S)]
    for side in (0, 1):
        torch.testing.assert_close(torch.cat([step[side] for step in steps], -2), whole[side])


def test_each_batch_at_its_own_positions() -> None:
    q, k = inputs()
    at = torch.tensor([[0, 1, 2, 3], [8, 9, 30, 31]])
    key_at = torch.stack([torch.arange(S), torch.arange(S) + 5])
    together = rope(q, k, positions=at, key_positions=key_at)
    for b in (0, 1):
        apart = rope(q[b], k[b], positions=at[b], key_positions=key_at[b])
        for side in (0, 1):
            torch.testing.assert_close(together[side][b], apart[side])


def test_interpolated_positions() -> None:
    q, k = inputs()
    at = [0.0, 0.25, 0.5, 7.75]
    result = rope(q, k, positions=torch.tensor(at))[0]
    assert complaint(result, turned(q, at, frequencies(E), "half"), torch.float64, length=2, logit=8.0) is None


@pytest.mark.parametrize("options", [{}, {"beta_fast": 9.0, "beta_slow": 0.5}, {"truncate": False}], ids=str)
@pytest.mark.parametrize("length", [90, 3000, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_frequencies_of_yarn(options: dict[str, float], length: int, dtype: torch.dtype) -> None:
    fast, slow = options.get("beta_fast", 32.0), options.get("beta_slow", 1.0)
    expected = oracle.yarn_frequencies(32, 6.0, length, 400.0, fast, slow, options.get("truncate", True))
    ours = yarn_frequencies(32, factor=6.0, original_length=length, base=400.0, dtype=dtype, **options)
    assert ours.dtype == dtype
    assert complaint(ours, torch.tensor(expected, dtype=torch.float64), dtype, length=4, logit=0.0) is None


def test_yarn_keeps_the_fast_and_divides_the_slow() -> None:
    plain = rope_frequencies(64, dtype=torch.float64)
    ours = yarn_frequencies(64, factor=8.0, original_length=4096, dtype=torch.float64)
    turns = 4096 * plain / (2 * torch.pi)
    torch.testing.assert_close(ours[turns > 40], plain[turns > 40])
    torch.testing.assert_close(ours[turns < 0.7], plain[turns < 0.7] / 8.0)
    between = (turns < 25) & (turns > 2)
    assert between.any()
    assert ((ours < plain) & (ours > plain / 8.0))[between].all()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_law_of_yarn(layout: str) -> None:
    """The factor is on both q and k, and only on channels that turn."""
    q, k = inputs()
    w = oracle.yarn_frequencies(8, 6.0, 90, 400.0, 32.0, 1.0, True)
    assert yarn_attention_factor(6.0) == pytest.approx(1.179175946922805, rel=1e-15)
    for result, x in zip(yarn(q, k, layout=layout, rotary_dim=8, **YARN), (q, k), strict=True):
        at = list(range(x.shape[-2]))
        expected = turned(x, at, w, layout, 1.179175946922805)
        assert complaint(result, expected, torch.float64, length=2, logit=6.0) is None
        assert torch.equal(result[..., 8:], x[..., 8:])
    own = yarn(q, k, layout=layout, attention_factor=3.0, **YARN)[0]
    torch.testing.assert_close(own.norm(), 3.0 * q.norm())


def test_a_context_that_is_not_longer() -> None:
    q, k = inputs()
    for a, b in zip(yarn(q, k, factor=1.0, original_length=90), rope(q, k), strict=True):
        torch.testing.assert_close(a, b)
    assert yarn_attention_factor(0.5) == 1.0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout: str) -> None:
    q, k = (x.requires_grad_() for x in inputs())
    assert torch.autograd.gradcheck(lambda q, k: rope(q, k, layout=layout, rotary_dim=8), (q, k))
    assert torch.autograd.gradcheck(lambda q, k: yarn(q, k, layout=layout, **YARN), (q, k))
    w = rope_frequencies(E, dtype=torch.float64).requires_grad_()
    x = q[0].detach()
    assert torch.autograd.gradcheck(lambda w: apply_rope(x, *rope_tables(torch.arange(L), w), layout), (w,))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_empty_compiled_mapped(layout: str) -> None:
    for shape in ((2, 4, 0, E), (0, 4, L, E), (L, E)):
        x = torch.randn(shape)
        assert all(y.shape == shape for y in rope(x, x, layout=layout))
    x = torch.empty(2, 4, L, E, device="meta", dtype=torch.bfloat16)
    assert all(y.device.type == "meta" and y.dtype == x.dtype for y in yarn(x, x, layout=layout, **YARN))
    q, k = inputs(torch.float32)
    torch.compiler.reset()
    for rotate in (lambda q, k: rope(q, k, layout=layout), lambda q, k: yarn(q, k, layout=layout, **YARN)):
        compiled = torch.compile(rotate, fullgraph=True, backend="aot_eager")
        for variant in (compiled, torch.vmap(rotate)):
            for a, b in zip(variant(q, k), rotate(q, k), strict=True):
                torch.testing.assert_close(a, b)
