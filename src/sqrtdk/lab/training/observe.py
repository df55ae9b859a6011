"""What a run is asked while it trains: logits, entropy, gradients. Asking changes no number of the run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sqrtdk.lab.training.attention import AuxOutputs
from sqrtdk.nn import MultiHeadAttention

GRADIENT_QUANTILES = (0.1, 0.5, 0.9)


@torch.no_grad()
def logit_figures(forward: Callable[[AuxOutputs], Any]) -> dict[str, float]:
    """Figures over every attention of a model, from one forward pass of its own.

    Args:
        forward: runs the model with a record of its attentions.

    Returns:
        `max_logit` and `min_logit`, the largest and smallest over all rows; `entropy_share`, the mean over the rows
        that see two keys or more of the entropy over the logarithm of their number.
    """
    record: AuxOutputs = []
    forward(record)
    largest, smallest, shares = -math.inf, math.inf, []
    for rows in record:
        assert rows.max_scores is not None
        assert rows.min_scores is not None
        assert rows.entropy is not None
        several = rows.count > 1  # type: ignore[operator]
        largest = max(largest, rows.max_scores.max().item())
        smallest = min(smallest, rows.min_scores.min().item())
        shares.append((rows.entropy[several] / rows.count[several].log()).mean().item())  # type: ignore[index]
    return {"max_logit": largest, "min_logit": smallest, "entropy_share": sum(shares) / len(shares)}


def query_gradients(model: nn.Module) -> dict[str, float]:
    """Quantiles of |dL/dW_q| over the entries of all query projections: `gradient_p10`, `_p50`, `_p90`."""
    parts = []
    for part in model.modules():
        if isinstance(part, MultiHeadAttention):
            assert part.in_proj_weight is not None
            assert part.in_proj_weight.grad is not None
            rows = part.num_heads * part.head_dim
            parts.append(part.in_proj_weight.grad[:rows].abs().flatten())
    values = torch.cat(parts).sort().values
    at = [round(quantile * (len(values) - 1)) for quantile in GRADIENT_QUANTILES]
    return {f"gradient_p{round(100 * q)}": values[i].item() for q, i in zip(GRADIENT_QUANTILES, at, strict=True)}
