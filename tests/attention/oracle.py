"""Attention in float64, pair by pair, written from the definitions and sharing no code with the package.

Every step is spelled out in its order: score, scale, softcap, bias, mask, softmax. Each pair of a query and a key has
its own copy of the key and the value, so that what is hidden from one row can be replaced for that row alone: memory
is L x S x E, for small shapes only. Gradients are autograd's, in float64.

Shapes: q (..., H, L, E), k (..., Hkv, S, Ek), v (..., Hkv, S, Ev); any number of dimensions in front, H among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

STATISTICS = (
    "lse",
    "max_logit",
    "min_logit",
    "mean",
    "variance",
    "entropy_nats",
    "collision",
    "peak",
    "jacobian_norm",
    "keys",
)
WITH_GRADIENT = ("lse", "entropy_nats")

Pairs = Callable[[Tensor, Tensor], Tensor]  # (..., L, 1, E) and (..., L, S, Ek) to (..., L, S)


@dataclass(frozen=True)
class Answer:
    """What a call should give, in float64."""

    output: Tensor  # (..., L, Ev)
    logits: Tensor  # (..., L, S), -inf where hidden
    weights: Tensor  # (..., L, S), 0 where hidden
    visible: Tensor  # (..., L, S)
    statistics: dict[str, Tensor]  # each (..., L)
    size: float  # largest sum of sizes that a visible logit is made of: what its rounding is relative to


def dot(q: Tensor, k: Tensor) -> Tensor:
    return (q * k).sum(-1)


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Query head h shares the key head h // group; a single head, or as many as the query has, stay as they are."""
    if x.ndim < 3 or x.shape[-3] in (1, heads) or heads == 1:
        return x
    group = heads // x.shape[-3]
    return torch.stack([x[..., h // group, :, :] for h in range(heads)], dim=-3)


def visible_keys(
    shape: tuple[int, ...],
    attn_mask: Tensor | None,
    is_causal: bool,
    causal_lower_right: bool,
    window: tuple[int | None, int | None] | None,
) -> Tensor:
    """Bool (..., L, S): True where the row sees the key."""
    length, keys = shape[-2:]
    i = torch.arange(length)[:, None] + (keys - length if causal_lower_right else 0)
    j = torch.arange(keys)[None, :]
    visible = torch.ones(shape, dtype=torch.bool)
    if is_causal or causal_lower_right:
        visible = visible & (j <= i)
    if window is not None:
        left, right = window
        if left is not None and left >= 0:
            visible = visible & (j >= i - left)
        if right is not None and right >= 0:
            visible = visible & (j <= i + right)
    if attn_mask is not None:
        visible = visible & (attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf)
    return visible


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | Tensor,
    score: Pairs = dot,
    content: Pairs | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    causal_lower_right: bool = False,
    window: tuple[int | None, int | None] | None = None,
    sinks: float | Tensor | None = None,
) -> Answer:
    """Output and statistics; every tensor may carry a gradient.

    Args:
        query: (..., H, L, E), any floating dtype; widened here.
        key: (..., Hkv, S, Ek).
        value: (..., Hkv, S, Ev).
        scale: number, or broadcastable to (..., H, L, 1).
        score: of pairs.
        content: of pairs, joins the score before the scale.
        softcap: c of c tanh(z / c).
        bias: broadcastable to (..., H, L, S).
        attn_mask: bool (True takes part) or added; -inf hides.
        is_causal: row i sees j <= i.
        causal_lower_right: row i sees j <= i + S - L.
        window: keys to the left and to the right of the row's own; None or -1 is no bound.
        sinks: logits (H,), or broadcastable to (..., H, L, 1), that no value belongs to.
    """
    q, k, v = query.double(), key.double(), value.double()
    if q.ndim > 2:
        k, v = repeat_heads(k, q.shape[-3]), repeat_heads(v, q.shape[-3])
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    length, keys = q.shape[-2], k.shape[-2]
    shape = (*batch, length, keys)
    visible = visible_keys(shape, attn_mask, is_causal, causal_lower_right, window)

    q_pairs = q[..., :, None, :]
    k_pairs = torch.where(visible[..., None], k[..., None, :, :], 1.0)
    v_pairs = torch.where(visible[..., None], v[..., None, :, :], 0.0)
    z = score(q_pairs, k_pairs)
    if content is not None:
        z = z + content(q_pairs, k_pairs)
    factor = scale.double() if isinstance(scale, Tensor) else torch.tensor(float(scale), dtype=torch.float64)
    size = (torch.maximum(z.abs(), (q_pairs * k_pairs).abs().sum(-1)) if score is dot else z.abs()) * factor.abs()
    z = z * factor
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    for term in (bias, attn_mask):
        if term is not None and term.dtype != torch.bool:
            shown = torch.where(visible, term.double(), 0.0)
            z, size = z + shown, size + shown.abs()
    z = z.expand(shape)
    logits = torch.where(visible, z, -math.inf)

    columns, counts = logits, visible
    if sinks is not None:
        sink = sinks.double() if isinstance(sinks, Tensor) else torch.tensor(float(sinks), dtype=torch.float64)
        sink = (sink[:, None, None] if q.ndim > 2 and sink.ndim == 1 else sink).expand(*batch, length, 1)
        columns = torch.cat([columns, sink], dim=-1)
        counts = torch.cat([counts, torch.ones_like(sink, dtype=torch.bool)], dim=-1)
    some = counts.any(-1, keepdim=True)
    # What does not count is replaced before every function, so that its gradient is 0 and not NaN.
    known = torch.where(counts, columns, -math.inf)
    at = known.argmax(-1, keepdim=True) if known.shape[-1] else some.new_zeros(some.shape).long()
    top = known.gather(-1, at) if known.shape[-1] else known.sum(-1, keepdim=True)
    shifted = torch.where(counts, columns, 0.0) - torch.where(some, top, 0.0)
    e = torch.where(counts, torch.exp(torch.where(counts, shifted, 0.0)), 0.0)
    # The largest term is 1: the sum of the others is kept apart, or a row that is almost one-hot would lose it.
    others = torch.where(torch.arange(known.shape[-1]) == at, 0.0, e).sum(-1, keepdim=True)
    p = e / (1.0 + others)
    weights = p[..., :keys]
    output = (weights[..., None] * v_pairs).sum(-2)

    lse = torch.where(some, top + torch.log1p(others), -math.inf)[..., 0]
    log_p = shifted - torch.log1p(others)
    entropy = -torch.where(p == 0, 0.0, p * torch.where(p == 0, 0.0, log_p)).sum(-1)
    with torch.no_grad():
        statistics = {"lse": lse, "entropy_nats": entropy} | logit_statistics(z, visible) | weight_statistics(p)
        sizes = torch.where(visible, size, 0.0)
        size = sizes[sizes.isfinite()].amax().item() if sizes.isfinite().any() else 0.0
    return Answer(output, logits, weights, visible, statistics, size)


def logit_statistics(z: Tensor, visible: Tensor) -> dict[str, Tensor]:
    """Over the visible keys; a row that sees none has maximum -inf, minimum +inf, mean and variance NaN."""
    count = visible.sum(-1).double()
    if z.shape[-1] == 0:
        z, visible = z.new_zeros(*z.shape[:-1], 1), visible.new_zeros(*z.shape[:-1], 1)
    mean = torch.where(visible, z, 0.0).sum(-1) / count
    return {
        "max_logit": torch.where(visible, z, -math.inf).amax(-1),
        "min_logit": torch.where(visible, z, math.inf).amin(-1),
        "mean": mean,
        "variance": torch.where(visible, z - mean[..., None], 0.0).square().sum(-1) / count,
        "keys": count,
    }


def weight_statistics(p: Tensor) -> dict[str, Tensor]:
    """Over the keys and the sink; 0 for a row of nothing."""
    if p.shape[-1] == 0:
        return dict.fromkeys(("collision", "peak", "jacobian_norm"), p.sum(-1))
    # of diag(p) - p p^T: 1 - p_i is the sum of the others, so that nothing cancels
    squares = (p * sum_of_others(p)).square() + p.square() * sum_of_others(p.square())
    return {"collision": p.square().sum(-1), "peak": p.amax(-1), "jacobian_norm": squares.sum(-1).sqrt()}


def sum_of_others(x: Tensor) -> Tensor:
    """For each column the sum of all others, which no difference is made for."""
    before, after = (functional.pad(t.cumsum(-1)[..., :-1], (1, 0)) for t in (x, x.flip(-1)))
    return before + after.flip(-1)
