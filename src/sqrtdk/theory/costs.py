"""The costs of attention: floating-point operations and bytes, by formula.

One multiply-add is 2 FLOP, and only matrix products are counted, as usual (torch's FlopCounterMode, PaLM's model FLOP
utilisation): softmax, scale, bias, mask and norms add about 1 / E of it and are bound by memory. Parameters are counted
in `sqrtdk.theory.parameters`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.theory._numeric import whole_number

FLOAT32_BYTES = 4


def _wholes(least: int = 1, **sizes: int) -> None:
    for name, size in sizes.items():
        whole_number(size, name, least)


def _itemsize(dtype: torch.dtype) -> int:
    if not isinstance(dtype, torch.dtype):
        raise InvalidTypeError(f"dtype is a torch.dtype; got {dtype!r}", hint="Pass e.g. torch.bfloat16.")
    return dtype.itemsize


def visible_pairs(query_len: int, key_len: int, *, causal: bool = False) -> int:
    """Pairs of a query and a key that it sees: L S, or sum over i of min(i + 1, S) where i sees keys j <= i.

    With m = min(L, S) the causal sum is m (m + 1) / 2 + (L - m) S. Exact for these two masks, of which the causal one
    is the upper-left of torch's SDPA; a window, padding or packed documents leave fewer pairs.

    Args:
        query_len: L.
        key_len: S.
        causal: whether query i sees keys j <= i alone.

    Returns:
        The number of pairs of one batch entry and head.

    Raises:
        InvalidTypeError: a length is not a whole number.
        InvalidValueError: a length is below 1.

    Example:
        >>> visible_pairs(4, 4), visible_pairs(4, 4, causal=True), visible_pairs(4, 2, causal=True)
        (16, 10, 7)

    Reference:
        Counted; the mask is that of torch.nn.functional.scaled_dot_product_attention with is_causal.
    """
    _wholes(query_len=query_len, key_len=key_len)
    if not causal:
        return query_len * key_len
    # Row i sees i + 1 keys until the keys end; the rows after that see all keys.
    short = min(query_len, key_len)
    return short * (short + 1) // 2 + (query_len - short) * key_len


def attention_flops(
    batch: int,
    heads: int,
    query_len: int,
    key_len: int,
    head_dim: int,
    *,
    value_head_dim: int | None = None,
    causal: bool = False,
    backward: bool = False,
    recompute: bool = False,
) -> int:
    """FLOP of q k^T and p v over the visible pairs: 2 B H pairs (E + Ev); query heads count, shared or not.

    The backward pass adds dp = do v^T and dv = p^T do (Ev each), dq = dz k and dk = dz^T q (E each): twice the forward.
    A fused kernel computes q k^T again, E more, which makes 3.5 forwards in all where Ev = E.

    Only matrix products are counted: softmax, scale, bias and mask add 4 to 8 operations per pair, 1 / E to 2 / E of
    it. Not valid for scores that are not a dot product. FLOP is not a time: short rows and small heads are bound by
    memory.

    Args:
        batch: B.
        heads: H, query heads.
        query_len: L.
        key_len: S.
        head_dim: E.
        value_head_dim: Ev; None: E.
        causal: count only pairs with j <= i. A kernel that works in blocks computes some more, and a dense one (and
            FlopCounterMode, for any kernel) all L S.
        backward: forward and backward.
        recompute: the backward pass computes the logits again.

    Returns:
        FLOP.

    Raises:
        InvalidTypeError: a size is not a whole number.
        InvalidValueError: a size is below 1.

    Example:
        >>> attention_flops(1, 8, 1024, 1024, 64)
        2147483648
        >>> attention_flops(1, 8, 1024, 1024, 64, backward=True, recompute=True) / attention_flops(1, 8, 1024, 1024, 64)
        3.5

    Reference:
        T. Dao et al. 2022, arXiv:2205.14135, for the recomputation.
    """
    _wholes(batch=batch, heads=heads, head_dim=head_dim)
    value_dim = head_dim if value_head_dim is None else whole_number(value_head_dim, "value_head_dim", 1)
    if recompute and not backward:
        raise InvalidValueError(
            "recompute is a part of the backward pass; got recompute=True, backward=False", hint="Pass backward=True."
        )
    # Backward is two products for each one of the forward pass, by either operand. A kernel that recomputes the logits
    # adds one more q k^T.
    width = (head_dim + value_dim) * (3 if backward else 1) + (head_dim if recompute else 0)
    return 2 * batch * heads * visible_pairs(query_len, key_len, causal=causal) * width


def projection_flops(
    batch: int,
    query_len: int,
    d_model: int,
    heads: int,
    *,
    key_len: int | None = None,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    value_head_dim: int | None = None,
    kdim: int | None = None,
    vdim: int | None = None,
    backward: bool = False,
) -> int:
    """FLOP of the four projections of a multi-head layer, 2 a weight and token.

    2 B (L h E d_model + S kv E kdim + S kv Ev vdim + L h Ev d_model); the backward pass is twice that, once for the
    gradient of the input and once for that of the weight. Biases, rotations and norms are not counted, and with a
    cache of keys and values S is the number of new tokens only. Not valid for low-rank or sparse projections.

    Args:
        batch: B.
        query_len: L, tokens of the query and of the output.
        d_model: channels of the query and of the output.
        heads: query heads h.
        key_len: S, tokens of key and value; None: L.
        kv_heads: key and value heads kv; None: h.
        head_dim: E; None: d_model / h, rounded down.
        value_head_dim: Ev; None: E.
        kdim: channels of the key; None: d_model.
        vdim: channels of the value; None: d_model.
        backward: forward and backward, gradients of all inputs included.

    Returns:
        FLOP.

    Raises:
        InvalidTypeError: a size is not a whole number.
        InvalidValueError: a size is below 1.

    Example:
        >>> projection_flops(1, 1024, 512, 8) == 2 * 1024 * 4 * 512**2
        True

    Reference:
        J. Kaplan et al. 2020, arXiv:2001.08361, section 2.1 (2 a weight and token, and twice that backward).
    """
    _wholes(batch=batch, query_len=query_len, d_model=d_model, heads=heads)
    keys = whole_number(query_len if key_len is None else key_len, "key_len", 1)
    kv = whole_number(heads if kv_heads is None else kv_heads, "kv_heads", 1)
    dim = whole_number(d_model // heads if head_dim is None else head_dim, "head_dim", 1)
    value_dim = whole_number(dim if value_head_dim is None else value_head_dim, "value_head_dim", 1)
    from_key = whole_number(d_model if kdim is None else kdim, "kdim", 1)
    from_value = whole_number(d_model if vdim is None else vdim, "vdim", 1)
    each = query_len * heads * (dim + value_dim) * d_model + keys * kv * (dim * from_key + value_dim * from_value)
    return 2 * batch * each * (3 if backward else 1)


@dataclass(frozen=True, slots=True)
class AttentionMemory:
    """Bytes that a call holds beyond its inputs and its output; see `attention_memory_bytes`.

    Attributes:
        dense: logits and weights of all pairs.
        tiled: logits and weights of one tile, and what each row carries from tile to tile.
    """

    dense: int
    tiled: int

    @property
    def ratio(self) -> float:
        """Dense over tiled."""
        return self.dense / self.tiled


def attention_memory_bytes(
    batch: int,
    heads: int,
    query_len: int,
    key_len: int,
    value_head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    tile_rows: int = 64,
    tile_keys: int = 64,
    workers: int = 1,
) -> AttentionMemory:
    """Working memory of a forward pass, dense against tiled, beyond inputs and output, in bytes.

    dense = 2 B H L S bytes(dtype), tiled = 4 (workers r (2 c + Ev + 2) + B H L), with r and c at most L and S.

    Dense: 2 B H L S numbers of the dtype, the logits and the weights at the moment of the softmax; a scale, bias or
    mask that is not applied in place adds B H L S. Training keeps the weights. Tiled: 2 r c float32 numbers of a tile
    for each worker; of the tile's r rows the accumulated output (Ev), the maximum and the sum; and the lse of every
    row, B H L, which the backward pass needs.

    Args:
        batch: B.
        heads: H, query heads.
        query_len: L.
        key_len: S.
        value_head_dim: Ev.
        dtype: of the dense logits and weights; a tile's are float32.
        tile_rows: r, rows of a tile.
        tile_keys: c, keys of a tile.
        workers: tiles at work at the same time (thread blocks of a GPU, threads of a CPU).

    Returns:
        AttentionMemory, in bytes. Registers and shared memory of a GPU are counted as if they were memory. What an
        allocator rounds up, and what a backward pass holds besides, is not.

    Raises:
        InvalidTypeError: a size is not a whole number, or dtype is none.
        InvalidValueError: a size is below 1.

    Example:
        >>> memory = attention_memory_bytes(1, 32, 8192, 8192, 128, dtype=torch.bfloat16)
        >>> memory.dense / 2**30
        8.0
        >>> memory.tiled < 2**21
        True

    Reference:
        M. Rabe and C. Staats 2021, arXiv:2112.05682; T. Dao et al. 2022, arXiv:2205.14135.
    """
    _wholes(batch=batch, heads=heads, query_len=query_len, key_len=key_len, value_head_dim=value_head_dim)
    _wholes(tile_rows=tile_rows, tile_keys=tile_keys, workers=workers)
    rows, keys = min(tile_rows, query_len), min(tile_keys, key_len)
    # Logits and weights of a tile, the accumulated output, and each row's maximum and mass.
    tile = rows * (2 * keys + value_head_dim + 2)
    return AttentionMemory(
        # Logits and weights: eager attention holds both.
        dense=2 * batch * heads * query_len * key_len * _itemsize(dtype),
        tiled=(workers * tile + batch * heads * query_len) * FLOAT32_BYTES,
    )


def kv_cache_bytes(
    batch: int,
    kv_heads: int,
    length: int,
    head_dim: int,
    *,
    value_head_dim: int | None = None,
    layers: int = 1,
    dtype: torch.dtype = torch.bfloat16,
) -> int:
    """Bytes of cached keys and values: layers B kv length (E + Ev) bytes(dtype).

    Not valid for caches of something else (a shared latent vector, one layer's keys for several layers), and less than
    what an allocator of pages or a preallocated length holds.

    Args:
        batch: B.
        kv_heads: key and value heads kv; fewer than query heads is the point of grouped queries.
        length: tokens in the cache; with a sliding window, at most the window.
        head_dim: E.
        value_head_dim: Ev; None: E.
        layers: layers with a cache of their own.
        dtype: of the cache. Scales and zero points of a quantised cache are not counted.

    Returns:
        Bytes.

    Raises:
        InvalidTypeError: a size is not a whole number, or dtype is none.
        InvalidValueError: a size is below 1.

    Example:
        >>> kv_cache_bytes(1, 8, 8192, 128, layers=32) / 2**30
        1.0

    Reference:
        N. Shazeer 2019, arXiv:1911.02150; J. Ainslie et al. 2023, arXiv:2305.13245.
    """
    _wholes(batch=batch, kv_heads=kv_heads, length=length, head_dim=head_dim, layers=layers)
    value_dim = head_dim if value_head_dim is None else whole_number(value_head_dim, "value_head_dim", 1)
    return layers * batch * kv_heads * length * (head_dim + value_dim) * _itemsize(dtype)
