"""A tile of logits: its rows and keys, its bias and its mask. Shared by all kernels.

Shapes: M rows, N keys, E width of query and key. Row offsets are 64-bit numbers, so L x S may exceed 2^31.
"""

import triton
import triton.language as tl

from sqrtdk.impl.gpu.arithmetic import tanh


@triton.jit
def load_matrix(base, offsets, there, column_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr,
                WIDEN: tl.constexpr):
    """Load rows of a matrix as a tile.

    Args:
        base: Pointer to the matrix.
        offsets: Offset of each row from `base` in elements, int64 (M,).
        there: Which rows exist, bool (M,); used if MASKED.
        column_stride: Stride of the columns in elements.
        WIDTH: Number of columns.
        BLOCK: Number of columns of the tile, at least WIDTH.
        MASKED: Whether some rows may not exist.
        WIDEN: Whether to cast to float32 at once, for the interpreter, which multiplies the bit patterns of bfloat16.

    Returns:
        The tile, (M, BLOCK), with zeros beyond WIDTH and, if MASKED, in rows that are not `there`.
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
    """Load BLOCK_N neighbouring rows of the keys or values of one head as a tile.

    Kernel arguments:
        base: Pointer to the head's first row.
        descriptor: Tensor descriptor of the head, used if DESCRIPTORS; the other arguments but `start` are then unused.
        start: First row of the tile.
        keys: Number of rows of the head.
        row_stride, column_stride: Strides in elements.
        WIDTH, BLOCK: Number of columns, and that of the tile.
        MASKED: Whether rows beyond `keys` may be asked for.
        WIDEN: As in `load_matrix`.

    Returns:
        The tile, (BLOCK_N, BLOCK), with zeros beyond the matrix.
    """
    if DESCRIPTORS:
        return descriptor.load([start, 0])
    columns = start + tl.arange(0, BLOCK_N)
    return load_matrix(base, columns.to(tl.int64) * row_stride, columns < keys, column_stride, WIDTH, BLOCK, MASKED,
                       WIDEN)


@triton.jit
def capped(z, softcap, SOFTCAP: tl.constexpr):
    """Return the logits after the softcap, c tanh(z / c), and the derivative of each by the logit before it.

    If not SOFTCAP, these are `z` itself and 1.
    """
    slope = tl.full(z.shape, 1.0, tl.float32)
    if SOFTCAP:
        t = tanh(z / softcap)
        z = softcap * t
        slope = 1.0 - t * t
    return z, slope


@triton.jit
def biased(z, bias, offsets, there, columns, column_stride, keys, BIAS: tl.constexpr, MASKED: tl.constexpr):
    """Return the logits of a tile plus the bias; if not BIAS, the logits.

    Kernel arguments:
        z: Logits, float32 (M, N).
        bias: Pointer to the bias.
        offsets: Offsets of the tile's rows in it, int64 (M,).
        there: Which rows exist, bool (M,).
        columns: Indices of the tile's columns, (N,).
        column_stride: Stride of the columns in elements.
        keys: Number of all columns.
        MASKED: Whether columns may lie beyond `keys`.
    """
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
    """Return which keys the rows of a tile see, bool (M, N).

    Row i sees the keys i - below (if BELOW) to i + above (if ABOVE), except those that `visible` hides.

    Kernel arguments:
        positions: Positions of the rows, (M,).
        there: Which rows exist, bool (M,); others see nothing.
        columns: Indices of the keys, (N,); those from `keys` on are not seen.
        visible: Pointer to a bool mask, False at hidden keys; used if VISIBLE.
        offsets: Offsets of the rows in it, int64 (M,).
        column_stride: Its stride along the keys in elements.
        keys: Number of all keys.
        above, below: Bounds of the distance of a key after and before the row's position.
    """
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
    """Return how many of the keys start..stop - 1 each row sees by the bounds alone, float32 (M,).

    The arguments are those of `seen_keys`; a row that does not exist sees 0.
    """
    since = tl.zeros_like(positions) + start
    until = tl.zeros_like(positions) + tl.minimum(stop, keys)
    if ABOVE:
        until = tl.minimum(until, positions + above + 1)
    if BELOW:
        since = tl.maximum(since, positions - below)
    return tl.where(there, tl.maximum(until - since, 0), 0).to(tl.float32)


@triton.jit
def key_range(first, last, keys, above, below, BLOCK_N: tl.constexpr, ABOVE: tl.constexpr, BELOW: tl.constexpr):
    """Return the keys that a tile of rows sees, as (start, whole, ragged, stop).

    Some of the rows see keys of start..stop - 1, none sees others, and all rows see whole..ragged - 1. All except
    `stop` are multiples of BLOCK_N, and start <= whole <= ragged; `stop` may lie anywhere.

    Kernel arguments:
        first, last: Positions of the first and the last row.
        keys: Number of all keys.
        above, below: Row i sees the keys i - below (if BELOW) to i + above (if ABOVE).
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
