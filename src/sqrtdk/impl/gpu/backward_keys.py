"""Gradients of keys and values: one program per block of keys of one key head, which sweeps the rows that see it.

    dV = P^T dO;  dK = dZ^T (scale Q)

Tiles are transposed, keys down and rows across, so that P^T and dZ^T are the left operands of a product. Seen from a
key, the band of the mask is mirrored: key j is seen by the rows j - above to j + below.
"""

import triton
import triton.language as tl

from sqrtdk.impl.gpu.backward import differentiate, row_terms
from sqrtdk.impl.gpu.tile import key_range, load_keys, load_matrix, seen_keys


@triton.jit
def sweep(start, stop, dk, dv, k, v, q, g, q_tiles, g_tiles, q_row, q_column, g_row, g_column, columns, there, length,
          top, log_mass, constant, entropy, scale, row_at, scale_at, scale_row, factor, softcap, bias, bias_at,
          bias_row, visible, visible_at, visible_row, above, below, MASKED: tl.constexpr, E: tl.constexpr,
          EV: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_EV: tl.constexpr, BLOCK_M: tl.constexpr, LINEAR: tl.constexpr,
          SCALES: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, VISIBLE: tl.constexpr, ABOVE: tl.constexpr,
          BELOW: tl.constexpr, ENTROPY: tl.constexpr, DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr,
          PRECISION: tl.constexpr):
    """Add the tiles of rows from `start` to `stop` to the gradients of a block of keys.

    Arguments that are not listed are those of `backward_keys`.

    Kernel arguments:
        start, stop: First row and the row after the last; `start` is a multiple of BLOCK_M.
        dk: Sum of dZ^T Q so far, float32 (N, BLOCK_E); if SCALES with the scale of each row, otherwise without a scale.
        dv: Sum of P^T dO so far, float32 (N, BLOCK_EV).
        k, v: Tiles of the keys, (N, BLOCK_E), and values, (N, BLOCK_EV).
        q, g: Pointers to the query and the output's gradient of one head; `q_tiles` and `g_tiles` are their
            descriptors, or None.
        columns, there: Indices of the keys, and which keys of the block exist, (N,) each.
        row_at: Index of the head's first row in `top`, `log_mass`, `constant` and `entropy`.
        scale_at: Offset of the head in `scale`.
        bias_at, visible_at: Offsets of the keys in `bias` and `visible`, int64 (N,).
        MASKED: Whether some row may not see all of these keys; if False, no mask is applied.

    Returns:
        The new (dk, dv).
    """
    for i in range(start, stop, BLOCK_M):
        rows = i + tl.arange(0, BLOCK_M)
        inside = rows < length
        query = load_keys(q, q_tiles, i, length, q_row, q_column, E, BLOCK_E, BLOCK_M, DESCRIPTORS, MASKED, WIDEN)
        x = tl.dot(k, tl.trans(query), input_precision=PRECISION)
        dp = 0.0
        if EV > 0:
            out = load_keys(g, g_tiles, i, length, g_row, g_column, EV, BLOCK_EV, BLOCK_M, DESCRIPTORS, MASKED, WIDEN)
            dp = tl.dot(v, tl.trans(out), input_precision=PRECISION)
        of_top, of_mass, of_constant, of_entropy, of_scale = row_terms(
            top, log_mass, constant, entropy, scale, row_at + rows, scale_at + rows.to(tl.int64) * scale_row, factor,
            inside, ENTROPY, SCALES, MASKED)
        if ENTROPY:
            of_entropy = of_entropy[None, :]
        if SCALES:
            of_scale = of_scale[None, :]
        seen = there[:, None]
        if MASKED:
            seen = seen_keys(columns, there, rows, visible, visible_at, visible_row, length, below, above, VISIBLE,
                             BELOW, ABOVE)
        p, _added, dz = differentiate(
            x, dp, seen, of_scale, of_top[None, :], of_mass[None, :], of_constant[None, :], of_entropy, softcap, bias,
            bias_at, there, rows, bias_row, length, LINEAR, SOFTCAP, BIAS, ENTROPY, MASKED)
        if EV > 0:
            dv = tl.dot(p.to(out.dtype), out, dv, input_precision=PRECISION)
        if SCALES:
            dz *= of_scale
        dk = tl.dot(dz.to(query.dtype), query, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["heads", "length", "keys", "above", "below"])
