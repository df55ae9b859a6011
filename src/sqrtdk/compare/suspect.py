"""What a cause is given, and what it answers with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sqrtdk.compare.program import Program

STAGES = (
    "input",
    "query",
    "key",
    "value",  # as projected
    "query norm",
    "key norm",
    "query rotation",
    "key rotation",
    "scale",
    "softcap",
    "bias",
    "mask",
    "sinks",
    "weights",
    "output",
)


@dataclass(frozen=True, slots=True, eq=False)
class Suspicion:
    """A change of program A that may explain the difference.

    Attributes:
        name: of the cause.
        stage: one of `STAGES`, where it acts.
        a: what A does, in few words or a number.
        b: what B does.
        change: makes the part of A's program that is meant B's; it may be applied after others.
        text: half a sentence for a reader, with B as its subject: "leaves out the softcap (50)".
    """

    name: str
    stage: str
    a: str | float | None
    b: str | float | None
    change: Callable[[Program], Program]
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """The programs of both sides of a pair, what a cause looks at.

    Attributes:
        a: program of A, with what was found before already changed.
        b: program of B, where it is not known as it was inferred from B's tensors.
        head_dim: E.
        model_dim: D; None where it is not known.
        heads: Hq.
        self_attention: rows and keys are the same tokens.
        declared_a: what declares A's scale, where that is not the textbook's: "config.attention_multiplier = 0.0625".
        declared_b: the same of B.
    """

    a: Program
    b: Program
    head_dim: int
    model_dim: int | None
    heads: int
    self_attention: bool
    declared_a: str = ""
    declared_b: str = ""
