"""Scores and positions as the papers write them, pair by pair, in the dtype of their inputs; no code of the package.

A formula of pairs takes q (..., H, L, 1, E) and k (..., H, S or L S, Ek) and gives (..., H, L, S).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.attention.oracle import Pairs, dot


def per_pair(weight: Tensor) -> Tensor:
    """(H, E, A) to (H, 1, E, A), (E, A) as it is: for a product with pairs."""
    return weight[:, None] if weight.ndim == 3 else weight


def bilinear(weight: Tensor) -> Pairs:
    return lambda q, k: dot(q @ per_pair(weight), k)


def additive(v: Tensor, wq: Tensor, wk: Tensor, b: Tensor | None = None) -> Pairs:
    """v, b (A,) or (H, A); wq, wk (E, A) or (H, E, A)."""

    def score(q: Tensor, k: Tensor) -> Tensor:
        hidden = q @ per_pair(wq) + k @ per_pair(wk)
        hidden = hidden if b is None else hidden + (b[:, None, None] if b.ndim == 2 else b)
        return (torch.tanh(hidden) * (v[:, None, None] if v.ndim == 2 else v)).sum(-1)

    return score


def concat(v: Tensor, weight: Tensor) -> Pairs:
    def score(q: Tensor, k: Tensor) -> Tensor:
        shape = torch.broadcast_shapes(q.shape[:-1], k.shape[:-1])
        joined = torch.cat([q.expand(*shape, q.shape[-1]), k.expand(*shape, k.shape[-1])], dim=-1)
        return (torch.tanh(joined @ weight) * v).sum(-1)

    return score


def plain_sum(v: Tensor | None) -> Pairs:
    return lambda q, k: (torch.tanh(q + k) * (1.0 if v is None else v)).sum(-1)


def distance(q: Tensor, k: Tensor) -> Tensor:
    return -((q - k) ** 2).sum(-1)


def laplace(q: Tensor, k: Tensor) -> Tensor:
    return -(q - k).abs().sum(-1)


def l2(x: Tensor) -> Tensor:
    return x / (x * x).sum(-1, keepdim=True).sqrt()


def rms(x: Tensor) -> Tensor:
    return x / ((x * x).mean(-1, keepdim=True) + 1e-6).sqrt()


def layer(x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred / ((centred * centred).mean(-1, keepdim=True) + 1e-5).sqrt()


def cosine(norm: str, gain: float | Tensor = 1.0) -> Pairs:
    normed = {"l2": l2, "rms": rms, "layer": layer}[norm]

    def score(q: Tensor, k: Tensor) -> Tensor:
        by_head = isinstance(gain, Tensor) and q.ndim > 3
        return dot(normed(q), normed(k)) * (gain[:, None, None] if by_head else gain)

    return score


def offsets(length: int, keys: int, shift: int = 0) -> Tensor:
    """(L, S): i - j, where row i stands at i + shift."""
    return torch.arange(length)[:, None] + shift - torch.arange(keys)[None, :]


def alibi(slopes: Tensor, length: int, keys: int, shift: int, symmetric: bool) -> Tensor:
    distance = offsets(length, keys, shift)
    return -slopes[:, None, None] * (distance.abs() if symmetric else distance)


def t5_bucket(ahead: int, buckets: int, longest: int, both_ways: bool) -> int:
    """Of one offset j - i."""
    start = 0
    if both_ways:
        buckets //= 2
        start = buckets if ahead > 0 else 0
        ahead = abs(ahead)
    else:
        ahead = max(0, -ahead)
    exact = buckets // 2
    if ahead < exact:
        return start + ahead
    coarse = exact + int(math.log(ahead / exact) / math.log(longest / exact) * (buckets - exact))
    return start + min(buckets - 1, coarse)


def t5(table: Tensor, length: int, keys: int, shift: int, longest: int, both_ways: bool) -> Tensor:
    """Table (buckets, H) to (H, L, S)."""
    index = [[t5_bucket(-int(o), len(table), longest, both_ways) for o in row] for row in offsets(length, keys, shift)]
    return table[torch.tensor(index).reshape(length, keys)].permute(2, 0, 1)


def shaw(table: Tensor, length: int, keys: int, shift: int) -> Pairs:
    """Table (2 k + 1, E) or (H, 2 k + 1, E): q_i . r[clip(j - i)]."""
    most = table.shape[-2] // 2
    vectors = table[..., (-offsets(length, keys, shift)).clamp(-most, most) + most, :]
    return lambda q, k: (q * vectors).sum(-1)


def transformer_xl(u: Tensor, v: Tensor, weight: Tensor, length: int, keys: int, shift: int) -> Pairs:
    """u, v (H, E); weight (H E, M): u . k_j + (q_i + v) . W [sin((i - j) w), cos((i - j) w)]."""
    heads, dim = u.shape
    model = weight.shape[1]
    w = 10000.0 ** (-torch.arange(0, model, 2, dtype=torch.float64) / model)
    angles = offsets(length, keys, shift)[..., None].double() * w
    waves = torch.cat([angles.sin(), angles.cos()], -1).to(weight.dtype)
    r = (waves @ weight.T).reshape(length, keys, heads, dim).permute(2, 0, 1, 3)
    return lambda q, k: (u[:, None, None] * k).sum(-1) + ((q + v[:, None, None]) * r).sum(-1)


def deberta(embedding: Tensor, wk: Tensor, wq: Tensor, heads: int, length: int, keys: int, shift: int) -> Pairs:
    """Embedding (2 span, M), wk and wq (H E, M): q_i . K[d(i, j)] + k_j . Q[d(i, j)], d = clip(i - j + span)."""
    span = len(embedding) // 2
    index = (offsets(length, keys, shift) + span).clamp(0, 2 * span - 1)

    def table(weight: Tensor) -> Tensor:
        return (embedding @ weight.T).reshape(2 * span, heads, -1).permute(1, 0, 2)[:, index]

    return lambda q, k: (q * table(wk)).sum(-1) + (k * table(wq)).sum(-1)


def rope(x: Tensor, layout: str, width: int) -> Tensor:
    """The first `width` channels as complex numbers, turned by e^(i position w)."""
    turning, rest = x[..., :width].double(), x[..., width:]
    if layout == "interleaved":
        pairs = torch.complex(turning[..., 0::2], turning[..., 1::2])
    else:
        pairs = torch.complex(turning[..., : width // 2], turning[..., width // 2 :])
    w = 10000.0 ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.arange(x.shape[-2], dtype=torch.float64)[:, None] * w
    turned = pairs * torch.polar(torch.ones_like(angles), angles)
    if layout == "interleaved":
        flat = torch.stack([turned.real, turned.imag], -1).flatten(-2)
    else:
        flat = torch.cat([turned.real, turned.imag], -1)
    return torch.cat([flat.to(x.dtype), rest], -1)
