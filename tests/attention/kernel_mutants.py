"""Planted errors of the compiled kernel: the file, and pairs of a text that stands there once and the text instead."""

from __future__ import annotations

FORWARD, ROW, DECODE, BACKWARD, OPERANDS, LANES = (
    f"impl/kernel/{name}.h" for name in ("forward", "row", "decode", "backward", "operands", "lanes")
)
GRADIENT = "impl/kernel/operators.py"

MUTANTS: dict[str, tuple[str, str, str]] = {
    # sixteen numbers at once
    "exponential: a term less": (LANES, "_mm512_set1_ps(2.4022242141879252e-1f)", "_mm512_set1_ps(2.40e-1f)"),
    "exponential: floor too high": (LANES, "_mm512_set1_ps(-110.0f)", "_mm512_set1_ps(-10.0f)"),
    "tanh: sign lost": (LANES, "_mm512_or_ps(large, sign)", "large"),
    "dot product of every second run": (LANES, "_mm512_add_ps(even, odd)", "even"),
    "mask of sixteen keys as one": (LANES, "!visible[k * column]", "!visible[0]"),
    # operands
    "rows see one key more": (OPERANDS, "row + above + 1", "row + above + 2"),
    "rows see one key less behind": (OPERANDS, "row - below, 0", "row - below + 1, 0"),
    "scale of the first head": (OPERANDS, "*scale->at(b, h, row)", "*scale->at(b, 0, row)"),
    # statistics
    "sums not shifted to the larger maximum": (ROW, "rest = f * (1.0f + rest);", "rest = f * rest;"),
    "logit of the old maximum forgotten": (ROW, "a = f * (a + d * (1.0f + rest));", "a = f * a;"),
    "old maximum not squared": (ROW, "c2 = f * f * c2 + square;", "c2 = f * f * c2;"),
    "means of blocks apart": (ROW, "m2 += squares + delta * delta * n * count / whole;", "m2 += squares;"),
    "sink not in the mass": (ROW, "row.rest + own;", "row.rest;"),
    "sink larger than the keys": (ROW, "? keep * mass", "? mass"),
    "ties counted once": (FORWARD, "ties > 1 ? static_cast<float>(ties - 1) : 0.0f", "0.0f"),
    "centred at nothing": (FORWARD, "_mm512_sub_ps(x, middle)", "x"),
    "output of earlier blocks not shifted": (FORWARD, "o[e] *= keep", "o[e] *= 1.0f"),
    # blocks and tiles
    "first block is the first of all": (
        FORWARD,
        "call_.first(start) / BLOCK * BLOCK",
        "call_.first(start) / BLOCK * 0",
    ),
    "last block of the first row": (FORWARD, "end = call_.last(start + rows - 1)", "end = call_.last(start)"),
    "bias of the first block": (FORWARD, "bias + j + c)", "bias + c)"),
    "mask of the first block": (FORWARD, "visible + (j + c) *", "visible + c *"),
    "softcap before the scale": (FORWARD, "_mm512_mul_ps(cap, tanh_ps(_mm512_div_ps(x, cap)))", "tanh_ps(x)"),
    "values of the first key head": (FORWARD, "values_of(b, h * vh / call.heads)", "values_of(b, 0)"),
    # few rows
    "a part of the keys twice": (DECODE, "for (int64_t part = 1; part < parts", "for (int64_t part = 0; part < parts"),
    "keys of the band from a block on": (DECODE, "call.first(0) / BLOCK,", "call.first(0) / BLOCK + 1,"),
    "ragged end of the values left out": (FORWARD, "c = whole; c < n;", "c = n; c < n;"),
    "parts not shifted": (ROW, "(keep == 0.0f ? 0.0f : keep * o[e]) + add * more[e]", "o[e] + more[e]"),
    # gradients
    "softcap's slope left out": (
        BACKWARD,
        "slope = _mm512_mul_ps(slope, _mm512_fnmadd_ps(t, t, _mm512_set1_ps(1.0f)));",
        "",
    ),
    "entropy's gradient turned round": (
        BACKWARD,
        "_mm512_fnmadd_ps(_mm512_loadu_ps(&terms_.entropy[at])",
        "_mm512_fmadd_ps(_mm512_loadu_ps(&terms_.entropy[at])",
    ),
    "scale left out of the gradient": (
        BACKWARD,
        "_mm512_mul_ps(p, inner), slope)",
        "_mm512_mul_ps(p, inner), _mm512_set1_ps(1.0f))",
    ),
    "gradients of one query head": (BACKWARD, "h < (column % kh + 1) * group", "h < column % kh * group + 1"),
    "parts of dq not summed": (BACKWARD, "sum += source[part * plane", "sum = source[part * plane"),
    "lse's gradient left out": (GRADIENT, "constant = constant + d_lse", "pass"),
    "entropy's gradient without the entropy": (GRADIENT, "constant = constant - d_entropy * entropy", "pass"),
    "sink's gradient without that of the entropy": (GRADIENT, "constant - d_entropy * log_weight", "constant"),
}
