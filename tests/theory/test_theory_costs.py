"""FLOP against torch's counter, bytes against what real calls hold."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.theory import (
    attention_flops,
    attention_memory_bytes,
    kv_cache_bytes,
    multi_head_terms,
    projection_flops,
    visible_pairs,
)


class Held(TorchDispatchMode):
    """Bytes of the storages made under the mode that are alive, and their largest sum."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if not isinstance(leaf, Tensor):
                continue
            storage = leaf.untyped_storage()
            if storage._cdata in before or storage._cdata in self.known:
                continue
            self.known.add(storage._cdata)
            self.now += storage.nbytes()
            weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


def count(function: Any) -> tuple[int, Any]:
    with FlopCounterMode(display=False) as counter:
        result = function()
    return counter.get_total_flops(), result


@pytest.mark.parametrize("value_dim", [16, 24])
@pytest.mark.parametrize("is_causal", [False, True])
def test_flops_of_sdpa(value_dim: int, is_causal: bool) -> None:
    q, k = torch.randn(2, 6, 32, 16, requires_grad=True), torch.randn(2, 6, 40, 16, requires_grad=True)
    v = torch.randn(2, 6, 40, value_dim, requires_grad=True)
    with sdpa_kernel(SDPBackend.MATH):  # the CPU's fused kernel is unknown to the counter
        forward, out = count(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=is_causal))
        backward, _ = count(lambda: out.sum().backward())
    sizes = (2, 6, 32, 40, 16)
    assert forward == attention_flops(*sizes, value_head_dim=value_dim)
    assert forward + backward == attention_flops(*sizes, value_head_dim=value_dim, backward=True)


def test_flops_of_a_fused_backward_pass() -> None:
    q, k, v = (2, 6, 32, 16), (2, 6, 40, 16), (2, 6, 40, 24)
    fused = sdpa_backward_flop_count((2, 6, 32, 24), q, k, v)
    sizes = {"value_head_dim": 24}
    whole = attention_flops(2, 6, 32, 40, 16, backward=True, recompute=True, **sizes)
    assert fused == whole - attention_flops(2, 6, 32, 40, 16, **sizes)


@pytest.mark.parametrize("need_weights", [False, True])
def test_flops_of_a_layer(need_weights: bool) -> None:
    layer = nn.MultiheadAttention(32, 4, batch_first=True, kdim=24, vdim=20)
    q, k, v = (torch.randn(2, *size, requires_grad=True) for size in ((10, 32), (7, 24), (7, 20)))
    with sdpa_kernel(SDPBackend.MATH):
        forward, out = count(lambda: layer(q, k, v, need_weights=need_weights)[0])
        backward, _ = count(lambda: out.sum().backward())
    sizes = {"key_len": 7, "kdim": 24, "vdim": 20}
    assert forward == attention_flops(2, 4, 10, 7, 8) + projection_flops(2, 10, 32, 4, **sizes)
    whole = attention_flops(2, 4, 10, 7, 8, backward=True) + projection_flops(2, 10, 32, 4, backward=True, **sizes)
    assert forward + backward == whole


def test_flops_of_grouped_projections_are_two_a_parameter_and_token() -> None:
    terms = multi_head_terms(64, 8, kv_heads=2, head_dim=12, value_head_dim=10, in_bias=False, out_bias=False)
    flops = projection_flops(3, 11, 64, 8, kv_heads=2, head_dim=12, value_head_dim=10)
    assert flops == 2 * 3 * 11 * terms.total


