"""A tile of logits: its rows and keys, its bias and its mask. Shared by all kernels.

Shapes: M rows, N keys, E width of query and key. Row offsets are 64-bit numbers, so L x S may exceed 2^31.
"""

import triton
import triton.language as tl

from sqrtdk.impl.gpu.arithmetic import tanh


@triton.jit
def load_matrix(base, offsets, there, column_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
                WIDEN: tl.constexpr):
    """Load the rows at `offsets` from `base`, (len(offsets), BLOCK): zeros beyond WIDTH, and if MASKED where not
    `there`.

    WIDEN: cast to float32 at once, for the interpreter, which multiplies the bit patterns of bfloat16.
    """
    columns = tl.arange(0, BLOCK)
    at = base + offsets[:, None] + columns[None, :] * column_stride
    if MASKED:
        x = tl.load(at, mask=there[:, None] & (columns < WIDTH)[None, :], other=0.0)
    elif WIDTH != BLOCK:
        x = tl.load(at, mask=(columns < WIDTH)[None, :], other=0.0)
    else:
        x = tl.load(at)
    if WIDEN:
        x = x.to(tl.float32)
    return x


@triton.jit
def load_keys(base, descriptor, start, keys, row_stride, column_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
              BLOCK_N: tl.constexpr, DESCRIPTORS: tl.constexpr, MASKED: tl.constexpr, WIDEN: tl.constexpr):
    """Load rows start..start + BLOCK_N of the keys or values of one head, (BLOCK_N, BLOCK), zeros beyond them."""
    if DESCRIPTORS:
        return descriptor.load([start, 0])
    columns = start + tl.arange(0, BLOCK_N)
    return load_matrix(base, columns.to(tl.int64) * row_stride, columns < keys, column_stride, WIDTH, BLOCK, MASKED,
                       WIDEN)


@triton.jit
def capped(z, softcap, SOFTCAP: tl.constexpr):
    """Logits after the softcap, and their derivative by those before it."""
    slope = tl.full(z.shape, 1.0, tl.float32)
    if SOFTCAP:
        t = tanh(z / softcap)
        z = softcap * t
        slope = 1.0 - t * t
    return z, slope


@triton.jit
def biased(z, bias, offsets, there, columns, column_stride, keys, BIAS: tl.constexpr, MASKED: tl.constexpr):
    """Logits (M, N) plus the bias, whose rows lie at `offsets`."""
    if BIAS:
        mask = there[:, None]
        if MASKED:
            mask = mask & (columns < keys)[None, :]
        at = bias + offsets[:, None] + columns.to(tl.int64)[None, :] * column_stride
        z += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    return z


@triton.jit
def seen_keys(positions, there, columns, visible, offsets, column_stride, keys, above, below, VISIBLE: tl.constexpr,
              ABOVE: tl.constexpr, BELOW: tl.constexpr):
    """The keys that the rows see, bool (M, N): for row i the keys i - below to i + above, if `visible` shows them."""
    seen = there[:, None] & (columns < keys)[None, :]
    if ABOVE:
        seen = seen & (columns[None, :] <= positions[:, None] + above)
    if BELOW:
        seen = seen & (columns[None, :] >= positions[:, None] - below)
    if VISIBLE:
        at = visible + offsets[:, None] + columns.to(tl.int64)[None, :] * column_stride
        seen = seen & (tl.load(at, mask=seen, other=0) != 0)
    return seen


@triton.jit
def keys_in(start, stop, positions, there, keys, above, below, ABOVE: tl.constexpr, BELOW: tl.constexpr):
    """The number of keys in start..stop that the rows see by the band alone, float32 (M,)."""
    since = tl.zeros_like(positions) + start
    until = tl.zeros_like(positions) + tl.minimum(stop, keys)
    if ABOVE:
        until = tl.minimum(until, positions + above + 1)
    if BELOW:
        since = tl.maximum(since, positions - below)
    return tl.where(there, tl.maximum(until - since, 0), 0).to(tl.float32)


@triton.jit
def key_range(first, last, keys, above, below, BLOCK_N: tl.constexpr, ABOVE: tl.constexpr, BELOW: tl.constexpr):
    """(start, whole, ragged, stop): the rows first..last may see keys start..stop, and all see whole..ragged.

    All except `stop` are multiples of BLOCK_N; start <= whole <= ragged, and `stop` may lie anywhere.
    """
    start = 0
    whole = 0
    stop = keys
    ragged = keys // BLOCK_N * BLOCK_N
    if BELOW:
        start = tl.maximum(first - below, 0) // BLOCK_N * BLOCK_N
        whole = (tl.maximum(last - below, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if ABOVE:
        stop = tl.minimum(keys, tl.maximum(last + above + 1, 0))
        ragged = tl.minimum(keys, tl.maximum(first + above + 1, 0)) // BLOCK_N * BLOCK_N
    return start, whole, tl.maximum(ragged, whole), stop
