"""Where rows stand among the keys: windows and ALiBi counted from the last key; and the output's order in memory."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor

import sqrtdk
from sqrtdk import nn, positions
from sqrtdk._resolve import resolve_arguments
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from tests.attention.calls import close, close_gradients, every
from tests.attention.oracle import attend

SIZES = [(8, 24), (24, 8), (7, 7), (1, 130)]
WINDOWS = [(13, 5), (7, 0), (0, 3), (None, 2), (4, None)]


def qkv(length: int, keys: int) -> list[Tensor]:
    return [torch.randn(2, heads, n, 16).requires_grad_() for heads, n in ((4, length), (2, keys), (2, keys))]


def distances(length: int, keys: int) -> Tensor:
    """I - j, the last row at the last key."""
    return torch.arange(length)[:, None] + (keys - length) - torch.arange(keys)


@every
@pytest.mark.sampled(20)
@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize(("length", "keys"), SIZES)
def test_a_window_that_is_not_causal_counts_from_the_last_key(
    impl: str, window: tuple[int | None, int | None], length: int, keys: int
) -> None:
    """flash-attn's and x-transformers' rule: keys i + S - L - left to i + S - L + right."""
    distance = distances(length, keys)
    left, right = (10**6 if side is None else side for side in window)
    seen = (distance <= left) & (distance >= -right)
    given = qkv(length, keys)
    options = {"window": window, "window_lower_right": True}
    output = sqrtdk.attention(*given, enable_gqa=True, impl=impl, **options)
    expected = attend(*given, scale=0.25, attn_mask=seen).output
    close(output, expected)
    cotangent = torch.randn(output.shape)
    found = torch.autograd.grad(output, given, cotangent)
    close_gradients(found, torch.autograd.grad(expected, given, cotangent.double()), rows=2 * 4 * length)
    assert torch.equal(sqrtdk.measure(*given[:2], enable_gqa=True, **options).keys[0, 0], seen.sum(-1).float())


@every
def test_position_terms_count_from_there_too(impl: str) -> None:
    given, bias = qkv(8, 24), positions.alibi(4, symmetric=True)
    output = sqrtdk.attention(*given, enable_gqa=True, impl=impl, bias=bias, window_lower_right=True)
    slopes = torch.tensor(positions.alibi_slopes(4), dtype=torch.float64)[:, None, None]
    close(output, attend(*given, scale=0.25, bias=-slopes * distances(8, 24).abs()).output)


def test_it_is_refused_beside_a_causal_mask_from_the_first_key() -> None:
    given = qkv(8, 24)
    with pytest.raises(InvalidValueError, match="is_causal the first row") as caught:
        sqrtdk.attention(*given, enable_gqa=True, is_causal=True, window=(3, 0), window_lower_right=True)
    assert "causal_lower_right=True" in str(caught.value.hint)
    options: dict[str, Any] = {"enable_gqa": True, "causal_lower_right": True, "window": (3, 0)}
    both = sqrtdk.attention(*given, is_causal=True, window_lower_right=True, **options)
    assert torch.equal(both, sqrtdk.attention(*given, **options))


def test_other_libraries_names_lead_to_it() -> None:
    for name in ("window_size", "max_attend_past"):
        with pytest.raises(InvalidTypeError) as caught:
            sqrtdk.attention(*qkv(8, 24), **{name: (3, 0)})
        assert "window_lower_right=True" in str(caught.value.hint)
    with pytest.raises(InvalidValueError) as refused:
        sqrtdk.attention(*qkv(8, 24), enable_gqa=True, window=3)
    assert "window_lower_right=True" in str(refused.value.hint)


# ALiBi by its name


@every
@pytest.mark.parametrize(("length", "keys"), SIZES)
def test_alibi_lowers_keys_on_either_side_in_a_call_that_is_not_causal(impl: str, length: int, keys: int) -> None:
    given = qkv(length, keys)
    slopes = torch.tensor(positions.alibi_slopes(4), dtype=torch.float64)[:, None, None]
    far = -slopes * distances(length, keys).abs()
    for window in (None, (9, 9)):
        output = sqrtdk.attention(
            *given, enable_gqa=True, impl=impl, bias="alibi", window=window, window_lower_right=window is not None
        )
        seen = None if window is None else distances(length, keys).abs() <= 9
        close(output, attend(*given, scale=0.25, bias=far, attn_mask=seen).output)


@every
def test_alibi_of_causal_calls_stays_what_it_was(impl: str) -> None:
    slopes = torch.tensor(positions.alibi_slopes(4), dtype=torch.float64)[:, None, None]
    for length, keys in SIZES:
        given = qkv(length, keys)
        signed = -slopes * distances(length, keys)
        for mask in ({"is_causal": True}, {"causal_lower_right": True}):
            output = sqrtdk.attention(*given, enable_gqa=True, impl=impl, bias="alibi", **mask)
            close(output, attend(*given, scale=0.25, bias=signed, **mask).output)
        if keys >= length:  # a mask of a tensor tells no call that it is causal
            output = sqrtdk.attention(*given, distances(length, keys) >= 0, enable_gqa=True, impl=impl, bias="alibi")
            close(output, attend(*given, scale=0.25, bias=signed, causal_lower_right=True).output)


def test_a_module_s_alibi_is_that_of_each_call() -> None:
    module = nn.MultiHeadAttention(16, 4, batch_first=True, position="alibi")
    both = nn.MultiHeadAttention(16, 4, batch_first=True, position=positions.alibi(4, symmetric=True))
    signed = nn.MultiHeadAttention(16, 4, batch_first=True, position=positions.alibi(4))
    for other in (both, signed):
        other.load_state_dict(module.state_dict())
    x = torch.randn(2, 9, 16)
    assert torch.equal(module(x, x, x)[0], both(x, x, x)[0])
    assert torch.equal(module(x, x, x, is_causal=True)[0], signed(x, x, x, is_causal=True)[0])


# order in memory

CALLS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "softcap": {"softcap": 5.0},
    "statistics": {"return_aux": True},
    "weights": {"return_weights": True},
    "window": {"window": (2, 2)},
    "dropout": {"dropout_p": 0.5},
}


def order(tensor: Tensor) -> list[int]:
    return sorted(range(tensor.ndim), key=tensor.stride, reverse=True)


@every
@pytest.mark.parametrize("name", CALLS)
def test_the_output_has_the_query_s_order_in_memory(impl: str, name: str) -> None:
    if (name == "weights" and impl != "dense") or (name, impl) == ("softcap", "fused"):
        impl = "auto"
    sizes = (2, 4, 6, 8)
    key = torch.randn(2, 4, 9, 8)
    for dims in permutations(range(4)):
        query = torch.randn([sizes[dim] for dim in dims]).permute([dims.index(dim) for dim in range(4)])
        found = sqrtdk.attention(query, key, key, impl=impl, **CALLS[name])
        output = found[0] if isinstance(found, tuple) else found
        assert order(output) == order(query), dims


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0}], ids=str)
def test_a_query_without_an_order_of_its_own_copies_nothing(options: dict[str, Any]) -> None:
    query, key = torch.randn(1, 6, 8).expand(2, 4, 6, 8), torch.randn(2, 4, 9, 8)
    assert sqrtdk.attention(query, key, key, **options).shape == (2, 4, 6, 8)
    one = torch.randn(2, 1, 4, 8).transpose(1, 2)  # a single row stands in both orders
    assert sqrtdk.attention(one, key, key, **options).is_contiguous()


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
@pytest.mark.parametrize("dynamic", [False, pytest.param(True, marks=pytest.mark.full)])
def test_while_compiling_too(dynamic: bool) -> None:
    query = torch.randn(2, 8, 4, 16).transpose(1, 2)
    key = torch.randn(2, 4, 24, 16)
    options: dict[str, Any] = {"bias": "alibi", "window": (3, 2), "window_lower_right": True}
    torch.compiler.reset()
    compiled = torch.compile(
        lambda q, k: sqrtdk.attention(q, k, k, **options), fullgraph=True, backend="aot_eager", dynamic=dynamic
    )
    output, expected = compiled(query, key), sqrtdk.attention(query, key, key, **options)
    assert output.stride() == expected.stride() == query.stride()
    close(output, expected)


@pytest.mark.parametrize("window", [None, (3, None), (0, 2), (None, 4), (2, 0)], ids=str)
@pytest.mark.parametrize("lower_right", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_keys_of_a_band_are_counted_as_its_mask_shows_them(
    is_causal: bool, lower_right: bool, window: tuple[int | None, int | None] | None
) -> None:
    for rows, keys in ((1, 9), (5, 12), (9, 4)):
        q, k = torch.randn(1, 2, rows, 4), torch.randn(1, 2, keys, 4)
        call = resolve_arguments(q, k, k, is_causal=is_causal, causal_lower_right=lower_right, window=window)
        mask = call.visible_mask(0, rows)
        counted = torch.full((1, 1), float(keys)) if mask is None else mask.sum(-1, keepdim=True).float()
        assert torch.equal(call.visible_keys(), counted)
