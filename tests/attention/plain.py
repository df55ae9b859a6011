"""The plain formula, every operation rounded to the dtype of its inputs: what float16 and bfloat16 are judged against.

The textbook's lines on whole matrices: `softmax(q k^T * scale + mask) v`. Takes what `oracle.attend` takes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.attention.oracle import Pairs, dot, repeat_heads, visible_keys


def plain(
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
    scale_first: bool = False,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Output and statistics, all in the dtype of the query; `scale_first` writes (q * scale) k^T (dot product only)."""
    dtype = query.dtype
    if scale_first and score is dot and content is None:
        query, scale = (query * scale).to(dtype), 1.0
    heads = query.shape[-3] if query.ndim > 2 else 1
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    pairs = query[..., :, None, :], key[..., None, :, :]
    z = query @ key.mT if score is dot else score(*pairs)
    if content is not None:
        z = z + content(*pairs)
    z = (z * scale).to(dtype)
    if softcap is not None:
        z = softcap * torch.tanh(z / softcap)
    for term in (bias, attn_mask):
        if term is not None and term.dtype != torch.bool:
            z = (z + term).to(dtype)
    batch = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    shape = (*batch, query.shape[-2], key.shape[-2])
    seen = visible_keys(shape, attn_mask, is_causal, causal_lower_right, window)
    z = z.expand(shape).masked_fill(~seen, -math.inf)
    columns = z
    if sinks is not None:
        sink = torch.as_tensor(sinks, dtype=dtype)
        columns = torch.cat(
            [z, (sink[:, None, None] if sink.ndim == 1 and len(shape) > 2 else sink).expand(*shape[:-1], 1)], dim=-1
        )
    some = (columns > -math.inf).any(-1, keepdim=True)
    p = torch.softmax(torch.where(some, columns, 0.0), -1) * some
    weights = p[..., : shape[-1]]
    return weights @ value, _statistics(z, columns, p, seen, some)


def _statistics(z: Tensor, columns: Tensor, p: Tensor, seen: Tensor, some: Tensor) -> dict[str, Tensor]:
    count = seen.sum(-1).to(z.dtype)
    shown = z.masked_fill(~seen, 0.0)
    mean = shown.sum(-1) / count
    collision = p.square().sum(-1)
    lse = torch.where(some, torch.where(some, columns, 0.0).logsumexp(-1, keepdim=True), -math.inf)[..., 0]
    log_p = torch.where(p > 0, p, 1.0).log()
    return {
        "lse": lse,
        "max_logit": z.amax(-1),
        "min_logit": z.masked_fill(~seen, math.inf).amin(-1),
        "mean": mean,
        "variance": (z - mean[..., None]).masked_fill(~seen, 0.0).square().sum(-1) / count,
        "entropy_nats": -(p * log_p).sum(-1),
        "collision": collision,
        "peak": p.amax(-1),
        "jacobian_norm": (collision - 2 * p.pow(3).sum(-1) + collision.square()).clamp(min=0).sqrt(),
        "keys": count,
    }
