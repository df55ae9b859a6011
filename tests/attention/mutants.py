"""Planted errors of the operation and of each implementation but the compiled kernel; patterns: `tests.planting`."""

from __future__ import annotations

from tests.planting.changes import Change, Planted, plant

ATTEND, LOGITS, SOFTMAX, ROW_STATS = (
    f"impl/rows.py:{name}" for name in ("weighed_rows", "row_logits", "_softmax", "traceable_row_stats")
)
SEEN, COUNT, GROW = "impl/call.py:Call.visible_mask", "impl/call.py:Call.visible_keys", "impl/call.py:repeat_key_heads"
RESOLVE, MASKS = "_resolve.py:resolve_arguments", "_resolve.py:_masks"
AUX, MERGED = "stats/request.py:aux_output", "stats/_partial.py:RowStats.merged"
FUSED, SWEPT = "impl/fused.py:_fused", "impl/fused.py:swept"
TILE, TIES = "stats/_tile.py:exponentials", "stats/_tile.py:reduce_tile"
SWEEP, VALUES = "stats/_sweep.py:_rows", "stats/_block.py:Values.__call__"
MOMENTS = "stats/tiles.py:ProductSource.moments"
CPU, BAND, IN_BAND = "impl/cpu.py:_run", "impl/call.py:Call.band", "masks/band.py:in_band"

SCALE = "F(S, A, B).to(T) if isinstance(S, Tensor) else S"
SCALED = f"Z = Z * ({SCALE})"
CAPPED = "Z = C * torch.tanh(Z / C)"
BIASED = "Z = Z + A.to(B)"
SUNK = "A = A + torch.exp(B - C)"

