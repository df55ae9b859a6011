"""What other keys and values do to rows: KL of the weights, whether the largest key changes, the output."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sqrtdk.audit.cache import HeadError
from sqrtdk.kv.rows import Weighed


def divergence(exact: Weighed, stored: Weighed) -> Tensor:
    """KL(p || p_stored) of each row in nats, (g, n): sum p (z - z_stored) - lse + lse_stored.

    Sinks have the same logit on both sides, so they add nothing to the sum and are in both lse.
    """
    gap = torch.where(exact.weights > 0, exact.logits - stored.logits, 0.0)
    return ((exact.weights * gap).sum(-1) - exact.lse + stored.lse).clamp(min=0.0)


def changed(exact: Weighed, stored: Weighed) -> Tensor:
    """Rows in which a key has the largest weight that had not before, (g, n); keys that tie stand for one another."""
    first = exact.logits == exact.logits.amax(-1, keepdim=True)
    return ((stored.logits == stored.logits.amax(-1, keepdim=True)) & ~first).any(-1)


@dataclass(slots=True)
class Sums:
    """The rows of one query head, as they come in."""

    divergences: list[Tensor] = field(default_factory=list)
    changed: int = 0
    error: float = 0.0
    size: float = 0.0

    def told(self) -> HeadError:
        """The figures; NaN where no row saw a key."""
        every = torch.cat(self.divergences) if self.divergences else torch.zeros(0, dtype=torch.float64)
        if not len(every):
            return HeadError(math.nan, math.nan, math.nan, 0, math.nan)
        middle = every.quantile(0.5) if len(every) <= 2**20 else every.median()
        output = math.sqrt(self.error / self.size) if self.size else math.nan
        return HeadError(float(every.mean()), float(middle), float(every.max()), self.changed, output)


def add(sums: list[Sums], exact: Weighed, stored: Weighed, value: Tensor, stored_value: Tensor) -> None:
    """Add rows of some query heads, one of `sums` each; values are (S, Ev)."""
    divergences, moved = divergence(exact, stored), changed(exact, stored)
    outputs = exact.weights @ value
    errors = (stored.weights @ stored_value - outputs).square().sum(-1)
    sizes = outputs.square().sum(-1)
    for head, (one, seeing) in enumerate(zip(sums, exact.seeing, strict=True)):
        one.divergences.append(divergences[head][seeing].cpu())
        one.changed += int((moved[head] & seeing).sum())
        one.error += float((errors[head] * seeing).sum())
        one.size += float((sizes[head] * seeing).sum())
