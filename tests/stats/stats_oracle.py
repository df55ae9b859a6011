"""Dense float64 statistics of rows of logits, written from the definitions and sharing no code with the package."""

from __future__ import annotations

import math

import torch
from torch import Tensor

STATISTICS = (
    "keys",
    "max_logit",
    "min_logit",
    "mean",
    "variance",
    "lse",
    "peak",
    "off_peak",
    "entropy_nats",
    "collision",
    "effective_keys",
    "jacobian_norm",
)


def oracle_row(z: Tensor) -> dict[str, float]:
    """Statistics of one row from its visible logits, in float64."""
    z = z.double()
    if len(z) == 0:
        return dict.fromkeys(STATISTICS, math.nan) | {
            "keys": 0.0,
            "mean": 0.0,
            "max_logit": -math.inf,
            "min_logit": math.inf,
            "lse": -math.inf,
        }
    p = z.softmax(-1)
    others = torch.cat([p[: z.argmax()], p[z.argmax() + 1 :]])
    jacobian = torch.diag(p) - torch.outer(p, p)
    jacobian[range(len(p)), range(len(p))] = p * torch.stack(
        [torch.cat([p[:i], p[i + 1 :]]).sum() for i in range(len(p))]
    )
    return {
        "keys": float(len(z)),
        "max_logit": z.max().item(),
        "min_logit": z.min().item(),
        "mean": z.mean().item(),
        "variance": z.var(correction=0).item(),
        "lse": z.logsumexp(-1).item(),
        "peak": p.max().item(),
        "off_peak": others.sum().item(),
        "entropy_nats": torch.special.entr(p).sum().item() if len(others) else 0.0,
        "collision": p.square().sum().item(),
        "effective_keys": 1.0 / p.square().sum().item(),
        "jacobian_norm": jacobian.norm().item(),
    }


def oracle(logits: Tensor, visible: Tensor | None = None) -> dict[str, Tensor]:
    """The same for (..., L, S), one float64 tensor of shape (..., L) a statistic."""
    shown = torch.ones_like(logits, dtype=torch.bool) if visible is None else visible.expand(logits.shape)
    keys = logits.shape[-1]
    rows = [oracle_row(z[v]) for z, v in zip(logits.reshape(-1, keys), shown.reshape(-1, keys), strict=True)]
    return {
        name: torch.tensor([row[name] for row in rows], dtype=torch.float64).reshape(logits.shape[:-1])
        for name in STATISTICS
    }
