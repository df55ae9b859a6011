"""Errors planted in the package's own backward passes, with the name that the law `gradient` gives them.

Patterns: `tests.planting`. Each leaves the forward pass as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

from tests.planting.changes import Change, Planted, plant

TURNED, BACKWARD = "impl/kernel/turned.h:one", "impl/kernel/backward.h:backward"
OPERATORS = "impl/kernel/operators.py:_backward"
LOGITS, SOFTMAX, ATTEND = (f"impl/rows.py:{name}" for name in ("row_logits", "_softmax", "weighed_rows"))
ROWS, KEYS, TILE = (
    f"impl/gpu/{name}"
    for name in ("backward_rows.py:backward_rows", "backward_keys.py:backward_keys", "backward.py:differentiate")
)
CONSTANTS = "impl/gpu/backward.py:constants"


@dataclass(frozen=True)
class Planting:
    """An error.

    Attributes:
        impl: The implementation that has it.
        call: The call that shows it, of `tests.laws.find_gradient`.
        planted: Where it stands.
        answer: Pattern of what the law says, "code: operands", joined by semicolons.
        cheap: Whether it runs in the second tier; an error of the compiled kernel is compiled for most of a minute.
    """

    impl: str
    call: str
    planted: Planted
    answer: str
    cheap: bool = True


PLANTINGS: dict[str, Planting] = {
    # plain operations, whose gradients are autograd's
    "dense: scale without its gradient": Planting(
        "dense", "scale",
        plant(LOGITS, Change("F(S, A, B).to(T) if isinstance(S, Tensor) else S",
                             "F(S, A, B).to(T).detach() if isinstance(S, Tensor) else S")),
        "none: tau",
    ),
    "dense: bias without its gradient": Planting(
        "dense", "bias", plant(LOGITS, Change("Z + A.to(B)", "Z + A.to(B).detach()")), "none: the bias"
    ),
    "dense: the normaliser is a constant": Planting(
        "dense", "plain",
        plant(SOFTMAX, Change("A / B.masked_fill(C, 1.0)", "A / B.masked_fill(C, 1.0).detach()")),
        "no_delta: q, k",
    ),
    "tiled: keys are detached": Planting(
        "tiled", "groups",
        plant(LOGITS, Change("Q.to(T) @ K.to(T).transpose(-1, -2)", "Q.to(T) @ K.to(T).transpose(-1, -2).detach()")),
        "none: k",
    ),
    # the ring
    "ring: lse's gradient left out": Planting(
        "dense", "ring", plant("_ring.py:_RingAttention.backward", Change("W * (A.sum(-1) + G)", "W * A.sum(-1)")),
        "no_lse: q, k",
    ),
    # the compiled kernel
    "cpu: lse's gradient left out": Planting(
        "cpu", "lse", plant(OPERATORS, Change("A = A + B", "pass")), "no_lse: q, k"
    ),
    "cpu: row sum left out": Planting(
        "cpu", "plain", plant(OPERATORS, Change("-(A.float() * B.float()).sum(-1)", "0.0 * A.float().sum(-1)")),
        "no_delta: q, k",
    ),
    "cpu: row sum twice": Planting(
        "cpu", "groups",
        plant(OPERATORS, Change("-(A.float() * B.float()).sum(-1)", "-2.0 * (A.float() * B.float()).sum(-1)")),
        "delta_twice: q, k",
    ),
    "cpu: row sum of an output in bfloat16": Planting(
        "cpu", "plain",
        plant(OPERATORS, Change("-(A.float() * B.float()).sum(-1)", "-(A.bfloat16().float() * B.float()).sum(-1)")),
        "rounded_output: q, k",
    ),
    "cpu: sinks without a gradient": Planting(
        "cpu", "sinks", plant(OPERATORS, Change("torch.where(A > 0, A * B, 0.0)", "torch.where(A > 2, A * B, 0.0)")),
        "none: the sinks",
    ),
    "cpu: sign of the sinks' gradient": Planting(
        "cpu", "sinks", plant(OPERATORS, Change("torch.where(A > 0, A * B, 0.0)", "torch.where(A > 0, -A * B, 0.0)")),
        "sign: the sinks",
    ),
    "cpu: softcap's slope left out": Planting(
        "cpu", "softcap", plant(TURNED, Change("= A * (F(1.0f) - B * B);", "= A;")), "flat_softcap: q, k"
    ),
    "cpu: scale left out": Planting(
        "cpu", "plain", plant(TURNED, Change("= F(A, B * C);", "= F(A, B);")), "scale_missing: q, k", False
    ),
    "cpu: one query head of a group": Planting(
        "cpu", "groups", plant(BACKWARD, Change("< (A % B + 1) * C;", "< A % B * C + 1;")),
        "(none|unknown): q; group: k, v", False,  # dq of the other heads is memory that nobody wrote
    ),
    "cpu: last tile of rows": Planting(
        "cpu", "groups",
        plant(BACKWARD, Change("for (int64_t A = 0; A < B; ++A)", "for (int64_t A = 0; A < B - 1; ++A)", at=0)),
        "no_rows: q, k, v", False,
    ),
    # the Triton kernels, in Triton's interpreter
    "triton: scale left out of dq": Planting(
        "triton", "plain", plant(ROWS, Change("A *= B", "pass")), "scale_missing: q"
    ),
    "triton: scale left out of dk": Planting(
        "triton", "plain", plant(KEYS, Change("A *= B", "pass")), "scale_missing: k"
    ),
    "triton: one query head of a group": Planting(
        "triton", "groups", plant(KEYS, Change("range(A)", "range(1)")), "group: k, v"
    ),
    "triton: lse's gradient left out": Planting(
        "triton", "lse", plant(CONSTANTS, Change("A += tl.load(*B, **C)", "pass")), "no_lse: q, k"
    ),
    "triton: row sum left out": Planting(
        "triton", "plain", plant(CONSTANTS, Change("A -= tl.sum(B, 1)", "pass")), "no_delta: q, k"
    ),
}  # fmt: skip