MUTANTS: dict[str, Planted] = {
    # logits
    "scale off by 0.1%": plant(LOGITS, Change(f"Z * ({SCALE})", f"Z * ({SCALE}) * 1.001")),
    "scale left out": plant(LOGITS, Change(SCALED, "pass")),
    "scale twice": plant(LOGITS, Change(SCALED, f"{SCALED}; {SCALED}")),
    "scale of the first rows for every block": plant(
        LOGITS, Change(SCALE, "F(S, 0, B - A).to(T) if isinstance(S, Tensor) else S")
    ),
    "scale without its gradient": plant(
        LOGITS, Change(SCALE, "F(S, A, B).to(T).detach() if isinstance(S, Tensor) else S")
    ),
    "scale's gradient off by 0.1%": plant(
        LOGITS,
        Change(SCALE, "F(S, A, B).to(T).mul(1.001).sub(0.001 * F(S, A, B).detach()) if isinstance(S, Tensor) else S"),
    ),
    "softcap without its factor": plant(LOGITS, Change("C * torch.tanh(Z / C)", "torch.tanh(Z / C)")),
    "softcap without its division": plant(LOGITS, Change("C * torch.tanh(Z / C)", "C * torch.tanh(Z)")),
    "softcap clamps": plant(LOGITS, Change("C * torch.tanh(Z / C)", "Z.clamp(-C, C)")),
    "softcap after the bias": plant(
        LOGITS, Change(CAPPED, "pass"), Change(f"if D: {BIASED}", f"if D: {BIASED}\nif C: {CAPPED}")
    ),
    "softcap before the scale": plant(LOGITS, Change(CAPPED, "pass"), Change(SCALED, f"if C: {CAPPED}\n{SCALED}")),
    "bias scaled": plant(LOGITS, Change("isinstance(S, Tensor)"), Change("Z + A.to(B)", "Z + A.to(B) * S")),
    "bias subtracted": plant(LOGITS, Change("Z + A.to(B)", "Z - A.to(B)")),
    "bias left out": plant(LOGITS, Change(BIASED, "pass")),
    "bias without its gradient": plant(LOGITS, Change("Z + A.to(B)", "Z + A.to(B).detach()")),
    "bias's gradient off by 0.1%": plant(LOGITS, Change("Z + A.to(B)", "Z - 0.001 * A.detach() + 1.001 * A.to(B)")),
    "bias of the first rows for every block": plant(LOGITS, Change("Z + F(A, B, C).to(D)", "Z + F(A, 0, C - B).to(D)")),
    "content term not scaled": plant(
        LOGITS, Change("if A.B: Z = Z + T", "if False: pass"), Change("T is not None and C and not D", "T is not None")
    ),
    "bias term scaled": plant(
        LOGITS, Change("if A.B: Z = Z + T", "if True: Z = Z + T"), Change("T is not None and C and not D", "False")
    ),
    "positions of rows without the shift": plant(LOGITS, Change("F(*A, B + C, D)", "F(*A, B, D)")),
    "positions of the first rows for every block": plant(LOGITS, Change("A.positions(B, C)", "A.positions(0, C - B)")),
    "positions of keys off by one": plant(LOGITS, Change("torch.arange(A, A + C, device=B)", "1 + torch.arange(C)")),
    # masks
    "mask turned round": plant(LOGITS, Change("Z.masked_fill(~A, -math.inf)", "Z.masked_fill(A, -math.inf)")),
    "mask of a finite number": plant(LOGITS, Change("Z.masked_fill(~A, -math.inf)", "Z.masked_fill(~A, -1e4)")),
    "mask left out": plant(LOGITS, Change("Z = Z.masked_fill(~A, -math.inf)", "pass")),
    "diagonal hides itself": plant(IN_BAND, Change("A <= B - C.D", "A < B - C.D")),
    "diagonal by one": plant(IN_BAND, Change("A <= B - C.D", "A <= B - C.D + 1")),
    "diagonal turned round": plant(IN_BAND, Change("A <= B - C.D", "A >= B - C.D")),
    "window short on the left": plant(IN_BAND, Change("A >= B - C.D", "A > B - C.D")),
    "bounds of a band joined by or": plant(IN_BAND, Change("A & B", "A | B")),
    "window's right side not aligned": plant(BAND, Change("A + B", "A")),
    "window's left side not aligned": plant(BAND, Change("A - B", "A")),
    "the wider of two bounds": plant(BAND, Change("min(A)", "max(A)")),
    "masks joined by or": plant(SEEN, Change("A & B", "A | B")),
    "mask rows of the first block": plant(
        SEEN, Change("None if A is None else F(A, B, C)", "None if A is None else F(A, 0, C - B)")
    ),
    "lower right by one": plant(RESOLVE, Change("A = B - C.shape[-2]", "A = 1 + B - C.shape[-2]")),
    "rows' offset left out": plant(RESOLVE, Change("F(A, B) - F(C, D)", "0 - F(C, D)")),
    "keys' offset added": plant(RESOLVE, Change("F(A, B) - F(C, D)", "F(A, B) + F(C, D)")),
    "lower right is upper left": plant(RESOLVE, Change("A if B or C else None", "0 if B or C else None")),
    "finite float masks hide": plant(MASKS, Change("A != -math.inf", "A >= 0")),
    "float mask added to nothing": plant(MASKS, Change("A.masked_fill(~B, 0.0)", "None")),
    # heads
    "GQA tiled instead of repeated": plant(GROW, Change("A.repeat_interleave(B, -3)", "torch.cat([A] * B, -3)")),
    "GQA takes the first key head": plant(GROW, Change("A.repeat_interleave(B, -3)", "A[..., :1, :, :]")),
    # softmax, sinks
    "sink left out of the denominator": plant(SOFTMAX, Change(SUNK, "pass")),
    "sink twice": plant(SOFTMAX, Change(SUNK, "A = A + 2 * torch.exp(B - C)")),
    "sink without its gradient": plant(SOFTMAX, Change(SUNK, "A = A + torch.exp(B - C).detach()")),
    "sink's gradient off by 0.1%": plant(
        SOFTMAX, Change(SUNK, "A = A + 1.001 * torch.exp(B - C) - 0.001 * torch.exp(B - C).detach()")
    ),
    "blind rows divided by zero": plant(SOFTMAX, Change("A.masked_fill((A == 0) & B, 1.0)", "A")),
    # statistics and their gradients
    "lse's gradient doubled": plant(ATTEND, Change("A + B.log()", "A + 2.0 * B.log()")),
    "entropy's gradient turned round": plant(ATTEND, Change("A.log() - B", "A.log() + B")),
    "entropy's gradient without the sink": plant(ATTEND, Change("A = A + B.exp() * C", "pass")),
    "statistics without the sink": plant(ATTEND, Change("A if B is None else A.merge(C)", "A if True else A.merge(C)")),
    "largest weight counted twice": plant(ROW_STATS, Change("A.exp().masked_fill(B, 0.0)", "A.exp()")),
    "mean of shifted logits": plant(ROW_STATS, Change("(A * B.squeeze(-1) + C) / A", "C / A")),
    "variance over hidden keys": plant(ROW_STATS, Change("(A / B).masked_fill(C, 0.0).square()", "(A / B).square()")),
    "mean over all keys": plant(
        ROW_STATS, Change("Z.amax(-1, keepdim=True)"), Change("A.sum(-1) / B.clamp(min=1.0)", "A.sum(-1) / Z.shape[-1]")
    ),
    "minimum over hidden keys": plant(ROW_STATS, Change("A.masked_fill(B, math.inf).amin(-1)", "A.amin(-1)")),
    "cubes are squares": plant(ROW_STATS, Change("A.pow(3)", "A.pow(2)")),
    "keys counted without the mask": plant(
        COUNT,
        Change("A.expand(*A.shape[:-1], B.C).sum(-1, keepdim=True)", "torch.full_like(A[..., :1], B.C, dtype=B.dtype)"),
    ),
    "variance divided by n - 1": plant(
        "stats/_partial.py:RowStats.variance", Change("A / B.clamp(min=1.0)", "A / (B - 1.0).clamp(min=1.0)")
    ),
    "lse is the maximum": plant("stats/_partial.py:RowStats.lse", Change("A + torch.log1p(B)", "A")),
    "largest is smallest": plant(AUX, Change("A.max_logit", "A.min_logit")),
    "peak without the sink": plant(AUX, Change("B = A if B is None else B"), Change("B.peak", "A.peak")),
    "sink counted as a key": plant(
        AUX, Change("B = A if B is None else B"), Change("lambda: A.keys", "lambda: B.keys")
    ),
    # resolving
    "default scale of the key's width": plant(
        RESOLVE, Change("A, B, *C = F(D, A, B)"), Change("E = A.shape[-1]", "E = B.shape[-1]")
    ),
    # torch's kernels
    "fused: scale folded and applied": plant(FUSED, Change("A, B = C * B, 1.0", "A, B = C * B, None")),
    "fused: scale off by 0.1%": plant(
        FUSED, Change("F(*A, **B, scale=C, **D)", "F(*A, **B, scale=C * 1.001, **D)", at=1)
    ),
    "fused: causal forgotten": plant(FUSED, Change("A is not None and B is None", "False")),
    "fused: scale of zero or below beside causal": plant(FUSED, Change("A and B <= 0.0", "False")),
    "fused: mask forgotten beside a bias": plant(
        "impl/fused.py:_mask", Change("A if B is None else torch.where(B, A, -math.inf)", "A if B is None else A")
    ),
    "fused: statistics without the bias": plant(SWEPT, Change("None if A is None else A.detach()", "None")),
    "fused: statistics without the mask": plant(
        SWEPT, Change("F(*A, **B, visible=C, **D)", "F(*A, **B, visible=None, **D)")
    ),
    "fused: positions without the shift": plant(
        "impl/operands.py:with_bias", Change("A.positions(0, B) + C", "A.positions(0, B)")
    ),
    # the pass for output and statistics at once
    "pass: scale left out": plant("stats/tiles.py:ProductSource.load", Change("A = A * B", "pass")),
    "pass: base 2 instead of e": plant(TILE, Change("torch.mul(A, B / C, out=D)", "torch.mul(A, 1.0 / C, out=D)")),
    "pass: ties not counted": plant(TIES, Change("A = B.clamp_(min=0.0)", "A = 0.0 * B.clamp_(min=0.0)")),
    "pass: hidden keys have weights": plant(TILE, Change("if A is not None: B.mul_(A)", "if False: B.mul_(A)", at=1)),
    "pass: largest weight left out of the output": plant(VALUES, Change("A.view(B, C, D)", "A.frac().view(B, C, D)")),
    "pass: values of the first keys": plant(VALUES, Change("A[B, C, D:E]", "A[B, C, : E - D]")),
    "pass: key heads not shared": plant(VALUES, Change("slice(A // C, B // C)", "slice(0, (B - A) // C)")),
    "pass: earlier keys not scaled down": plant(SWEEP, Change("A.mul_(B).add_(C)", "A.add_(C)")),
    "pass: later keys not scaled down": plant(SWEEP, Change("A.add_(B.mul_(C))", "A.add_(B)")),
    "pass: mask of the first keys": plant(
        "stats/_block.py:cut_keys", Change("A[..., B - C : D - C]", "A[..., : D - B]")
    ),
    "pass: scatter not centred": plant(MOMENTS, Change("A.double() - B", "A.double()")),
    "pass: scatter of one scale": plant(MOMENTS, Change("A.double() * S"), Change("(Q @ B) * Q", "(Q @ B) * Q / S")),
    "merge: largest weights of other blocks left out": plant(MERGED, Change("F(A + B) + C", "F(A) + C", at=0)),
    "merge: squares of the shares left out": plant(MERGED, Change("A**2 * B", "A * B")),
    "merge: logits not shifted": plant(MERGED, Change("A * B + A * C * (1.0 + D)", "A * B")),
    "merge: blocks' means apart": plant(MERGED, Change("A + B * ((C - D) * 2.0) ** 2", "A")),
    # blocks
    "tiled: last row forgotten": plant(
        "impl/blocks.py:row_spans", Change("range(0, A, B)", "range(0, max(1, A - 1), B)")
    ),
    "tiled: statistics of the first block": plant("impl/blocks.py:_written", Change("F(A, B, C)", "F(A, 0, C - B)")),
    "tiled: every block is the first": plant(
        "impl/blocks.py:_by_blocks", Change("checkpoint(F, A, B, C, **D)", "checkpoint(F, A, 0, C - B, **D)")
    ),
    # the compiled kernel's call
    "cpu: scale left out": plant(CPU, Change("1.0 if isinstance(A, Tensor) else A", "1.0")),
    "cpu: scale tensor left out": plant(CPU, Change("A.float() if isinstance(B, Tensor) else None", "None")),
    "cpu: scale without its gradient": plant(
        CPU, Change("A and B.requires_grad and torch.is_grad_enabled()", "A and False", at=0)
    ),
    "cpu: softcap left out": plant(CPU, Change("A or 0.0", "0.0")),
    "cpu: bias left out": plant(
        CPU, Change("None if A is None else F(A if A.dtype in B else A.float(), C)", "None if True else F(A, C)")
    ),
    "cpu: mask left out": plant(CPU, Change("None if A is None else F(A, B)", "None if True else F(A, B)")),
    "cpu: sinks left out": plant(
        CPU,
        Change(
            "None if A is None else A.float().expand(B).contiguous()",
            "None if True else A.float().expand(B).contiguous()",
        ),
    ),
    "cpu: statistics without the sink": plant(
        "impl/cpu.py:_attended", Change("A if B is None else F(A, B)", "A if True else F(A, B)")
    ),
    "cpu: bound of later keys turned round": plant("impl/operands.py:above_and_below", Change("-A", "A")),
    "cpu: squares for cubes": plant(
        "impl/kernel/operators.py:PLANES", Change('(*A, "share2", "share3", *B)', '(*A, "share3", "share2", *B)')
    ),
}
