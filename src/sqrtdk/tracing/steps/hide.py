"""A mask: some keys are hidden from some rows, by a number that was added or written over their logits."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps._step import Step
from sqrtdk.tracing.steps.expression import Expression
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.watch.graph import Node


@dataclass(frozen=True, slots=True)
class Hide(Step):
    """What hides keys.

    Attributes:
        form: "bool", "float", or "implicit" (a causal flag or a window that the operation was given).
        fill: the number that marks a hidden key; None where it is not known.
        visible: True where the row sees the key; None where it is not known.
        name: what its pattern is called ("causal", "padding", ...); None while it is unread, and if it hides nothing.
        beside_bias: the tensor that hides is a bias as well, a step of its own.
        causal: it is the causal flag, upper-left.
        source: the tensor that was added, where it is known to hide.
    """

    form: str
    fill: float | None
    visible: Placed | None = None
    name: str | None = None
    beside_bias: bool = False
    causal: bool = False
    source: Node | None = None

    def write(self, expression: Expression) -> None:
        if self.name is not None:
            expression.hide(self.name)

    def stage(self) -> Stage:
        detail = "causal" if self.causal else "in the same tensor" if self.beside_bias else "mask"
        return Stage("logits", "mask", detail)
