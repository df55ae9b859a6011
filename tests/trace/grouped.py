"""Attentions whose query heads share key heads, as models write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


class Grouped(nn.Module):
    """Eight heads of queries, two of keys, rotated and normalised; `write` is how they meet."""

    def __init__(self, write: Any, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(24, 64), nn.Linear(24, 16), nn.Linear(24, 16)
        self.norm = nn.RMSNorm(8, eps=1e-6)
        self.write, self.num_heads = write, 8
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (self.q, self.k, self.v))
        out: Tensor = self.write(turned(self.norm(q)), turned(self.norm(k)), v)
        return out


def turned(x: Tensor) -> Tensor:
    angle = torch.arange(x.shape[-2])[:, None] * 0.1 ** torch.arange(4).repeat(2)
    half = torch.cat([-x[..., 4:], x[..., :4]], -1)
    return x * angle.cos().to(x.dtype) + half * angle.sin().to(x.dtype)


def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    return (q @ k.mT * 0.3).softmax(-1) @ v


def expanded(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t[:, :, None].expand(-1, -1, 4, -1, -1).flatten(1, 2) for t in (k, v))
    return (q @ k.mT * 0.3).softmax(-1) @ v


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q.unflatten(1, (2, 4)) @ k[:, :, None].mT * 0.3).softmax(-1) @ v[:, :, None]).flatten(1, 2)


def modulo(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat(1, 4, 1, 1) for t in (k, v))
    return (q @ k.mT * 0.3).softmax(-1) @ v


def einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q = q.unflatten(1, (2, 4))
    weights = (torch.einsum("bhgle,bhse->bhgls", q, k) * 0.3).softmax(-1)
    return torch.einsum("bhgls,bhse->bhgle", weights, v)


def rows_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Keras writes Gemma's: the output begins with the rows, and has the heads of a group side by side in each."""
    q, k, v = q.unflatten(1, (2, 4)).permute(0, 3, 1, 2, 4), k.transpose(1, 2), v.transpose(1, 2)
    weights = (torch.einsum("btkgh,bskh->bkgts", q, k) * 0.3).softmax(-1)
    return torch.einsum("bkgts,bskh->btkgh", weights, v)


def values_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As torch.einsum may multiply three operands: both products transposed, values and keys on the left."""
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    return (v.mT @ (k @ q.mT * 0.3).softmax(-2)).mT


def fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, scale=0.3, is_causal=True, enable_gqa=True)


def by_math(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return fused(q, k, v)


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    return (2.0 * (q @ k.mT * 0.3 / 2.0).tanh()).softmax(-1) @ v


def capped_by_logits(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    z = q @ k.mT * 0.3
    return (z * (z / 2.0).tanh()).softmax(-1) @ v


def sunk(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As gpt-oss writes it: a column of sinks, the row's maximum taken off."""
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    z = q @ k.mT * 0.3
    z = torch.cat([z, torch.linspace(-1, 1, 8, dtype=z.dtype).view(1, 8, 1, 1).expand(*z.shape[:3], 1)], -1)
    return (z - z.max(-1, keepdim=True).values).softmax(-1)[..., :-1] @ v


def sunk_in_front(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As MLX writes it: the sinks are the first column, and future keys are hidden before they join."""
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    z = q @ k.mT * 0.3
    z = z.where(torch.ones(z.shape[-2:], dtype=torch.bool).tril(), torch.finfo(z.dtype).min)
    z = torch.cat([torch.linspace(-1, 1, 8, dtype=z.dtype).view(1, 8, 1, 1).expand(*z.shape[:3], 1), z], -1)
    return z.softmax(-1)[..., 1:] @ v


WRITTEN = (
    repeated,
    expanded,
    grouped,
    modulo,
    einsum,
    rows_first,
    values_first,
    fused,
    by_math,
    capped,
    capped_by_logits,
    sunk,
    sunk_in_front,
)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(4, 1) for t in (k, v))
    return functional.dropout((q @ k.mT * 0.3).softmax(-1), 0.4) @ v
