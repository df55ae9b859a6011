"""|q|^2 or |k|^2, added to the logits: with -2 q.k it is the squared distance of q and k."""

from __future__ import annotations

from dataclasses import dataclass

from sqrtdk.tracing.steps.bias import Bias


@dataclass(frozen=True, slots=True)
class Squares(Bias):
    """The squared lengths of q, of k, or of both, times `sign`."""

    sign: float = 1.0
