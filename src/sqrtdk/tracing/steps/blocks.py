"""Blocks of keys, each with a product of its own, under one softmax."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.steps._step import Step


@dataclass(frozen=True, slots=True)
class Blocks(Step):
    """How many blocks of keys there are."""

    count: int

    def stage(self) -> Stage:
        return Stage("logits", "joined", f"logits of {self.count} blocks of keys")
