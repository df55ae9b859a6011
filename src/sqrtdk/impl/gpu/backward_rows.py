"""Gradients of queries and scales: one program per tile of rows of one head, which sweeps the keys that its rows see.

    dQ = scale dZ K;  dscale = sum over the keys of dZ (Q K^T)
"""

import triton
import triton.language as tl

from sqrtdk.impl.gpu.backward import differentiate, row_terms
from sqrtdk.impl.gpu.tile import key_range, load_keys, load_matrix, seen_keys


@triton.jit
def sweep(start, stop, dq, ds, q, g, k, v, k_tiles, v_tiles, k_row, k_column, v_row, v_column, keys, positions, there,
          factor, top, log_mass, constant, entropy, softcap, bias, bias_at, bias_column, visible, visible_at,
          visible_column, above, below, MASKED: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr,
          BLOCK_EV: tl.constexpr, BLOCK_N: tl.constexpr, LINEAR: tl.constexpr, SOFTCAP: tl.constexpr,
          BIAS: tl.constexpr, VISIBLE: tl.constexpr, ABOVE: tl.constexpr, BELOW: tl.constexpr, ENTROPY: tl.constexpr,
          NEEDS_SCALE: tl.constexpr, DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):
    """Add the blocks of keys from `start` to `stop` to the gradients of a tile of rows.

    Arguments that are not listed are those of `backward_rows`.

    Kernel arguments:
        start, stop: First key and the key after the last; `start` is a multiple of BLOCK_N.
        dq: Sum of dZ K so far, float32 (M, BLOCK_E), not yet multiplied by the scale.
        ds: Gradient of the scale so far, float32 (M,); changed if NEEDS_SCALE.
        q, g: Tiles of the query, (M, BLOCK_E), and of the output's gradient, (M, BLOCK_EV).
        k, v: Pointers to the keys and values of this head; `k_tiles` and `v_tiles` are their descriptors, or None.
        positions, there: Positions of the rows, and which rows of the tile exist, (M,) each.
        factor: Scale of each row, (M, 1), or a number.
        top, log_mass, constant, entropy: Of each row, (M, 1); `entropy` is 0 if not ENTROPY.
        bias_at, visible_at: Offsets of the rows in `bias` and `visible`, int64 (M,).
        MASKED: Whether some row may not see all of these keys; if False, no mask is applied.

    Returns:
        The new (dq, ds).
    """
    for j in range(start, stop, BLOCK_N):
        columns = j + tl.arange(0, BLOCK_N)
        key = load_keys(k, k_tiles, j, keys, k_row, k_column, E, BLOCK_E, BLOCK_N, DESCRIPTORS, MASKED, WIDEN)
        x = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        dp = 0.0
        if EV > 0:
            value = load_keys(v, v_tiles, j, keys, v_row, v_column, EV, BLOCK_EV, BLOCK_N, DESCRIPTORS, MASKED, WIDEN)
            dp = tl.dot(g, tl.trans(value), input_precision=PRECISION)
        seen = there[:, None]
        if MASKED:
            seen = seen_keys(positions, there, columns, visible, visible_at, visible_column, keys, above, below,
                             VISIBLE, ABOVE, BELOW)
        _p, _added, dz = differentiate(
            x, dp, seen, factor, top, log_mass, constant, entropy, softcap, bias, bias_at, there, columns, bias_column,
            keys, LINEAR, SOFTCAP, BIAS, ENTROPY, MASKED)
        if NEEDS_SCALE:
            each = dz * x
            if MASKED:
                each = tl.where(seen, each, 0.0)
            ds += tl.sum(each, 1)
        dq = tl.dot(dz.to(key.dtype), key, dq, input_precision=PRECISION)
    return dq, ds


