"""The backward pass: code shared by its kernels, and the sum over each row that precedes them.

    P = e^(Z - m - log l);  dZ = P (dO V^T + c - dH log P);  c = -sum dO O + dlse - dH H

The logits are computed again, once for the gradients of keys and values (`backward_keys`) and once for those of queries
and scale (`backward_rows`): every sum has one program and one order, so two runs give the same bits.
"""

import triton
import triton.language as tl

from sqrtdk.impl.gpu.arithmetic import LN_2, LOG2_E
from sqrtdk.impl.gpu.tile import biased, capped, load_matrix

LOWEST = tl.constexpr(-160.0)  # 2^LOWEST is 0; an infinite logarithm times a weight of 0 would be NaN


@triton.jit
def differentiate(x, dp, seen, factor, top, log_mass, constant, entropy, softcap, bias, bias_at, there, others,
                  bias_stride, count, LINEAR: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr,
                  ENTROPY: tl.constexpr, MASKED: tl.constexpr):
    """Return the weights and the gradients of the logits of a tile, which are computed again from the products.

    A tile has either rows down and keys across, (M, N), or keys down and rows across, (N, M).

    Kernel arguments:
        x: Products q . k, float32.
        dp: Products of the output's gradient and the values, dO V^T, like `x`; 0.0 if the values have width 0.
        seen: bool, False at pairs whose row does not see the key; used if MASKED.
        factor, top, log_mass, constant, entropy: Scale, m, log l, c and dH of the rows, as a column or a row that
            broadcasts to the tile.
        softcap: c of c tanh(z / c), used if SOFTCAP.
        bias: Pointer to the bias, used if BIAS.
        bias_at: Offsets in `bias` of what runs down, int64.
        there: Which of what runs down exists, bool.
        others: Indices of what runs across; of them those below `count` exist.
        bias_stride: Stride of the bias along `others`.
        count: Number of all rows or keys that run across.
        LINEAR: Whether there is no bias and no softcap.

    Returns:
        P, the gradient of the logits after bias, and the gradient of the scaled logits before the softcap.
    """
    if LINEAR:
        t = x * (factor * LOG2_E) - (top + log_mass) * LOG2_E
    else:
        z, slope = capped(x * factor, softcap, SOFTCAP)
        z = biased(z, bias, bias_at, there, others, bias_stride, count, BIAS, MASKED)
        t = (z - top - log_mass) * LOG2_E  # in this order: a bias may be -3.4e38, beside which a mass is lost
    p = tl.exp2(tl.minimum(t, 0.0, propagate_nan=tl.PropagateNan.ALL))  # rounded, so t may exceed 0 slightly
    inner = dp + constant
    if ENTROPY:
        inner -= entropy * (tl.maximum(t, LOWEST, propagate_nan=tl.PropagateNan.ALL) * LN_2)
    added = p * inner
    if MASKED:
        p = tl.where(seen, p, 0.0)
        added = tl.where(seen, added, 0.0)
    dz = added
    if SOFTCAP:
        dz = added * slope
        if MASKED:
            dz = tl.where(seen, dz, 0.0)
    return p, added, dz


@triton.jit
def row_terms(top, log_mass, constant, entropy, scale, at, scale_at, factor, there, ENTROPY: tl.constexpr,
              SCALES: tl.constexpr, MASKED: tl.constexpr):
    """Load what the backward pass needs of some rows.

    Kernel arguments:
        top, log_mass, constant, entropy, scale: Pointers; `entropy` is read if ENTROPY, `scale` if SCALES.
        at: Indices of the rows in the first four.
        scale_at: Offsets of the rows in `scale`.
        factor: The scale of all rows if not SCALES.
        there: Which rows exist, bool.
        MASKED: Whether some rows may not exist; what is loaded for these is 0.

    Returns:
        (top, log_mass, constant, entropy, scale) of the rows; entropy is 0.0 if not ENTROPY, and scale is `factor` if
        not SCALES.
    """
    of_entropy = 0.0
    of_scale = factor
    if MASKED:
        of_top = tl.load(top + at, mask=there, other=0.0)
        of_mass = tl.load(log_mass + at, mask=there, other=0.0)
        of_constant = tl.load(constant + at, mask=there, other=0.0)
        if ENTROPY:
            of_entropy = tl.load(entropy + at, mask=there, other=0.0)
        if SCALES:
            of_scale = tl.load(scale + scale_at, mask=there, other=0.0)
    else:
        of_top = tl.load(top + at)
        of_mass = tl.load(log_mass + at)
        of_constant = tl.load(constant + at)
        if ENTROPY:
            of_entropy = tl.load(entropy + at)
        if SCALES:
            of_scale = tl.load(scale + scale_at)
    return of_top, of_mass, of_constant, of_entropy, of_scale


@triton.jit(do_not_specialize=["rows", "heads", "length"])
def constants(
    gradient, g_batch, g_head, g_row, g_column,
    output, o_batch, o_head, o_row, o_column,
    d_lse, d_entropy, entropy, constant,
    rows, heads, length,
    EV: tl.constexpr, BLOCK_EV: tl.constexpr, BLOCK_M: tl.constexpr, LSE: tl.constexpr, ENTROPY: tl.constexpr,
):  # fmt: skip
    """Compute c = -sum dO O + dlse - dH H of BLOCK_M rows.

    Kernel arguments:
        gradient, output: Pointers to dO and O, (B, Hq, L, Ev), each followed by its four strides in elements.
        d_lse: Gradient of lse, (B, Hq, L), contiguous; used if LSE.
        d_entropy, entropy: dH and H, likewise; used if ENTROPY.
        constant: Result, float32 (B, Hq, L), contiguous.
        rows: Number of all rows, B x Hq x L.
        heads, length: Hq and L.
        EV, BLOCK_EV: Width of the values, and the power of two to which it is padded.
        BLOCK_M: Rows of a program.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    there = at < rows
    at = tl.where(there, at, 0)
    i = at % length
    head = at // length % heads
    b = at // length // heads
    c = tl.zeros([BLOCK_M], tl.float32)
    if EV > 0:
        g = load_matrix(gradient, b * g_batch + head * g_head + i * g_row, there, g_column, EV, BLOCK_EV, True, False)
        o = load_matrix(output, b * o_batch + head * o_head + i * o_row, there, o_column, EV, BLOCK_EV, True, False)
        c -= tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    if LSE:
        c += tl.load(d_lse + at, mask=there, other=0.0)
    if ENTROPY:
        c -= tl.load(d_entropy + at, mask=there, other=0.0) * tl.load(entropy + at, mask=there, other=0.0)
    tl.store(constant + at, c, mask=there)
