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
    """Add the tiles of rows from `start` to `stop` to (dk, dv)."""
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
    """BLOCK_N keys of one key head, over the rows of all heads that share it, BLOCK_M at a time."""
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