@triton.jit(do_not_specialize=["heads", "length", "keys", "above", "below"])
def backward_rows(
    gradient, g_batch, g_head, g_row, g_column,
    query, q_batch, q_head, q_row, q_column,
    key, k_batch, k_head, k_row, k_column,
    value, v_batch, v_head, v_row, v_column,
    top, log_mass, constant, entropy,
    scale, scale_batch, scale_head, scale_row,
    bias, bias_batch, bias_head, bias_row, bias_column,
    visible, visible_batch, visible_head, visible_row, visible_column,
    d_query, d_scale,
    heads, length, keys, factor, softcap, above, below,
    GROUP: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_EV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LINEAR: tl.constexpr, SCALES: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, VISIBLE: tl.constexpr, ABOVE: tl.constexpr, BELOW: tl.constexpr, ENTROPY: tl.constexpr,
    NEEDS_SCALE: tl.constexpr, DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of BLOCK_M rows of the query of one head, and of their scale.

    A program sweeps the keys that its rows see. The grid is (tiles x batch x heads,).

    Kernel arguments:
        gradient: Pointer to dO, the gradient of the output, (B, Hq, L, Ev). What follows each tensor are its strides
            in elements: g_batch, g_head, g_row, g_column, and so on; 0 along a dimension that is broadcast.
        query, key, value: (B, Hq, L, E), (B, H, S, E) and (B, H, S, Ev).
        top, log_mass: Maximum m of each row and log l, whose sum is its lse; float32 (B, Hq, L), contiguous.
        constant: c of each row, see the kernel `constants`; float32 (B, Hq, L), contiguous.
        entropy: dH, the gradient of each row's entropy, likewise; used if ENTROPY.
        scale: float32, broadcast to (B, Hq, L); used if SCALES, in place of `factor`.
        bias: Broadcast to (B, Hq, L, S), added to the logits if BIAS.
        visible: bool, broadcast to (B, Hq, L, S), False at hidden keys; used if VISIBLE.
        d_query: Result, contiguous, like the query.
        d_scale: Result, float32 (B, Hq, L): the gradient of each row's scale; written if NEEDS_SCALE.
        heads, length, keys: Hq, L and S.
        factor: The scale if not SCALES.
        softcap: c of c tanh(z / c), used if SOFTCAP.
        above, below: Row i sees the keys i - below (if BELOW) to i + above (if ABOVE).
        GROUP: Query heads for each key head.
        E, EV, BLOCK_E, BLOCK_EV: Widths, and the powers of two to which tiles are padded; EV may be 0.
        BLOCK_M, BLOCK_N: Rows and keys of a tile.
        LINEAR: Whether there is no bias and no softcap.
        DESCRIPTORS: Whether the tensors that are swept are loaded by tensor descriptors.
        WIDEN: Whether loads are cast to float32 at once.
        PRECISION: `input_precision` of `tl.dot`.
    """
    tiles = tl.cdiv(length, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles  # rows that see most keys first
    which = (tl.program_id(0) // tiles).to(tl.int64)
    b = which // heads
    head = which % heads
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = rows < length
    positions = tl.where(there, rows, 0)
    row_at = positions.to(tl.int64)
    q = load_matrix(query + b * q_batch + head * q_head, row_at * q_row, there, q_column, E, BLOCK_E, True, WIDEN)
    key += b * k_batch + head // GROUP * k_head
    g = q
    if EV > 0:
        g = load_matrix(gradient + b * g_batch + head * g_head, row_at * g_row, there, g_column, EV, BLOCK_EV, True,
                        WIDEN)
        value += b * v_batch + head // GROUP * v_head
    at = which * length + row_at
    of_top, of_mass, of_constant, of_entropy, of_scale = row_terms(
        top, log_mass, constant, entropy, scale, at, b * scale_batch + head * scale_head + row_at * scale_row, factor,
        there, ENTROPY, SCALES, True)
    of_top = of_top[:, None]
    of_mass = of_mass[:, None]
    of_constant = of_constant[:, None]
    if ENTROPY:
        of_entropy = of_entropy[:, None]
    if SCALES:
        of_scale = of_scale[:, None]
    bias_at = b * bias_batch + head * bias_head + row_at * bias_row
    visible_at = b * visible_batch + head * visible_head + row_at * visible_row
    k_tiles = None
    v_tiles = None
    if DESCRIPTORS:
        k_tiles = tl.make_tensor_descriptor(key, [keys, E], [k_row, 1], [BLOCK_N, BLOCK_E])
        if EV > 0:
            v_tiles = tl.make_tensor_descriptor(value, [keys, EV], [v_row, 1], [BLOCK_N, BLOCK_EV])

    first = tile * BLOCK_M
    last = tl.minimum(first + BLOCK_M, length) - 1
    start, whole, ragged, stop = key_range(first, last, keys, above, below, BLOCK_N, ABOVE, BELOW)
    if VISIBLE:
        ragged = whole
    dq = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    ds = tl.zeros([BLOCK_M], tl.float32)
    if BELOW:
        dq, ds = sweep(
            start, tl.minimum(whole, stop), dq, ds, q, g, key, value, k_tiles, v_tiles, k_row, k_column, v_row,
            v_column, keys, positions, there, of_scale, of_top, of_mass, of_constant, of_entropy, softcap, bias,
            bias_at, bias_column, visible, visible_at, visible_column, above, below, True, E, EV, BLOCK_E, BLOCK_EV,
            BLOCK_N, LINEAR, SOFTCAP, BIAS, VISIBLE, ABOVE, BELOW, ENTROPY, NEEDS_SCALE, DESCRIPTORS, WIDEN, PRECISION)
    if not VISIBLE:
        dq, ds = sweep(
            whole, ragged, dq, ds, q, g, key, value, k_tiles, v_tiles, k_row, k_column, v_row, v_column, keys,
            positions, there, of_scale, of_top, of_mass, of_constant, of_entropy, softcap, bias, bias_at, bias_column,
            visible, visible_at, visible_column, above, below, False, E, EV, BLOCK_E, BLOCK_EV, BLOCK_N, LINEAR,
            SOFTCAP, BIAS, VISIBLE, ABOVE, BELOW, ENTROPY, NEEDS_SCALE, DESCRIPTORS, WIDEN, PRECISION)
    dq, ds = sweep(
        ragged, stop, dq, ds, q, g, key, value, k_tiles, v_tiles, k_row, k_column, v_row, v_column, keys, positions,
        there, of_scale, of_top, of_mass, of_constant, of_entropy, softcap, bias, bias_at, bias_column, visible,
        visible_at, visible_column, above, below, True, E, EV, BLOCK_E, BLOCK_EV, BLOCK_N, LINEAR, SOFTCAP, BIAS,
        VISIBLE, ABOVE, BELOW, ENTROPY, NEEDS_SCALE, DESCRIPTORS, WIDEN, PRECISION)

    dq *= of_scale
    widths = tl.arange(0, BLOCK_E)
    tl.store(d_query + at[:, None] * E + widths[None, :], dq.to(d_query.dtype.element_ty),
             mask=there[:, None] & (widths < E)[None, :])
    if NEEDS_SCALE:
        tl.store(d_scale + at, ds, mask=there)