@pytest.mark.parametrize(("rows", "keys"), [(5, 5), (3, 8), (8, 3), (1, 1)])
def test_visible_pairs(rows: int, keys: int) -> None:
    assert visible_pairs(rows, keys, causal=True) == int(torch.ones(rows, keys).tril().sum())
    assert visible_pairs(rows, keys) == rows * keys
    causal = attention_flops(1, 1, rows, keys, 4, causal=True)
    assert causal * rows * keys == attention_flops(1, 1, rows, keys, 4) * visible_pairs(rows, keys, causal=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bytes_of_a_dense_call(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, 3, length, 8, dtype=dtype) for length in (48, 64, 64))
    k = k.mT.contiguous()  # no copy inside the product
    with torch.no_grad(), Held() as held:
        logits = torch.matmul(q, k).mul_(8**-0.5)
        weights = logits.softmax(-1)
        del logits
        out = torch.matmul(weights, v)
    dense = attention_memory_bytes(2, 3, 48, 64, 8, dtype=dtype).dense
    assert held.peak == dense
    assert out.shape == (2, 3, 48, 8)


def test_bytes_of_a_tiled_call() -> None:
    """A plain loop over tiles holds what the formula says, and less than a tenth more."""
    heads, length, dim, rows, columns = 6, 256, 16, 32, 32
    q, k, v = (torch.randn(heads, length, dim) for _ in range(3))
    out = torch.empty(heads, length, dim)
    keys = k.mT.contiguous()
    with torch.no_grad(), Held() as held:
        lse = torch.empty(heads, length)
        for head in range(heads):
            for start in range(0, length, rows):
                part = slice(start, start + rows)
                total = torch.zeros(rows, dim)
                largest, norm = torch.full((rows, 1), -torch.inf), torch.zeros(rows, 1)
                for first in range(0, length, columns):
                    tile = slice(first, first + columns)
                    logits = (q[head, part] @ keys[head, :, tile]).mul_(dim**-0.5)
                    new = torch.maximum(largest, logits.amax(-1, keepdim=True))
                    weights = (logits - new).exp_()
                    del logits
                    shrink = largest.sub_(new).exp_()
                    norm.mul_(shrink).add_(weights.sum(-1, keepdim=True))
                    total.mul_(shrink).addmm_(weights, v[head, tile])
                    largest = new
                    del weights, shrink
                out[head, part] = total.div_(norm)
                lse[head, part] = largest.add_(norm.log_()).squeeze(-1)
    memory = attention_memory_bytes(1, heads, length, length, dim, tile_rows=rows, tile_keys=columns)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v))
    assert memory.tiled <= held.peak <= 1.1 * memory.tiled
    assert memory.ratio == memory.dense / memory.tiled > 50


def test_short_calls_and_workers() -> None:
    assert attention_memory_bytes(1, 1, 4, 8, 16).tiled == 4 * (4 * (2 * 8 + 16 + 2) + 4)
    one, many = (attention_memory_bytes(1, 1, 4096, 4096, 16, workers=workers).tiled for workers in (1, 5))
    assert many - one == 4 * 4 * 64 * (2 * 64 + 16 + 2)


def test_bytes_of_a_cache() -> None:
    transformers = pytest.importorskip("transformers")
    cache = transformers.DynamicCache()
    for layer in range(3):
        for tokens in (5, 1, 1):
            cache.update(
                torch.zeros(2, 4, tokens, 16, dtype=torch.float16),
                torch.zeros(2, 4, tokens, 8, dtype=torch.float16),
                layer,
            )
    held = sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))
    assert kv_cache_bytes(2, 4, 7, 16, value_head_dim=8, layers=3, dtype=torch.float16) == held
    assert kv_cache_bytes(2, 4, 7, 16, dtype=torch.float8_e4m3fn) == 2 * 4 * 7 * 32


def test_refusals() -> None:
    with pytest.raises(InvalidValueError, match="recompute is a part"):
        attention_flops(1, 1, 4, 4, 8, recompute=True)
    with pytest.raises(InvalidValueError, match="head_dim is at least 1; got 0"):
        projection_flops(1, 4, 4, 8)  # more heads than channels
    with pytest.raises(InvalidTypeError, match=r"dtype is a torch\.dtype; got 'float16'"):
        kv_cache_bytes(1, 1, 1, 1, dtype="float16")  # type: ignore[arg-type]
