"""Planted errors of the Triton kernels, and which of the quick tests find each; patterns: `tests.planting`."""

from __future__ import annotations

from tests.planting.changes import Change, Planted, plant

GPU = "impl/gpu"
SHIFTED, CHAN, BLOCK, JOINED, FINISH = (
    f"{GPU}/row.py:{name}" for name in ("shifted", "chan", "block", "joined", "finish")
)
SEEN, RANGE = f"{GPU}/tile.py:seen_keys", f"{GPU}/tile.py:key_range"
COUNTED = f"{GPU}/tile.py:keys_in"
FORWARD, SWEEP, COMBINE = (f"{GPU}/forward.py:{name}" for name in ("forward", "sweep", "combine"))
DERIVED, CONSTANTS = f"{GPU}/backward.py:differentiate", f"{GPU}/backward.py:constants"
OF_ROWS, OF_KEYS = f"{GPU}/backward_rows.py", f"{GPU}/backward_keys.py"
OF_BIAS = f"{GPU}/backward_bias.py:backward_bias"

# Tests: a file, and what its tests are chosen by (`-k`).
STATISTICS = ("test_gpu_statistics.py", "float64")
BESIDE = ("test_gpu_statistics.py", "beside_a_bias")
SINK = ("test_gpu_statistics.py", "beside_a_sink")
EQUAL = ("test_gpu_statistics.py", "equal_logits")
ALONE = ("test_gpu_statistics.py", "each_statistic_alone")
MEANS = ("test_gpu_edges.py", "mean_is_finite")
MINUS = ("test_gpu_edges.py", "some_logits_of_minus_infinity")
NO_NUMBER = ("test_gpu_edges.py", "no_number_is_nan")
BLIND = ("test_gpu_edges.py", "blind_rows_are_those")
MEASURED = ("test_gpu_tiles.py", "measured_rows")
PARTS = ("test_gpu_tiles.py", "parts_give")
PLAIN = ("test_gpu_tiles.py", "agree and (all or widths)")
CAPPED = ("test_gpu_tiles.py", "agree and softcap")
WINDOW = ("test_gpu_tiles.py", "agree and (window or causal)")
PACKED = ("test_gpu_tiles.py", "agree and (packed or groups)")
BIAS = ("test_gpu_tiles.py", "agree and bias")
TABLE = ("test_triton_backward.py", "table")
SCALE = ("test_gpu_tiles.py", "agree and scale")
MASK = ("test_gpu_tiles.py", "agree and mask")
FEW = ("test_gpu_tiles.py", "agree and few")
GRADIENTS = ("test_gpu_torch.py", "each_result_alone")
FAR = ("test_gpu_offsets.py", "32_bits")
Tests = tuple[str, str]

