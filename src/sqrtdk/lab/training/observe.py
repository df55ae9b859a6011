"""What is measured of a run while it trains: logits, entropy, gradients, and how far the heads of an attention differ.

Measuring changes no number of the run. Heads differ in where they look and in what they read. Where: the Jensen-Shannon
divergence of the weights of two heads in the same row, over log 2: 0 for equal weights, 1 where no key has weight in
both. What: the overlap of the subspaces that their query (or key) projections read, the mean squared cosine of the
principal angles: 1 for equal subspaces, d_k / d_model on average for random ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.lab.training.models import Attention, AuxOutputs, weights_of
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


def divergence(first: Tensor, second: Tensor) -> Tensor:
    """Jensen-Shannon divergence over log 2, from 0 to 1.

    Args:
        first: weights (..., S), each row sums to 1.
        second: weights (..., S).

    Returns:
        (...), in the dtype of the weights.

    Example:
        >>> one, other = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
        >>> divergence(one, one).item(), divergence(one, 1 - one).item(), round(divergence(one, other).item(), 4)
        (0.0, 1.0, 0.3113)
    """
    middle = (first + second) / 2
    share: Tensor = _entropy(middle) - (_entropy(first) + _entropy(second)) / 2
    return (share / math.log(2)).clamp(0.0, 1.0)


def _entropy(weights: Tensor) -> Tensor:
    return -torch.xlogy(weights, weights).sum(-1)


def overlap(first: Tensor, second: Tensor) -> float:
    """Mean squared cosine of the principal angles between the row spaces of two matrices, from 0 to 1.

    Args:
        first: (d, D), of full rank, d <= D.
        second: (d, D).

    Example:
        >>> round(overlap(torch.eye(4)[:2], 3 * torch.eye(4)[1:3]), 6)
        0.5
    """
    one, other = (torch.linalg.qr(weight.double().mT)[0] for weight in (first, second))
    return float((one.mT @ other).square().sum()) / len(first)  # |Q1^T Q2|^2 is the sum of the squared cosines


@torch.no_grad()
def head_figures(model: nn.Module, text: Tensor) -> list[dict[str, float]]:
    """Differences of every pair of heads of every attention of a decoder.

    Args:
        model: a `Decoder`.
        text: bytes (B, L), held out.

    Returns:
        One entry a layer and pair: `layer`, `first`, `second`; `divergence`, the mean over all rows but those that see
        one key; `query_overlap` and `key_overlap` of the two projections.
    """
    inputs: list[Tensor] = []
    attentions = [part for part in model.modules() if isinstance(part, Attention)]
    hooks = [part.heads.register_forward_pre_hook(lambda _, args: inputs.append(args[0])) for part in attentions]
    try:
        model(text)
    finally:
        for hook in hooks:
            hook.remove()
    found: list[dict[str, float]] = []
    for layer, (part, inside) in enumerate(zip(attentions, inputs, strict=True)):
        heads = part.heads
        maps = heads(inside, inside, inside, is_causal=True, average_attn_weights=False)[1][:, :, 1:].double()
        query, key = (weight.view(heads.num_heads, -1, weight.shape[1]) for weight in weights_of(heads))
        for i, j in combinations(range(heads.num_heads), 2):
            values = {
                "divergence": divergence(maps[:, i], maps[:, j]).mean().item(),
                "query_overlap": overlap(query[i], query[j]),
                "key_overlap": overlap(key[i], key[j]),
            }
            found.append({"layer": layer, "first": i, "second": j, **values})
    return found
