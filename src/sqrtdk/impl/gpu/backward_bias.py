"""Gradient of the bias: one program per tile of rows and keys, which sums over the batch and heads that share a bias.

Of a table of distances, one program per diagonal of tiles: all of them add the same distances in the same places, so
that one tile holds their sum. `summed_by_distance` joins these tiles.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional

from sqrtdk.impl.gpu.backward import differentiate, row_terms
from sqrtdk.impl.gpu.tile import key_range, load_matrix, seen_keys


@triton.jit(do_not_specialize=["batch", "heads", "length", "keys", "above", "below"])
def backward_bias(
    gradient, g_batch, g_head, g_row, g_column,
    query, q_batch, q_head, q_row, q_column,
    key, k_batch, k_head, k_row, k_column,
    value, v_batch, v_head, v_row, v_column,
    top, log_mass, constant, entropy,
    scale, scale_batch, scale_head, scale_row,
    bias, bias_batch, bias_head, bias_row, bias_column,
    visible, visible_batch, visible_head, visible_row, visible_column,
    d_bias,
    batch, heads, length, keys, factor, softcap, above, below,
    GROUP: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_EV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SCALES: tl.constexpr, SOFTCAP: tl.constexpr, VISIBLE: tl.constexpr,
    ABOVE: tl.constexpr, BELOW: tl.constexpr, ENTROPY: tl.constexpr, BATCHES: tl.constexpr, HEADS: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DISTANCES: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of the bias for a tile of BLOCK_M rows and BLOCK_N keys.

    A program sums over the batch and the heads that share the bias; if DISTANCES, also over the tiles of a diagonal.
    Along rows and keys, a bias of size 1 gets one sum for each tile, which the caller adds up.

    Kernel arguments:
        gradient: Pointer to dO, the gradient of the output, (B, Hq, L, Ev). What follows each tensor are its strides
            in elements: g_batch, g_head, g_row, g_column, and so on; 0 along a dimension that is broadcast.
        query, key, value: (B, Hq, L, E), (B, H, S, E) and (B, H, S, Ev).
        top, log_mass: Maximum m of each row and log l, whose sum is its lse; float32 (B, Hq, L), contiguous.
        constant: c of each row, see the kernel `constants`; float32 (B, Hq, L), contiguous.
        entropy: dH, the gradient of each row's entropy, likewise; used if ENTROPY.
        scale: float32, broadcast to (B, Hq, L); used if SCALES, in place of `factor`.
        bias: Broadcast to (B, Hq, L, S), added to the logits;
            if DISTANCES a table of the distances j - i, with a negative row stride.
        visible: bool, broadcast to (B, Hq, L, S), False at hidden keys; used if VISIBLE.
        d_bias: Result, contiguous, with the size of the bias in each dimension, but one entry for each tile of rows or
            keys if not ROWS or not KEYS; if DISTANCES, float32 (1, #Hq, diagonals, BLOCK_M, BLOCK_N).
        batch, heads, length, keys: B, Hq, L and S.
        factor: The scale if not SCALES.
        softcap: c of c tanh(z / c), used if SOFTCAP.
        above, below: Row i sees the keys i - below (if BELOW) to i + above (if ABOVE).
        GROUP: Query heads for each key head.
        E, EV, BLOCK_E, BLOCK_EV: Widths, and the powers of two to which tiles are padded; EV may be 0.
        BLOCK_M, BLOCK_N: Rows and keys of a tile.
        BATCHES, HEADS, ROWS, KEYS: Whether the bias has more than one batch element, head, row or key.
        DISTANCES: Whether the bias is a table of distances.
        WIDEN: Whether loads are cast to float32 at once.
        PRECISION: `input_precision` of `tl.dot`.
    """
    tiles = tl.cdiv(length, BLOCK_M)
    blocks = tl.cdiv(keys, BLOCK_N)
    run = 1  # tiles of a program
    if DISTANCES:
        diagonals = tiles + blocks - 1
        index = tl.program_id(0) % diagonals
        tile = tl.maximum(tiles - 1 - index, 0)
        block = tl.maximum(index - (tiles - 1), 0)
        run = tl.minimum(tiles - tile, blocks - block)
        which = tl.program_id(0) // diagonals
    else:
        block = tl.program_id(0) % blocks
        tile = tl.program_id(0) // blocks % tiles
        which = tl.program_id(0) // blocks // tiles
    first_head = which % heads if HEADS else 0
    first_batch = (which // heads if HEADS else which) if BATCHES else 0
    first = tile * BLOCK_M
    last = tl.minimum(first + BLOCK_M, length) - 1
    start, _whole, _ragged, stop = key_range(first, last, keys, above, below, BLOCK_N, ABOVE, BELOW)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    steps = run * (1 if BATCHES else batch) * (1 if HEADS else heads)
    if (block * BLOCK_N < start) | (block * BLOCK_N >= stop):  # and so do all tiles of a diagonal
        steps = 0
    for step in range(steps):
        pair = step // run
        rows = (tile + step % run) * BLOCK_M + tl.arange(0, BLOCK_M)
        there = rows < length
        positions = tl.where(there, rows, 0)
        row_at = positions.to(tl.int64)
        columns = (block + step % run) * BLOCK_N + tl.arange(0, BLOCK_N)
        column_there = columns < keys
        column_at = tl.where(column_there, columns, 0).to(tl.int64)
        head = first_head + (0 if HEADS else pair % heads)
        b = first_batch + (0 if BATCHES else (pair if HEADS else pair // heads))
        head = tl.zeros([], tl.int64) + head
        b = tl.zeros([], tl.int64) + b
        q = load_matrix(query + b * q_batch + head * q_head, row_at * q_row, there, q_column, E, BLOCK_E, True, WIDEN)
        k = load_matrix(key + b * k_batch + head // GROUP * k_head, column_at * k_row, column_there, k_column, E,
                        BLOCK_E, True, WIDEN)
        x = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        dp = 0.0
        if EV > 0:
            g = load_matrix(gradient + b * g_batch + head * g_head, row_at * g_row, there, g_column, EV, BLOCK_EV, True,
                            WIDEN)
            v = load_matrix(value + b * v_batch + head // GROUP * v_head, column_at * v_row, column_there, v_column, EV,
                            BLOCK_EV, True, WIDEN)
            dp = tl.dot(g, tl.trans(v), input_precision=PRECISION)
        of_top, of_mass, of_constant, of_entropy, of_scale = row_terms(
            top, log_mass, constant, entropy, scale, (b * heads + head) * length + row_at,
            b * scale_batch + head * scale_head + row_at * scale_row, factor, there, ENTROPY, SCALES, True)
        if ENTROPY:
            of_entropy = of_entropy[:, None]
        if SCALES:
            of_scale = of_scale[:, None]
        seen = seen_keys(positions, there, columns, visible, b * visible_batch + head * visible_head +
                         row_at * visible_row, visible_column, keys, above, below, VISIBLE, ABOVE, BELOW)
        _p, added, _dz = differentiate(
            x, dp, seen, of_scale, of_top[:, None], of_mass[:, None], of_constant[:, None], of_entropy, softcap, bias,
            b * bias_batch + head * bias_head + row_at * bias_row, there, columns, bias_column, keys, False, SOFTCAP,
            True, ENTROPY, True)
        acc += added

    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = rows < length
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    column_there = columns < keys
    to = (tl.zeros([], tl.int64) + which) * (length if ROWS else tiles)
    width = (keys if KEYS else blocks).to(tl.int64)
    if DISTANCES:
        of = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        tl.store(d_bias + of[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :], acc)
    elif ROWS and KEYS:
        at = (to + rows)[:, None] * width + columns[None, :]
        tl.store(d_bias + at, acc.to(d_bias.dtype.element_ty), mask=there[:, None] & column_there[None, :])
    elif ROWS:
        tl.store(d_bias + (to + rows) * width + block, tl.sum(acc, 1), mask=there)
    elif KEYS:
        tl.store(d_bias + (to + tile) * width + columns, tl.sum(acc, 0), mask=column_there)
    else:
        tl.store(d_bias + (to + tile) * width + block, tl.sum(tl.sum(acc, 1), 0))


def summed_by_distance(tiles: Tensor, length: int, keys: int) -> Tensor:
    """Return the gradient of a table of distances from the sums of its diagonals of tiles.

    Args:
        tiles: (H, D, M, M), for each head and each of the D diagonals of square tiles the sum of its tiles.
        length: Number of rows, L.
        keys: Number of keys, S.

    Returns:
        (H, L + S - 1), the sums of all pairs of equal distance j - i, from 1 - L on.
    """
    heads, diagonals, block, _ = tiles.shape
    # row r of a tile moved on by M - 1 - r: what has the same distance stands in one column
    skewed = functional.pad(tiles.flip(-2), (0, block)).flatten(-2)[..., :-block].unflatten(-1, (block, 2 * block - 1))
    sums = functional.pad(skewed.sum(-2), (0, 1)).unflatten(-1, (2, block))
    joined = tiles.new_zeros(heads, diagonals + 1, block)
    joined[:, :-1] += sums[..., 0, :]
    joined[:, 1:] += sums[..., 1, :]
    beyond = -length % block  # rows of the last tile that are not there
    return joined.flatten(-2)[:, beyond : beyond + length + keys - 1]
