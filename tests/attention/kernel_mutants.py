"""Planted errors of the compiled kernel; see `tests.planting` for the patterns."""

from __future__ import annotations

from tests.planting.changes import Change, Planted, plant

LANES, MASKS, OPERANDS, ROW, FORWARD, DECODE, TURNED, BACKWARD, DROPOUT = (
    f"impl/kernel/{name}.h"
    for name in ("lanes", "masks", "operands", "row", "forward", "decode", "turned", "backward", "dropout")
)
SHIFT, FINISH, BLOCK_ROW = f"{ROW}:shift", f"{ROW}:finish", f"{FORWARD}:block_row"
RUN, PREPARE, STRETCH = f"{FORWARD}:run", f"{FORWARD}:prepare", f"{FORWARD}:stretch"
BIAS_ROW = f"{FORWARD}:bias_row"
GRADIENT = "impl/kernel/operators.py:_backward"

MUTANTS: dict[str, Planted] = {
    # sixteen numbers at once
    "exponential: a term less": plant(f"{LANES}:power_of_two", Change("+ 2.4022242141879252e-1f", "+ 2.40e-1f")),
    "exponential: floor too high": plant(f"{LANES}:at_least_floor", Change("-159.0f", "-14.0f")),
    "tanh: sign lost": plant(f"{LANES}:tanh", Change("| A);", "| 0);")),
    "dot product of every second run": plant(f"{LANES}:dot", Change("return F(A + B) + C;", "return F(A) + C;")),
    "mask of sixteen keys as one": plant(f"{MASKS}:shown", Change("&& A[B * C]", "&& A[0]")),
    # operands
    "rows see one key more": plant(f"{OPERANDS}:last", Change("(A + 1, 0, B)", "(A + 2, 0, B)")),
    "rows see one key less behind": plant(f"{OPERANDS}:first", Change("(A - B, 0, C)", "(A - B + 1, 0, C)")),
    "scale of the first head": plant(f"{OPERANDS}:factor_of", Change("(A, B, C)", "(A, 0, C)")),
    # statistics
    "sums not shifted to the larger maximum": plant(SHIFT, Change("= A * (1.0f + B);", "= A * B;")),
    "logit of the old maximum forgotten": plant(SHIFT, Change("= A * (B + C * (1.0f + D));", "= A * B;")),
    "old maximum not squared": plant(SHIFT, Change("; B = A * A * B + C;", "; B = A * A * B;")),
    "means of blocks apart": plant(f"{ROW}:add", Change("+= A + B * B * C * D / E;", "+= A;")),
    "sink not in the mass": plant(FINISH, Change("? A * B : C + D;", "? A * B : C;")),
    "sink larger than the keys": plant(FINISH, Change("? A * B : C + D;", "? B : C + D;")),
    "ties counted once": plant(BLOCK_ROW, Change("= A > 1 ? static_cast<float>(A - 1) : 0.0f;", "= 0.0f;")),
    "centred at nothing": plant(BLOCK_ROW, Change("(A + B) * (A + B)", "A * A")),
    "entropy in units of log 2": plant(BLOCK_ROW, Change("+= A * F(B);", "+= F(B);")),
    "largest logit of a negative scale": plant(BLOCK_ROW, Change("= A ? F(B) : G(C),", "= G(C),")),
    "output of earlier blocks not shifted": plant(BLOCK_ROW, Change("] *= A;", "] *= 1.0f;")),
    # blocks and tiles
    "first block of the band left out": plant(RUN, Change("/ A * A,", "/ A * A + A,")),
    "last block of the first row": plant(RUN, Change("(A + B - 1);", "(A);")),
    "keys of a block from its first on": plant(RUN, Change(", A + B * C + D * E<T>,", ", A + B * C,")),
    "last run of keys that a mask shows": plant(
        f"{OPERANDS}:shown", Change("for (int64_t A = (B - 1) / C * C;", "for (int64_t A = (B - 1) / C * C - C;")
    ),
    "first keys of a row that a mask shows": plant(
        PREPARE, Change("= A; B += C, D = A + E;", "= A + E; B += C, D = A + E;")
    ),
    "gradient of the first keys of a block": plant(
        f"{BACKWARD}:backward", Change(", A.F() + B * C);", ", A.F());", at=1)
    ),
    "bias of the first block": plant(BIAS_ROW, Change("return A->F(B, C, D) + E;", "return A->F(B, C, D);")),
    "a bias that is widened: the first of sixteen rows": plant(BIAS_ROW, Change("return A + B % C * D;", "return A;")),
    "a bias that is widened: some rows of a band": plant(BIAS_ROW, Change("(A + B - 1);", "(A);")),
    "turned bias: rows and keys": plant(
        f"{OPERANDS}:read_bias",
        Change("static_cast<float>(A[B * C + D * E])", "static_cast<float>(A[D * C + B * E])", at=1),
    ),
    "mask of the first block": plant(PREPARE, Change("(A + (B + C) * D,", "(A + C * D,")),
    "softcap before the scale": plant(PREPARE, Change("* F(A / G(B))", "* F(A)")),
    "values of the first key head": plant(f"{FORWARD}:forward", Change("(A, B * C / D)", "(A, 0)")),
    # few rows
    "a part of the keys twice": plant(
        f"{DECODE}:decode", Change("for (int64_t A = 1; A < B; ++A)", "for (int64_t A = 0; A < B; ++A)")
    ),
    "keys of the band from a block on": plant(f"{DECODE}:decode", Change("(0) / A,", "(0) / A + 1,")),
    "ragged end of the values left out": plant(
        STRETCH, Change("for (int64_t A = B; A < C; ++A)", "for (int64_t A = C; A < C; ++A)", at=2)
    ),
    "parts not shifted": plant(f"{ROW}:join", Change("= (A == 0.0f ? 0.0f : A * B) + C * D;", "= B + D;")),
    # gradients
    "softcap's slope left out": plant(
        f"{TURNED}:one",
        Change("= A * (F(1.0f) - B * B);", "= A;"),
    ),
    "entropy's gradient turned round": plant(
        f"{TURNED}:one",
        Change("- F(A) * B);", "+ F(A) * B);"),
    ),
    "mass lost beside a large maximum": plant(
        f"{TURNED}:one", Change("= A - F(&B[C]) - F(&D[C]);", "= A - (F(&B[C]) + F(&D[C]));")
    ),
    "scale left out of the gradient": plant(
        f"{TURNED}:one",
        Change("= F(A, B * C);", "= F(A, B);"),
    ),
    "gradients of one query head": plant(f"{BACKWARD}:backward", Change("< (A % B + 1) * C;", "< A % B * C + 1;")),
    "parts of dq not summed": plant(f"{BACKWARD}:backward", Change("+= A[B * C + D * E];", "= A[B * C + D * E];")),
    # dropout, and the gradient of a bias
    "dropout not scaled": plant(f"{ROW}:finish", Change("? A->B : 1.0f", "? 1.0f : 1.0f")),
    "dropout of another key": plant(f"{DROPOUT}:apply", Change("(A + B) / C, 1,", "(A + B) / C + 1, 1,")),
    "a round of dropout's words less": plant(f"{DROPOUT}:draw", Change("< 10;", "< 9;")),
    "dropout left out of the gradient": plant(f"{TURNED}:one", Change("= A * B, C = D * B;", "= A, C = D * B;")),
    "gradient of a bias squared": plant(f"{TURNED}:one", Change(", F(A, B));", ", F(A, B * B));")),
    "gradient of the bias of the last run alone": plant(f"{TURNED}:add_to_bias", Change("(A, F(A) + B);", "(A, B);")),
    "table of distances alike for all rows": plant(f"{OPERANDS}:bias_view", Change("= -1;", "= 0;")),
    "bias beside a table left out": plant(f"{TURNED}:fetch_biases", Change("{ A += B; }", "{ A = B; }")),
    "a gradient's second bias": plant(f"{BACKWARD}:sum", Change("(A > 1 ? B : 0);", "0;")),
    "heads that share a bias": plant(
        f"{BACKWARD}:Units", Change("= F(1) ? A : 1, B = F(1) ? 1 : A;", "= 1, B = F(1) ? 1 : A;", at=0)
    ),
    "lse's gradient left out": plant(GRADIENT, Change("A = A + B", "pass")),
    "entropy's gradient without the entropy": plant(GRADIENT, Change("A = A - B * C", "pass")),
    "sink's gradient without that of the entropy": plant(
        GRADIENT, Change("A if B is None else A - B * C", "A if B is None else A")
    ),
}