MUTANTS: dict[str, tuple[Planted, Tests]] = {
    # functions
    "tanh: a term less": (
        plant(f"{GPU}/arithmetic.py:tanh", Change("A * B + 1.33314422036e-1", "A * B + 1.30e-1")),
        CAPPED,
    ),
    "tanh: sign lost": (
        plant(f"{GPU}/arithmetic.py:tanh", Change("tl.where(A < 0.0, -B, B)", "tl.where(A < 0.0, B, B)")),
        CAPPED,
    ),
    "log(1 + x): without what 1 + x lost": (
        plant(f"{GPU}/arithmetic.py:log1p", Change("tl.log(A) * B", "tl.log(A)")),
        STATISTICS,
    ),
    # statistics
    "logit of the old maximum forgotten": (
        plant(SHIFTED, Change("A + tl.maximum(B, FAR) * (1.0 + C)", "A + tl.maximum(B, FAR) * C")),
        STATISTICS,
    ),
    "old maximum does not join": (plant(SHIFTED, Change("A = B * A + C", "A = B * A")), STATISTICS),
    "mass without statistics not shifted": (plant(SHIFTED, Change("A = B * A", "pass")), ALONE),
    "squares shifted once": (plant(SHIFTED, Change("A = B * (B * A) + C", "A = B * A + C")), STATISTICS),
    "squares shifted by an underflow": (
        plant(SHIFTED, Change("A = B * (B * A) + C", "A = B * B * A + C")),
        STATISTICS,
    ),
    "old maximum's cube forgotten": (
        plant(SHIFTED, Change("A = B * (B * (B * A)) + C * D", "A = B * (B * (B * A))")),
        STATISTICS,
    ),
    "means of blocks apart": (
        plant(CHAN, Change("A + tl.where(B, C, 0.0) + D * (D * (E * F))", "A + tl.where(B, C, 0.0)")),
        STATISTICS,
    ),
    "means of blocks that overflow": (
        plant(CHAN, Change("D * (D * (E * F))", "D * D * E * F")),
        EQUAL,
    ),
    "mean moved by half": (plant(CHAN, Change("A + B * C + B * C", "A + B * C")), STATISTICS),
    "maximum of the last block": (plant(BLOCK, Change("A = tl.maximum(B, C)", "A = C", at=0)), STATISTICS),
    "ties counted once": (
        plant(BLOCK, Change("tl.floor(tl.sum(A, 1) - B + 0.5) - tl.where(C > D, 1.0, 0.0)", "tl.zeros_like(B)")),
        STATISTICS,
    ),
    "largest key among the others": (
        plant(BLOCK, Change("tl.where(A == B[:, None], 0.0, C)", "C")),
        STATISTICS,
    ),
    "spread of the last block": (
        plant(BLOCK, Change("A = A + tl.sum(B * tl.maximum(C, FAR), 1)", "A = tl.sum(B * tl.maximum(C, FAR), 1)")),
        STATISTICS,
    ),
    "squares of ties left out": (
        plant(BLOCK, Change("A + tl.sum(B, 1) + C * (ROOT * ROOT)", "A + tl.sum(B, 1)", at=0)),
        STATISTICS,
    ),
    "cubes are squares": (
        plant(BLOCK, Change("A + tl.sum(B * C, 1) + D * (ROOT * ROOT)", "A + tl.sum(B, 1) + D * (ROOT * ROOT)")),
        STATISTICS,
    ),
    "squares around nothing": (
        plant(BLOCK, Change("A * 0.5 - (B * 0.5)[:, None]", "A * 0.5")),
        STATISTICS,
    ),
    "mean of equal logits beside them": (
        plant(BLOCK, Change("tl.minimum(tl.maximum(A + B + B, C), D)", "(A + B + B) * 1.0000002")),
        EQUAL,
    ),
    "hidden keys counted": (
        plant(SWEEP, Change("tl.sum(A.to(tl.float32), 1)", "tl.sum(A.to(tl.float32), 1) + 1.0")),
        MASK,
    ),
    "weights without statistics not shifted": (
        plant(BLOCK, Change("A * B[:, None] - (C * B)[:, None]", "A * B[:, None]")),
        ALONE,
    ),
    "minimum of the last block": (
        plant(BLOCK, Change("A = tl.minimum(A, B)", "A = B")),
        STATISTICS,
    ),
    "ties of two parts counted once": (plant(JOINED, Change("A = A + B + C", "A = A + B", at=0)), STATISTICS),
    "squares of ties of two parts": (plant(JOINED, Change("A = A + B + C", "A = A + B", at=1)), STATISTICS),
    "keys of the first part": (plant(JOINED, Change("A = A + B", "pass")), ALONE),
    "minimum of the first part": (plant(JOINED, Change("tl.minimum(A, B)", "A")), PARTS),
    "sink left out of the mass": (
        plant(FINISH, Change("tl.where(A == -INF, 0.0, B + C)", "tl.where(A == -INF, 0.0, B)")),
        STATISTICS,
    ),
    "entropy in bits": (plant(FINISH, Change("A - B * LN_2 / C", "A - B / C")), STATISTICS),
    "collision without the largest": (
        plant(FINISH, Change("(A * (1.0 / ROOT / ROOT) + 1.0) / B / B", "A * (1.0 / ROOT / ROOT) / B / B")),
        STATISTICS,
    ),
    "norm of the Jacobian without cubes": (
        plant(FINISH, Change("A + B * B - 2.0 * C", "A + B * B")),
        STATISTICS,
    ),
    "a row of minus infinity is like any other": (
        plant(FINISH, Change("(A > 0.0) & (B == -INF)", "(A > 0.0) & (B == INF)")),
        MINUS,
    ),
    "NaN not looked for": (plant(FINISH, Change("(A != A) | (B == INF)", "B == INF")), NO_NUMBER),
    "blind rows are no number": (plant(FINISH, Change("tl.where(A, 0.0, NAN)", "tl.where(A, NAN, NAN)")), BLIND),
    # which keys
    "rows see one key less": (
        plant(SEEN, Change("A[None, :] <= B[:, None] + C", "A[None, :] < B[:, None] + C")),
        WINDOW,
    ),
    "rows see one key less behind": (
        plant(SEEN, Change("A[None, :] >= B[:, None] - C", "A[None, :] > B[:, None] - C")),
        WINDOW,
    ),
    "mask turned round": (plant(SEEN, Change("tl.load(*A, **B) != 0", "tl.load(*A, **B) == 0")), MASK),
    "first block of the band left out": (
        plant(RANGE, Change("tl.maximum(A - B, 0) // C * C", "tl.maximum(A - B, 0) // C * C + C")),
        WINDOW,
    ),
    "block that begins the band seen in full": (
        plant(RANGE, Change("(tl.maximum(A - B, 0) + C - 1) // C * C", "tl.maximum(A - B, 0) // C * C")),
        WINDOW,
    ),
    "last key of the band left out": (
        plant(RANGE, Change("tl.minimum(A, tl.maximum(B + C + 1, 0))", "tl.minimum(A, tl.maximum(B + C, 0))", at=0)),
        WINDOW,
    ),
    "block that ends the band seen in full": (
        plant(
            RANGE,
            Change(
                "tl.minimum(A, tl.maximum(B + C + 1, 0)) // D * D", "tl.minimum(A, tl.maximum(B + C + D, 0)) // D * D"
            ),
        ),
        WINDOW,
    ),
    "last, ragged block seen in full": (
        plant(RANGE, Change("A = B // C * C", "A = (B + C - 1) // C * C", at=0)),
        PLAIN,
    ),
    "bias subtracted": (
        plant(
            f"{GPU}/tile.py:biased",
            Change("A += tl.load(*B, **C).to(tl.float32)", "A -= tl.load(*B, **C).to(tl.float32)"),
        ),
        BIAS,
    ),
    "softcap's slope left out": (plant(f"{GPU}/tile.py:capped", Change("1.0 - A * A", "1.0 + 0.0 * A")), CAPPED),
    "offsets of keys in 32 bits": (
        plant(f"{GPU}/tile.py:load_keys", Change("A.to(tl.int64) * B", "A * B")),
        FAR,
    ),
    "offsets of rows in 32 bits": (
        plant(FORWARD, Change("A = B.to(tl.int64)", "A = B", at=2)),
        FAR,
    ),
    # forward
    "output of earlier blocks not shifted": (
        plant(SWEEP, Change("tl.dot(A, B, C * D[:, None], input_precision=P)", "tl.dot(A, B, C, input_precision=P)")),
        PLAIN,
    ),
    "rows of packed heads": (plant(FORWARD, Change("A % B if C else A", "A")), PACKED),
    "heads of packed rows": (plant(FORWARD, Change("A // B if C else tl.zeros_like(A)", "tl.zeros_like(A)")), PACKED),
    "sampled rows stand at the start": (plant(FORWARD, Change("tl.load(A + B) if C else B", "B")), MEASURED),
    "keys of the first head": (plant(FORWARD, Change("A += B * C + D // E * F", "A += B * C", at=0)), PACKED),
    "parts begin at the band": (
        plant(FORWARD, Change("A = tl.maximum(A, tl.program_id(1) * B)", "pass", at=0)),
        PARTS,
    ),
    "parts end with the keys": (
        plant(FORWARD, Change("A = tl.minimum(A, (tl.program_id(1) + 1) * B)", "pass", at=0)),
        PARTS,
    ),
    "sum of squares scaled once": (
        plant(FORWARD, Change("A * B, C * B, D * B, F * B * B", "A * B, C * B, D * B, F * B")),
        PLAIN,
    ),
    "a key more is counted": (
        plant(COUNTED, Change("tl.maximum(A - B, 0)", "tl.maximum(A - B + 1, 0)")),
        WINDOW,
    ),
    "counted from the first key": (plant(COUNTED, Change("A = tl.maximum(A, B - C)", "A = A")), WINDOW),
    "output of parts not shifted": (
        plant(COMBINE, Change("A * B[:, None] + C * D[:, None]", "A + C * D[:, None]")),
        PARTS,
    ),
    "sink of the first head beside parts": (
        plant(COMBINE, Change("A // B, A // C % D, A % C", "A // B, 0 * A, A % C")),
        FEW,
    ),
    # gradients
    "entropy's gradient turned round": (
        plant(DERIVED, Change("A -= B * (C * LN_2)", "A += B * (C * LN_2)")),
        GRADIENTS,
    ),
    "softcap's slope not applied": (plant(DERIVED, Change("A = B * C", "A = B", at=1)), CAPPED),
    "gradient at hidden keys": (plant(DERIVED, Change("A = tl.where(B, A, 0.0)", "pass", at=1)), WINDOW),
    "weights at hidden keys": (plant(DERIVED, Change("A = tl.where(B, A, 0.0)", "pass", at=0)), WINDOW),
    "output's part of the constant": (
        plant(CONSTANTS, Change("A -= tl.sum(B, 1)", "A += tl.sum(B, 1)")),
        GRADIENTS,
    ),
    "lse's gradient left out": (plant(CONSTANTS, Change("A += tl.load(*B, **C)", "pass")), GRADIENTS),
    "entropy's part of the constant": (
        plant(CONSTANTS, Change("A -= tl.load(*B, **C) * tl.load(*D, **F)", "pass")),
        GRADIENTS,
    ),
    "scale left out of dq": (plant(f"{OF_ROWS}:backward_rows", Change("A *= B", "pass")), GRADIENTS),
    "dq of the last block": (
        plant(
            f"{OF_ROWS}:sweep",
            Change(
                "tl.dot(A.to(B.dtype), B, C, input_precision=P)",
                "tl.dot(A.to(B.dtype), B, tl.zeros_like(C), input_precision=P)",
            ),
        ),
        PLAIN,
    ),
    "scale's gradient of the last block": (
        plant(f"{OF_ROWS}:sweep", Change("A += tl.sum(B, 1)", "A = tl.sum(B, 1)")),
        SCALE,
    ),
    "scale's gradient with hidden keys": (
        plant(f"{OF_ROWS}:sweep", Change("tl.where(A, B, 0.0)", "B + 0.001")),
        SCALE,
    ),
    "scale left out of dk": (plant(f"{OF_KEYS}:backward_keys", Change("A *= B", "pass")), GRADIENTS),
    "scale of rows left out of dk": (plant(f"{OF_KEYS}:sweep", Change("A *= B", "pass")), SCALE),
    "dv of the last tile": (
        plant(
            f"{OF_KEYS}:sweep",
            Change(
                "tl.dot(A.to(B.dtype), B, C, input_precision=P)",
                "tl.dot(A.to(B.dtype), B, tl.zeros_like(C), input_precision=P)",
                at=0,
            ),
        ),
        PLAIN,
    ),
    "gradients of one query head": (plant(f"{OF_KEYS}:backward_keys", Change("range(A)", "range(1)")), PACKED),
    "band of keys not turned over": (
        plant(
            f"{OF_KEYS}:backward_keys", Change("key_range(A, B, C, D, E, F, G, H)", "key_range(A, B, C, E, D, F, H, G)")
        ),
        WINDOW,
    ),
    "bias's gradient of the last pair": (plant(OF_BIAS, Change("A += B", "A = B")), BIAS),
    "bias's gradient of the first head": (plant(OF_BIAS, Change("0 if A else B % C", "0")), BIAS),
    "bias's gradient of blocks inside the band": (
        plant(OF_BIAS, Change("(A * B < C) | (A * B >= D)", "(A * B <= C) | (A * B >= D)")),
        BIAS,
    ),
    "table of distances one further": (
        plant(f"{GPU}/launch.py:placed", Change("A[..., B - 1 :]", "A[..., B:]")),
        TABLE,
    ),
    "table's gradient of a diagonal's first tile": (plant(OF_BIAS, Change("tl.minimum(A - B, C - D)", "1")), TABLE),
    "table's gradient moved by the rows beyond": (
        plant(f"{GPU}/backward_bias.py:summed_by_distance", Change("-A % B", "0")),
        TABLE,
    ),
    "sink's gradient without that of the entropy": (
        plant(f"{GPU}/gradients.py:_of_sinks", Change("A if B is None else C", "A")),
        FEW,
    ),
    "steps along a dimension of one": (plant(f"{GPU}/launch.py:strides", Change("0 if A == 1 else B", "B")), BIAS),
}
