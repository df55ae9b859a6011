"""The forward pass: one program per tile of rows, which sweeps the keys of its rows, and gathers their statistics.

    x = Q K^T;  m' = max(m, x);  p = e^(x - m');  O = O e^(m - m') + p V;  sums of p, p^2, p^3, p (x - m), (x - mean)^2

If nothing is added to the logits and the scale is one positive number, x is the product itself, and the scale goes into
the exponent. For few rows and many keys, the rows of heads that share a key head may be packed into one tile (PACKED),
and the keys split over programs (SPLIT), whose parts `combine` joins.
"""

import triton
import triton.language as tl

from sqrtdk.impl.gpu import row
from sqrtdk.impl.gpu.arithmetic import INF, LOG2_E
from sqrtdk.impl.gpu.tile import biased, capped, key_range, keys_in, load_keys, load_matrix, seen_keys


@triton.jit
def sweep(start, stop, state, acc, q, k, v, k_tiles, v_tiles, k_row, k_column, v_row, v_column, keys, positions, there,
          factor, unit, softcap, bias, bias_at, bias_column, visible, visible_at, visible_column, above, below,
          MASKED: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_EV: tl.constexpr,
          BLOCK_N: tl.constexpr, LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
          VISIBLE: tl.constexpr, ABOVE: tl.constexpr, BELOW: tl.constexpr, SUMS: tl.constexpr, LOWEST: tl.constexpr,
          MOMENTS: tl.constexpr, SPREAD: tl.constexpr, SQUARES: tl.constexpr, CUBES: tl.constexpr,
          DESCRIPTORS: tl.constexpr, WIDEN: tl.constexpr, PRECISION: tl.constexpr):
    """Add the blocks of keys from `start` to `stop` to the state of a tile of rows.

    Arguments that are not listed are those of `forward`.

    Kernel arguments:
        start, stop: First key and the key after the last; `start` is a multiple of BLOCK_N.
        state: The nine numbers of each row, float32 (M,) each, in the order of `row.empty`.
        acc: Sum of e^(z - m) v so far, float32 (M, BLOCK_EV), relative to the maximum m in `state`.
        q: Tile of queries, (M, BLOCK_E).
        k, v: Pointers to the keys and values of this head; `k_tiles` and `v_tiles` are their descriptors, or None.
        positions, there: int32 positions of the rows, and which rows of the tile exist, (M,) each.
        factor: Scale of each row, float32 (M,).
        unit: log2 e times the factor of x, float32 (M,): the factor is 1 unless LINEAR, where x is the plain product.
        bias_at, visible_at: Offsets of the rows in `bias` and `visible`, int64 (M,).
        MASKED: Whether some row may not see all of these keys; if False, no mask is applied.
        SUMS, LOWEST, MOMENTS, SPREAD, SQUARES, CUBES: Which statistics are accumulated, see `row`.

    Returns:
        The new state and the new `acc`.
    """
    top, rest, c2, c3, a, low, n, mean, m2 = state
    for j in range(start, stop, BLOCK_N):
        columns = j + tl.arange(0, BLOCK_N)
        key = load_keys(k, k_tiles, j, keys, k_row, k_column, E, BLOCK_E, BLOCK_N, DESCRIPTORS, MASKED, WIDEN)
        x = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        if not LINEAR:
            x, _ = capped(x * factor[:, None], softcap, SOFTCAP)
            x = biased(x, bias, bias_at, there, columns, bias_column, keys, BIAS, MASKED)
        seen = there[:, None]
        count = tl.zeros_like(n) + BLOCK_N
        if MASKED:
            seen = seen_keys(positions, there, columns, visible, visible_at, visible_column, keys, above, below,
                             VISIBLE, ABOVE, BELOW)
            x = tl.where(seen, x, -INF)
            if VISIBLE:
                count = tl.sum(seen.to(tl.float32), 1)
            else:
                count = keys_in(j, j + BLOCK_N, positions, there, keys, above, below, ABOVE, BELOW)
        p, keep, top, rest, c2, c3, a, low, n, mean, m2 = row.block(
            x, seen, count, top, rest, c2, c3, a, low, n, mean, m2, unit, MASKED, SUMS, LOWEST, MOMENTS, SPREAD,
            SQUARES, CUBES, LINEAR)
        if EV > 0:
            value = load_keys(v, v_tiles, j, keys, v_row, v_column, EV, BLOCK_EV, BLOCK_N, DESCRIPTORS, MASKED, WIDEN)
            acc = tl.dot(p.to(value.dtype), value, acc * keep[:, None], input_precision=PRECISION)
    return (top, rest, c2, c3, a, low, n, mean, m2), acc