def backward_keys(
    gradient, g_batch, g_head, g_row, g_column,
    query, q_batch, q_head, q_row, q_column,
    key, k_batch, k_head, k_row, k_column,
    value, v_batch, v_head, v_row, v_column,
    top, log_mass, constant, entropy,
    scale, scale_batch, scale_head, scale_row,
    bias, bias_batch, bias_head, bias_row, bias_column,
    visible, visible_batch, visible_head, visible_row, visible_column,
    d_key, d_value,
    heads, length, keys, factor, softcap, above, below,
    GROUP: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_EV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LINEAR: tl.constexpr, SCALES: tl.constexpr, SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr, VISIBLE: tl.constexpr, ABOVE: tl.constexpr, BELOW: tl.constexpr, ENTROPY: tl.constexpr,
    DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BLOCK_N keys and values of one key head.

    A program sweeps the rows of all query heads that share the key head, BLOCK_M at a time. The grid is
    (blocks of keys x batch x key heads,).

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
        d_key, d_value: Results, contiguous, like the key and the value.
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
    blocks = tl.cdiv(keys, BLOCK_N)
    block = tl.program_id(0) % blocks  # keys that most rows see first
    which = (tl.program_id(0) // blocks).to(tl.int64)
    b = which // (heads // GROUP)
    key_head = which % (heads // GROUP)
    columns = block * BLOCK_N + tl.arange(0, BLOCK_N)
    there = columns < keys
    column_at = tl.where(there, columns, 0).to(tl.int64)
    k = load_matrix(key + b * k_batch + key_head * k_head, column_at * k_row, there, k_column, E, BLOCK_E, True, WIDEN)
    v = k
    if EV > 0:
        v = load_matrix(value + b * v_batch + key_head * v_head, column_at * v_row, there, v_column, EV, BLOCK_EV,
                        True, WIDEN)
    dk = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_EV if EV > 0 else 1], tl.float32)

    first = block * BLOCK_N
    last = tl.minimum(first + BLOCK_N, keys) - 1
    start, whole, ragged, stop = key_range(first, last, length, below, above, BLOCK_M, BELOW, ABOVE)
    if VISIBLE:
        ragged = whole
    for member in range(GROUP):
        head = key_head * GROUP + member
        q = query + b * q_batch + head * q_head
        g = gradient
        row_at = (b * heads + head) * length
        scale_at = b * scale_batch + head * scale_head
        bias_at = b * bias_batch + head * bias_head + column_at * bias_column
        visible_at = b * visible_batch + head * visible_head + column_at * visible_column
        q_tiles = None
        g_tiles = None
        if EV > 0:
            g = gradient + b * g_batch + head * g_head
        if DESCRIPTORS:
            q_tiles = tl.make_tensor_descriptor(q, [length, E], [q_row, 1], [BLOCK_M, BLOCK_E])
            if EV > 0:
                g_tiles = tl.make_tensor_descriptor(g, [length, EV], [g_row, 1], [BLOCK_M, BLOCK_EV])
        if ABOVE:
            dk, dv = sweep(
                start, tl.minimum(whole, stop), dk, dv, k, v, q, g, q_tiles, g_tiles, q_row, q_column, g_row, g_column,
                columns, there, length, top, log_mass, constant, entropy, scale, row_at, scale_at, scale_row, factor,
                softcap, bias, bias_at, bias_row, visible, visible_at, visible_row, above, below, True, E, EV, BLOCK_E,
                BLOCK_EV, BLOCK_M, LINEAR, SCALES, SOFTCAP, BIAS, VISIBLE, ABOVE, BELOW, ENTROPY, DESCRIPTORS, WIDEN,
                PRECISION)
        if not VISIBLE:
            dk, dv = sweep(
                whole, ragged, dk, dv, k, v, q, g, q_tiles, g_tiles, q_row, q_column, g_row, g_column, columns, there,
                length, top, log_mass, constant, entropy, scale, row_at, scale_at, scale_row, factor, softcap, bias,
                bias_at, bias_row, visible, visible_at, visible_row, above, below, False, E, EV, BLOCK_E, BLOCK_EV,
                BLOCK_M, LINEAR, SCALES, SOFTCAP, BIAS, VISIBLE, ABOVE, BELOW, ENTROPY, DESCRIPTORS, WIDEN, PRECISION)
        dk, dv = sweep(
            ragged, stop, dk, dv, k, v, q, g, q_tiles, g_tiles, q_row, q_column, g_row, g_column, columns, there,
            length, top, log_mass, constant, entropy, scale, row_at, scale_at, scale_row, factor, softcap, bias,
            bias_at, bias_row, visible, visible_at, visible_row, above, below, True, E, EV, BLOCK_E, BLOCK_EV, BLOCK_M,
            LINEAR, SCALES, SOFTCAP, BIAS, VISIBLE, ABOVE, BELOW, ENTROPY, DESCRIPTORS, WIDEN, PRECISION)

    if not SCALES:
        dk *= factor
    near = tl.arange(0, BLOCK_N)
    inside = near < keys - first
    to = which * keys + first
    widths = tl.arange(0, BLOCK_E)
    tl.store(d_key + to * E + (near[:, None] * E + widths[None, :]), dk.to(d_key.dtype.element_ty),
             mask=inside[:, None] & (widths < E)[None, :])
    if EV > 0:
        widths = tl.arange(0, BLOCK_EV)
        tl.store(d_value + to * EV + (near[:, None] * EV + widths[None, :]), dv.to(d_value.dtype.element_ty),
                 mask=inside[:, None] & (widths < EV)[None, :])
