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
    """(weights, gradient of the logits after bias, gradient of the logits before the softcap) of a tile.

    Rows may run down the tile or across it: `factor`, `top`, `log_mass`,
    `constant` and `entropy` have the shape of the rows. The
    bias of what runs down lies at `bias_at`; the `count` elements of `others` run across.
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
    """(top, log_mass, constant, entropy, factor) of some rows; if MASKED, 0 where not `there`."""
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
    """The c of BLOCK_M of all `rows` = batch x heads x length rows."""
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