@triton.jit(do_not_specialize=["batch", "heads", "length", "keys", "above", "below", "part"])
def forward(
    query, q_batch, q_head, q_row, q_column,
    key, k_batch, k_head, k_row, k_column,
    value, v_batch, v_head, v_row, v_column,
    scale, scale_batch, scale_head, scale_row,
    bias, bias_batch, bias_head, bias_row, bias_column,
    visible, visible_batch, visible_head, visible_row, visible_column,
    sinks, sink_batch, sink_head, sink_row,
    places,
    output, lse, levels, entropy, planes, parts,
    batch, heads, length, keys, factor, softcap, above, below, part,
    GROUP: tl.constexpr, E: tl.constexpr, EV: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_EV: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WANTED: tl.constexpr, LINEAR: tl.constexpr, SCALES: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, VISIBLE: tl.constexpr, SINKS: tl.constexpr, ABOVE: tl.constexpr,
    BELOW: tl.constexpr, PLACES: tl.constexpr, PACKED: tl.constexpr, SPLIT: tl.constexpr, DESCRIPTORS: tl.constexpr,
    WIDEN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the output and the statistics of one tile of rows, in one pass over its keys.

    A program handles BLOCK_M rows of one head or, if PACKED, of the GROUP heads that share a key head. The grid is
    (tiles x batch x heads or key heads, parts of the keys).

    Kernel arguments:
        query, key, value: Pointers to (B, Hq, L, E), (B, H, S, E) and (B, H, S, Ev). What follows each tensor are its
            strides in elements: q_batch, q_head, q_row, q_column, and so on; 0 along a dimension that is broadcast.
        scale: float32, broadcast to (B, Hq, L); used if SCALES, in place of `factor`.
        bias: Broadcast to (B, Hq, L, S), added to the logits if BIAS.
        visible: bool, broadcast to (B, Hq, L, S), False at hidden keys; used if VISIBLE.
        sinks: float32, broadcast to (B, Hq, L), the logit of one more key of value 0; used if SINKS.
        places: (L,) positions of the rows, used if PLACES; otherwise row i has position i.
        output, lse, levels, entropy, planes: Results, contiguous; shapes as in `operators.forward`.
        parts: float32 workspace for `combine`, 9 + Ev numbers for each row and part; used if SPLIT.
        batch, heads, length, keys: B, Hq, L and S.
        factor: The scale if not SCALES.
        softcap: c of c tanh(z / c), used if SOFTCAP.
        above, below: Row i sees the keys i - below (if BELOW) to i + above (if ABOVE).
        part: Number of keys of a part if SPLIT, a multiple of BLOCK_N.
        GROUP: Query heads for each key head.
        E, EV, BLOCK_E, BLOCK_EV: Widths, and the powers of two to which tiles are padded; with EV = 0 only statistics.
        BLOCK_M, BLOCK_N: Rows and keys of a tile.
        WANTED: Bits of the requested statistics, see `wanted`.
        LINEAR: Whether the logits are `factor` > 0 times the products, without scale tensor, bias and softcap.
        DESCRIPTORS: Whether keys and values are loaded by tensor descriptors.
        WIDEN: Whether loads are cast to float32 at once.
        PRECISION: `input_precision` of `tl.dot`.
    """
    SUMS: tl.constexpr = row.wants(WANTED, row.FOR_SUMS)
    SPREAD: tl.constexpr = row.wants(WANTED, row.FOR_SPREAD)
    CUBES: tl.constexpr = row.wants(WANTED, row.FOR_CUBES)
    SQUARES: tl.constexpr = row.wants(WANTED, row.FOR_SQUARES)
    MOMENTS: tl.constexpr = row.wants(WANTED, row.FOR_MOMENTS)
    LOWEST: tl.constexpr = row.wants(WANTED, row.FOR_LOWEST)
    GROUPED: tl.constexpr = GROUP if PACKED else 1  # heads of a tile

    # of one head; all in one grid dimension, as the others are limited to 65535
    tiles = tl.cdiv(length * GROUPED, BLOCK_M)
    tile = tiles - 1 - tl.program_id(0) % tiles  # rows that see most keys first
    which = tl.program_id(0) // tiles
    b = (which // (heads // GROUPED)).to(tl.int64)
    first_head = (which % (heads // GROUPED) * GROUPED).to(tl.int64)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    there = rows < length * GROUPED
    index = tl.where(there, rows % length if PACKED else rows, 0)
    head = first_head + (rows // length if PACKED else tl.zeros_like(rows))
    head = tl.where(there, head, first_head)
    positions = tl.load(places + index) if PLACES else index
    positions = positions.to(tl.int32)
    row_at = index.to(tl.int64)

    query += b * q_batch
    key += b * k_batch + first_head // GROUP * k_head
    q = load_matrix(query, head * q_head + row_at * q_row, there, q_column, E, BLOCK_E, True, WIDEN)
    factors = tl.full([BLOCK_M], 1.0, tl.float32) * factor
    if SCALES:
        factors = tl.load(scale + b * scale_batch + head * scale_head + row_at * scale_row)
    unit = factors * LOG2_E if LINEAR else tl.full([BLOCK_M], LOG2_E, tl.float32)
    bias_at = b * bias_batch + head * bias_head + row_at * bias_row
    visible_at = b * visible_batch + head * visible_head + row_at * visible_row
    k_tiles = None
    v_tiles = None
    if EV > 0:
        value += b * v_batch + first_head // GROUP * v_head
    if DESCRIPTORS:
        k_tiles = tl.make_tensor_descriptor(key, [keys, E], [k_row, 1], [BLOCK_N, BLOCK_E])
        if EV > 0:
            v_tiles = tl.make_tensor_descriptor(value, [keys, EV], [v_row, 1], [BLOCK_N, BLOCK_EV])

    if PLACES or PACKED:
        first = tl.min(tl.where(there, positions, 2**31 - 1))
        last = tl.max(tl.where(there, positions, 0))
    else:
        first = tile * BLOCK_M
        last = tl.minimum(first + BLOCK_M, length) - 1
    start, whole, ragged, stop = key_range(first, last, keys, above, below, BLOCK_N, ABOVE, BELOW)
    if VISIBLE:
        ragged = whole
    if SPLIT:
        start = tl.maximum(start, tl.program_id(1) * part)
        stop = tl.minimum(stop, (tl.program_id(1) + 1) * part)
        whole = tl.maximum(whole, start)
        ragged = tl.minimum(ragged, (tl.program_id(1) + 1) * part)
        ragged = tl.maximum(ragged, whole)

    state = row.empty(BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_EV if EV > 0 else 1], tl.float32)
    if BELOW:
        state, acc = sweep(
            start, tl.minimum(whole, stop), state, acc, q, key, value, k_tiles, v_tiles, k_row, k_column, v_row,
            v_column, keys, positions, there, factors, unit, softcap, bias, bias_at, bias_column, visible, visible_at,
            visible_column, above, below, True, E, EV, BLOCK_E, BLOCK_EV, BLOCK_N, LINEAR, SOFTCAP, BIAS, VISIBLE,
            ABOVE, BELOW, SUMS, LOWEST, MOMENTS, SPREAD, SQUARES, CUBES, DESCRIPTORS, WIDEN, PRECISION)
    else:
        whole = start
    if not VISIBLE:
        state, acc = sweep(
            whole, ragged, state, acc, q, key, value, k_tiles, v_tiles, k_row, k_column, v_row, v_column, keys,
            positions, there, factors, unit, softcap, bias, bias_at, bias_column, visible, visible_at, visible_column,
            above, below, False, E, EV, BLOCK_E, BLOCK_EV, BLOCK_N, LINEAR, SOFTCAP, BIAS, VISIBLE, ABOVE, BELOW, SUMS,
            LOWEST, MOMENTS, SPREAD, SQUARES, CUBES, DESCRIPTORS, WIDEN, PRECISION)
    else:
        ragged = whole
    state, acc = sweep(
        ragged, stop, state, acc, q, key, value, k_tiles, v_tiles, k_row, k_column, v_row, v_column, keys, positions,
        there, factors, unit, softcap, bias, bias_at, bias_column, visible, visible_at, visible_column, above, below,
        True, E, EV, BLOCK_E, BLOCK_EV, BLOCK_N, LINEAR, SOFTCAP, BIAS, VISIBLE, ABOVE, BELOW, SUMS, LOWEST, MOMENTS,
        SPREAD, SQUARES, CUBES, DESCRIPTORS, WIDEN, PRECISION)

    top, rest, c2, c3, a, low, n, mean, m2 = state
    if LINEAR:
        top, low, mean, m2 = top * factors, low * factors, mean * factors, m2 * factors * factors
    at = (b * heads + head) * length + row_at
    plane = batch.to(tl.int64) * heads * length
    widths = tl.arange(0, BLOCK_EV if EV > 0 else 1)
    if SPLIT:
        at += tl.program_id(1) * plane
        step = tl.num_programs(1) * plane
        for_parts = (top, rest, c2, c3, a, low, n, mean, m2)
        for i in tl.static_range(9):
            tl.store(parts + i * step + at, for_parts[i], mask=there)
        if EV > 0:
            to = parts + 9 * step + at[:, None] * EV + widths[None, :]
            tl.store(to, acc, mask=there[:, None] & (widths < EV)[None, :])
    else:
        sink = top
        if SINKS:
            sink = tl.load(sinks + b * sink_batch + head * sink_head + row_at * sink_row)
        share = row.finish(top, rest, c2, c3, a, low, n, mean, m2, sink, lse, levels, entropy, planes, plane, at, there,
                           SINKS, SUMS, WANTED)
        if EV > 0:
            out = tl.where(share[:, None] == 0.0, 0.0, acc * share[:, None])
            to = output + at[:, None] * EV + widths[None, :]
            tl.store(to, out.to(output.dtype.element_ty), mask=there[:, None] & (widths < EV)[None, :])


@triton.jit(do_not_specialize=["batch", "heads", "length", "splits"])
def combine(
    parts, sinks, sink_batch, sink_head, sink_row, output, lse, levels, entropy, planes, batch, heads, length,
    splits,
    EV: tl.constexpr, BLOCK_EV: tl.constexpr, BLOCK_M: tl.constexpr, WANTED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Join the results that `forward` wrote for the parts of the keys, and write the final results of BLOCK_M rows.

    A program handles BLOCK_M of all B x Hq x L rows, and joins their parts in the order of the keys.

    Kernel arguments:
        parts: The workspace that `forward` filled: nine numbers of each part and row, then its weighted values.
        sinks: As in `forward`, with its strides.
        output, lse, levels, entropy, planes: Results, contiguous; shapes as in `operators.forward`.
        batch, heads, length: B, Hq and L.
        splits: Number of parts.
        EV, BLOCK_EV: Width of the values, and the power of two to which it is padded.
        BLOCK_M: Rows of a program.
        WANTED: Bits of the requested statistics, see `wanted`.
        SINKS: Whether there are sinks.
    """
    SUMS: tl.constexpr = row.wants(WANTED, row.FOR_SUMS)
    SPREAD: tl.constexpr = row.wants(WANTED, row.FOR_SPREAD)
    CUBES: tl.constexpr = row.wants(WANTED, row.FOR_CUBES)
    SQUARES: tl.constexpr = row.wants(WANTED, row.FOR_SQUARES)
    MOMENTS: tl.constexpr = row.wants(WANTED, row.FOR_MOMENTS)
    plane = batch.to(tl.int64) * heads * length
    at = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = at < plane
    at = tl.where(there, at, 0)
    widths = tl.arange(0, BLOCK_EV)
    inside = there[:, None] & (widths < EV)[None, :]
    top, rest, c2, c3, a, low, n, mean, m2 = row.empty(BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_EV], tl.float32)
    step = splits * plane
    for i in range(splits):
        of = parts + i * plane + at
        keep, keep_, top, rest, c2, c3, a, low, n, mean, m2 = row.joined(
            top, rest, c2, c3, a, low, n, mean, m2, tl.load(of), tl.load(of + step), tl.load(of + 2 * step),
            tl.load(of + 3 * step), tl.load(of + 4 * step), tl.load(of + 5 * step), tl.load(of + 6 * step),
            tl.load(of + 7 * step), tl.load(of + 8 * step), SUMS, MOMENTS, SPREAD, SQUARES, CUBES)
        if EV > 0:
            more = tl.load(parts + 9 * step + (i * plane + at)[:, None] * EV + widths[None, :], mask=inside, other=0.0)
            acc = acc * keep[:, None] + more * keep_[:, None]
    sink = top
    if SINKS:
        b, head, i = at // (heads * length), at // length % heads, at % length
        sink = tl.load(sinks + b * sink_batch + head * sink_head + i * sink_row)
    share = row.finish(top, rest, c2, c3, a, low, n, mean, m2, sink, lse, levels, entropy, planes, plane, at, there,
                       SINKS, SUMS, WANTED)
    if EV > 0:
        out = tl.where(share[:, None] == 0.0, 0.0, acc * share[:, None])
        tl.store(output + at[:, None] * EV + widths[None, :], out.to(output.dtype.element_ty), mask=inside)
