"""Laws that hold whatever the numbers: of shifts, scales, hidden and permuted keys, sinks, batches; and derivatives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import sqrtdk
from sqrtdk import positions, scores
from sqrtdk.impl import rows as tiled_module
from tests.tolerances import complaint

IMPLEMENTATIONS = ("auto", "dense", "fused", "tiled")
WITHOUT_TORCH = ("auto", "dense", "tiled")
every = pytest.mark.parametrize("impl", IMPLEMENTATIONS)
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "lower right": {"causal_lower_right": True},
    "window": {"window": (3, 1)},
}
masked = pytest.mark.parametrize("mask", MASKS)


def qkv(length: int = 7, keys: int = 9) -> list[Tensor]:
    return [torch.randn(2, 2, n, 6, dtype=torch.float64) for n in (length, keys, keys)]


def run(*args: Any, **kwargs: Any) -> tuple[Tensor, dict[str, Tensor]]:
    output, aux = sqrtdk.attention(*args, return_aux=sqrtdk.AuxRequest.all(), **kwargs)
    return output, aux._asdict()


def same(actual: Tensor, expected: Tensor, logit: float = 100.0) -> None:
    found = complaint(actual.detach(), expected.detach(), torch.float64, length=9, logit=logit, magnitude=1.0)
    assert found is None, found


MOVED = ("lse", "max_logit", "min_logit", "mean")


@every
@settings(max_examples=8, deadline=None)
@given(mask=st.sampled_from(list(MASKS)), size=st.floats(0.0, 500.0))
def test_a_constant_on_every_logit_of_a_row_moves_the_logits_alone(impl: str, mask: str, size: float) -> None:
    q, k, v = qkv()
    shift = size * torch.randn(2, 2, 7, 1, dtype=torch.float64)
    output, aux = run(q, k, v, impl=impl, **MASKS[mask])
    moved, moved_aux = run(q, k, v, bias=shift, impl=impl, **MASKS[mask])
    same(moved, output, logit=1e4)
    for name, statistic in aux.items():
        same(moved_aux[name], statistic + shift[..., 0] if name in MOVED else statistic, logit=1e4)


SIDE = st.none() | st.integers(-1, 4)


@every
@settings(max_examples=12, deadline=None)
@given(
    length=st.integers(0, 8),
    keys=st.integers(0, 10),
    window=st.none() | st.tuples(SIDE, SIDE),
    causal=st.booleans(),
    lower_right=st.booleans(),
)
def test_positions_show_each_row_an_interval_of_keys(
    impl: str, length: int, keys: int, window: tuple[int | None, int | None] | None, causal: bool, lower_right: bool
) -> None:
    """A row is what it is in a call of its own on these keys, and zero where there are none."""
    q, k, v = qkv(length, keys)
    output, aux = run(q, k, v, is_causal=causal, causal_lower_right=lower_right, window=window, impl=impl)
    assert output.shape == q.shape
    assert all(statistic.shape == (2, 2, length) for statistic in aux.values())
    left, right = (None if side in (None, -1) else side for side in window or (None, None))
    for i in range(length):
        at = i + (keys - length if lower_right else 0)
        first = 0 if left is None else max(0, at - left)
        behind = [keys, *([at + 1] if causal or lower_right else []), *([] if right is None else [at + right + 1])]
        seen = slice(first, max(first, *[min(behind)]))
        alone, alone_aux = run(q[..., i : i + 1, :], k[..., seen, :], v[..., seen, :], impl="dense")
        same(output[..., i : i + 1, :], alone)
        assert bool((aux["keys"][..., i] == len(range(keys)[seen])).all())
        for name, statistic in alone_aux.items():
            same(aux[name][..., i : i + 1], statistic)
        if not len(range(keys)[seen]):
            assert not output[..., i, :].any()


@every
@masked
@pytest.mark.parametrize("scale", [2.0, -0.7])
def test_a_scale_is_a_factor_on_q_or_on_k(impl: str, mask: str, scale: float) -> None:
    q, k, v = qkv()
    given = {"impl": impl, **MASKS[mask]}
    output, aux = run(q, k, v, scale=scale, **given)
    tensor = torch.full((2, 1, 1), scale, dtype=torch.float64)
    others = [(q * scale, k, 1.0), (q, k * scale, 1.0), (q * 2, k / 2, scale), (q, k, tensor)]
    for other_q, other_k, other_scale in others:
        folded, folded_aux = run(other_q, other_k, v, scale=other_scale, **given)
        same(folded, output)
        for name, statistic in aux.items():
            same(folded_aux[name], statistic)


@every
def test_the_scale_multiplies_neither_bias_nor_mask(impl: str) -> None:
    q, k, v = qkv()
    bias, mask = torch.randn(7, 9, dtype=torch.float64), torch.randn(7, 9, dtype=torch.float64)
    output, _ = run(q, k, v, mask, scale=0.2, bias=bias, impl=impl)
    folded, _ = run(q * 0.2, k, v, mask + bias, scale=1.0, impl=impl)
    same(folded, output)
    uniform, _ = run(q, k, v, mask, scale=0.0, bias=bias, impl=impl)
    same(uniform, torch.softmax(mask + bias, -1) @ v)


@every
def test_a_hidden_key_is_a_key_that_is_not_there(impl: str) -> None:
    q, k, v = qkv()
    visible = torch.ones(9, dtype=torch.bool)
    visible[[0, 4, 8]] = False
    hidden, hidden_aux = run(q, k, v, visible, impl=impl)
    dropped, dropped_aux = run(q, k[..., visible, :], v[..., visible, :], impl=impl)
    same(hidden, dropped)
    for name, statistic in dropped_aux.items():
        same(hidden_aux[name], statistic)


@every
def test_order_of_keys_does_not_matter(impl: str) -> None:
    q, k, v = qkv()
    order = torch.randperm(9)
    mask = torch.randn(7, 9, dtype=torch.float64)
    output, aux = run(q, k, v, mask, impl=impl)
    permuted, permuted_aux = run(q, k[..., order, :], v[..., order, :], mask[..., order], impl=impl)
    same(permuted, output)
    for name, statistic in aux.items():
        same(permuted_aux[name], statistic)


@every
@masked
def test_constant_values_come_back_and_values_are_linear(impl: str, mask: str) -> None:
    q, k, v = qkv()
    other = torch.randn_like(v)
    given = {"impl": impl, **MASKS[mask]}
    output, aux = run(q, k, v, **given)
    sees = (aux["keys"] > 0)[..., None].double()
    same(run(q, k, torch.full_like(v, 3.0), **given)[0], 3.0 * sees.expand_as(output))
    same(run(q, k, 2.0 * v - other, **given)[0], 2.0 * output - run(q, k, other, **given)[0])


@every
def test_heads_and_batch_are_independent(impl: str) -> None:
    q, k, v = qkv()
    whole, _ = run(q, k, v, is_causal=True, impl=impl)
    for b in range(2):
        for h in range(2):
            one, _ = run(*(t[b : b + 1, h : h + 1] for t in (q, k, v)), is_causal=True, impl=impl)
            same(whole[b : b + 1, h : h + 1], one)


@every
def test_query_heads_share_their_neighbours_key_head(impl: str) -> None:
    _, k, v = qkv()
    q = torch.randn(2, 6, 7, 6, dtype=torch.float64)
    grouped, aux = run(q, k, v, enable_gqa=True, impl=impl)
    repeated, repeated_aux = run(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), impl=impl)
    same(grouped, repeated)
    for name, statistic in aux.items():
        same(repeated_aux[name], statistic)


@pytest.mark.parametrize("impl", WITHOUT_TORCH)
def test_a_sink_takes_its_share_of_the_weights(impl: str) -> None:
    q, k, v = qkv()
    sinks = torch.randn(2, dtype=torch.float64)
    plain, aux = run(q, k, v, impl=impl)
    sunk, sunk_aux = run(q, k, v, sinks=sinks, impl=impl)
    share = torch.exp(aux["lse"] - torch.logaddexp(aux["lse"], sinks[:, None]))
    same(sunk, plain * share[..., None])
    same(sunk_aux["lse"], torch.logaddexp(aux["lse"], sinks[:, None]))
    for name in ("max_logit", "min_logit", "mean", "variance", "keys"):
        same(sunk_aux[name], aux[name])


@pytest.mark.parametrize("impl", ["dense", "tiled"])
def test_sinks_of_rows_that_are_the_same_in_each_head_are_those_of_heads(
    impl: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled_module, "block_rows", lambda call: 3)
    q, k, v = qkv()
    sinks = torch.randn(2, dtype=torch.float64)
    of_heads, aux = run(q, k, v, sinks=sinks, impl=impl)
    for shape in [(2, 1, 1), (1, 2, q.shape[-2], 1)]:
        of_rows, row_aux = run(q, k, v, sinks=sinks[:, None, None].expand(shape), impl=impl)
        same(of_rows, of_heads)
        for name, statistic in aux.items():
            same(row_aux[name], statistic)


@pytest.mark.parametrize("impl", WITHOUT_TORCH)
def test_a_wide_softcap_is_none(impl: str) -> None:
    q, k, v = qkv()
    same(run(q, k, v, softcap=1e9, impl=impl)[0], run(q, k, v, impl=impl)[0])
    _, aux = run(100 * q, k, v, softcap=2.0, impl=impl)
    assert aux["max_logit"].max() <= 2.0
    assert aux["min_logit"].min() >= -2.0


@every
def test_statistics_bound_each_other(impl: str) -> None:
    q, k, v = qkv()
    _, aux = run(q, k, v, window=(2, 3), impl=impl)
    n = aux["keys"]
    assert (aux["max_logit"] <= aux["lse"] + 1e-12).all()
    assert (aux["lse"] <= aux["max_logit"] + n.log() + 1e-12).all()
    assert (aux["entropy_nats"] <= n.log() + 1e-12).all()
    assert (aux["collision"] >= 1 / n - 1e-12).all()
    assert (aux["peak"] <= aux["collision"].sqrt() + 1e-12).all()
    same(aux["peak"], torch.exp(aux["max_logit"] - aux["lse"]))


CALLS: dict[str, Any] = {
    "plain": lambda t: {},
    "causal": lambda t: {"is_causal": True},
    "scale tensor": lambda t: {"scale": t["scale"]},
    "bias and mask": lambda t: {"bias": t["bias"], "attn_mask": torch.ones(3, 4).triu().bool()},
    "softcap": lambda t: {"softcap": 2.0},
    "sinks": lambda t: {"sinks": t["sinks"]},
    "sinks of rows": lambda t: {"sinks": t["row_sinks"]},
    "distance": lambda t: {"score": scores.distance()},
    "laplace": lambda t: {"score": scores.laplace()},
    "alibi": lambda t: {"bias": positions.alibi(slopes=t["slopes"], symmetric=True)},
}


@pytest.mark.sampled(1)  # by finite differences, a second each
@pytest.mark.parametrize("impl", ["dense", "tiled"])
@pytest.mark.parametrize("name", CALLS)
def test_first_and_second_derivatives(name: str, impl: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled_module, "block_rows", lambda call: 2)
    sizes = {
        "q": (1, 2, 3, 2),
        "k": (1, 2, 4, 2),
        "v": (1, 2, 4, 2),
        "scale": (2, 1, 1),
        "bias": (3, 4),
        "sinks": (2,),
        "row_sinks": (1, 2, 3, 1),
        "slopes": (2,),
    }
    leaves = {n: torch.rand(size, dtype=torch.float64, requires_grad=True) for n, size in sizes.items()}
    request = sqrtdk.AuxRequest(lse=True, entropy_nats=True)

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t = dict(zip(sizes, tensors, strict=True))
        output, aux = sqrtdk.attention(t["q"], t["k"], t["v"], impl=impl, return_aux=request, **CALLS[name](t))
        unused = 0.0 * sum(x.sum() for x in tensors)
        return output + unused, aux.lse + unused, aux.entropy_nats + unused

    assert torch.autograd.gradcheck(call, tuple(leaves.values()))
    assert torch.autograd.gradgradcheck(call, tuple(leaves.values()))
