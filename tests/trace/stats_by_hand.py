"""Statistics a head, from their definitions, row by row, in float64; and the room that a record's may be off by."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from sqrtdk.stats.heads import HeadStats
from tests.attentions.styles import Expected, tolerance


def oracle(logits: Tensor, rows: Tensor | None) -> dict[str, list[float]]:
    """Statistics a head of (B, H, L, S) float64 logits, -inf where hidden, from the definitions, row by row."""
    result: dict[str, list[float]] = {}
    for head in range(logits.shape[1]):
        lines = logits[:, head].flatten(0, 1)
        if rows is not None:
            lines = lines[rows.flatten()]
        seeing = [z[z > -math.inf] for z in lines if bool((z > -math.inf).any())]
        weights = [z.softmax(-1) for z in seeing]
        choices = [(z, p) for z, p in zip(seeing, weights, strict=True) if len(z) > 1]
        entropy = [float(torch.special.entr(p).sum()) for p in weights]
        values = {
            "blind_rows": len(lines) - len(seeing),
            "keys": mean([len(z) for z in seeing]),
            "max_logit": max(float(z.max()) for z in seeing),
            "min_logit": min(float(z.min()) for z in seeing),
            "max_abs_logit": max(float(z.abs().max()) for z in seeing),
            "max_above_mean": max(float(z.max() - z.mean()) for z in seeing),
            "mean_logit": mean([float(z.mean()) for z in seeing]),
            "std_logit": math.sqrt(mean([float(z.var(correction=0)) for z in seeing])),
            "row_offset": max(abs(float(z.mean())) for z in seeing),
            "entropy_nats": mean(entropy),
            "entropy_fraction": mean([float(torch.special.entr(p).sum()) / math.log(len(p)) for _, p in choices]),
            "effective_keys": mean([1 / float(p.square().sum()) for p in weights]),
            "peak": mean([float(p.max()) for p in weights]),
            "peak_max": max(float(p.max()) for p in weights),
            "saturated": mean([float(p.max() > 0.99) for _, p in choices]),
            "jacobian_norm": mean([float((torch.diag(p) - torch.outer(p, p)).norm()) for p in weights]),
        }
        for name, value in values.items():
            result.setdefault(name, []).append(value)
    return result


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def compare(stats: HeadStats | None, expected: Expected, dtype: torch.dtype) -> None:
    """Every statistic, relative to the largest number that went into it: logits up to their largest, weights to 1."""
    assert stats is not None
    true = oracle(expected.logits, expected.rows)
    size = max(1.0, max(true["max_abs_logit"]))
    single = dtype if dtype == torch.bfloat16 else torch.float32
    error = tolerance(single) * size
    for name, values in true.items():
        read = getattr(stats, name)
        if name == "saturated":  # a count of rows past a threshold
            continue
        room = error * (expected.logits.shape[-1] if name in ("effective_keys", "entropy_nats") else 1)
        assert read == pytest.approx(values, abs=room), name
    assert stats.heads == expected.heads
