"""Logits of other products side by side with those of the first, before one softmax."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps._step import Step


@dataclass(frozen=True, slots=True)
class Beside(Step):
    """How many products there are; their scales are the same."""

    products: int

    @property
    def text(self) -> str:
        """What a reader is told."""
        return f"logits of {self.products} products side by side"

    def stage(self) -> Stage:
        return Stage("logits", "joined", self.text)
