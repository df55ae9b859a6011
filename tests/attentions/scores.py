"""Attention whose score is no product of q and k for each pair: distances, additive scores, attention over channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.attentions.products import Attend, B, E, H, L

# -- distances: name -> how, formula -----------------------------------------------------------------------------------


def squared(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (-(torch.cdist(q, k) ** 2) * (s / 2)).softmax(-1) @ v


def plain(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (-torch.cdist(q, k) * s).softmax(-1) @ v


def differences(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (-((q.unsqueeze(-2) - k.unsqueeze(-3)) ** 2).sum(-1) * (s / 2)).softmax(-1) @ v


def norm_of_differences(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (-(q.unsqueeze(-2) - k.unsqueeze(-3)).norm(dim=-1) * s).softmax(-1) @ v


def written_out(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    d = q.pow(2).sum(-1, keepdim=True) - 2 * q @ k.mT + k.pow(2).sum(-1)[:, :, None]
    return (-d * (s / 2)).softmax(-1) @ v


def written_out_lengths_first(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    d = q.square().sum(-1)[..., None] + (k * k).sum(-1)[:, :, None] - 2 * (q @ k.mT)
    return (-d * (s / 2)).softmax(-1) @ v


def written_out_negative(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    d = 2 * (q @ k.mT) - q.norm(dim=-1, keepdim=True) ** 2 - (k**2).sum(-1).unsqueeze(2)
    return (d * (s / 2)).softmax(-1) @ v


DISTANCES: dict[str, tuple[Attend, str]] = {
    "squared": (squared, "softmax(-0.125 * |q - k|^2)"),
    "plain": (plain, "softmax(-0.25 * |q - k|)"),
    "differences": (differences, "softmax(-0.125 * |q - k|^2)"),
    "norm_of_differences": (norm_of_differences, "softmax(-0.25 * |q - k|)"),
    "written_out": (written_out, "softmax(-0.125 * |q - k|^2)"),
    "written_out_lengths_first": (written_out_lengths_first, "softmax(-0.125 * |q - k|^2)"),
    "written_out_negative": (written_out_negative, "softmax(-0.125 * |q - k|^2)"),
}


# -- additive scores ---------------------------------------------------------------------------------------------------

CURVES = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "leaky_relu": functional.leaky_relu,
    "silu": functional.silu,
}


def added(curve: Callable[[Tensor], Tensor]) -> Attend:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        return m.one(curve(m.wq(q).unsqueeze(-2) + m.wk(k).unsqueeze(-3))).squeeze(-1).softmax(-1) @ v

    return attend


def side_by_side(curve: Callable[[Tensor], Tensor]) -> Attend:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
        shape = (B, H, L, L, E)
        both = torch.cat([q.unsqueeze(-2).expand(shape), k.unsqueeze(-3).expand(shape)], -1)
        return m.one(curve(m.wide(both))).squeeze(-1).softmax(-1) @ v

    return attend


def keras(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3)).sum(-1).softmax(-1) @ v


def keras_scaled(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (m.vector * torch.tanh(q.unsqueeze(-2) + k.unsqueeze(-3))).sum(-1).softmax(-1) @ v


def graph(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    """Graph attention on all pairs (Velickovic et al. 2018, arXiv:1710.10903)."""
    z = functional.leaky_relu(v @ m.vector[:, None] + (v @ m.other_vector[:, None]).mT, 0.2)
    edges = torch.ones(L, L, dtype=torch.bool).tril()
    return z.masked_fill(~edges, -9e15).softmax(-1) @ v


def graph_2(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    """GATv2 (Brody et al. 2022, arXiv:2105.14491)."""
    return (functional.leaky_relu(q.unsqueeze(-2) + k.unsqueeze(-3), 0.2) * m.vector).sum(-1).softmax(-1) @ v


def graph_pairs(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    h = v.flatten(0, 1)
    both = torch.cat([h.repeat_interleave(L, 1), h.repeat(1, L, 1)], -1).view(B * H, L, L, 2 * E)
    z = functional.leaky_relu(both @ torch.cat([m.vector, m.other_vector])[:, None], 0.2).squeeze(-1)
    return (z.softmax(-1) @ h).view(B, H, L, E)


def convolved(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    q, k, v = (t.flatten(0, 1) for t in (m.wq(q), m.wk(k), v))
    both = (q.unsqueeze(-2) + k.unsqueeze(-3)).permute(0, 3, 1, 2)
    return (m.conv(torch.tanh(both)).squeeze(1).softmax(-1) @ v).view(B, H, L, E)


def summed_values(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    weights = m.one(torch.tanh(m.wq(q).unsqueeze(-2) + m.wk(k).unsqueeze(-3))).softmax(3)
    return (weights * v.unsqueeze(-3)).sum(3)


def over_differences(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return m.one(torch.relu(m.wq(q.unsqueeze(-2) - k.unsqueeze(-3)))).squeeze(-1).softmax(-1) @ v


def one_query_beside_keys(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    both = torch.cat([q[:, 0, :1].expand(B, L, E), k[:, 0]], -1)
    return (m.one(torch.tanh(m.wide(both))).softmax(1) * v[:, 0]).sum(1)


def one_query_added(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    z = m.one(torch.relu(m.wq(q[:, 0, :1]) + m.wk(k[:, 0]))).squeeze(-1)
    return torch.bmm(z.softmax(-1).unsqueeze(1), v[:, 0])


# name -> how; the heads that can be told, rows
ADDITIVE: dict[str, tuple[Attend, int]] = {
    **{f"added, {name}": (added(curve), L) for name, curve in CURVES.items()},
    **{f"side by side, {name}": (side_by_side(curve), L) for name, curve in CURVES.items()},
    **{
        function.__name__: (function, L)
        for function in (
            keras, keras_scaled, graph, graph_2, graph_pairs, convolved, summed_values, over_differences,
        )
    },
    "one_query_beside_keys": (one_query_beside_keys, 1),
    "one_query_added": (one_query_added, 1),
}  # fmt: skip


# -- attention over channels -------------------------------------------------------------------------------------------


def unit(t: Tensor, dim: int) -> Tensor:
    return functional.normalize(t, dim=dim)


def cross_covariance(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    """XCiT (El-Nouby et al. 2021, arXiv:2106.09681)."""
    q, k, v = q.mT, k.mT, v.mT
    return ((unit(q, -1) @ unit(k, -1).mT * m.gain.view(H, 1, 1)).softmax(-1) @ v).mT


def cross_covariance_columns(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return ((unit(q, -2).mT @ unit(k, -2) * m.gain.view(H, 1, 1)).softmax(-1) @ v.mT).mT


def cross_covariance_fused(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    q, k, v = unit(q.mT, -1) * m.gain.view(H, 1, 1), unit(k.mT, -1), v.mT
    return functional.scaled_dot_product_attention(q, k, v, scale=1.0).mT


def cosine_of_channels(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return ((unit(q, -2).mT @ unit(k, -2)).softmax(-1) @ v.mT).mT


def channels(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return ((q.mT @ k * s).softmax(-1) @ v.mT).mT


def channels_turned(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    """DANet (Fu et al. 2019, arXiv:1809.02983): the row's maximum less the product."""
    z = q.mT @ k
    return ((z.max(-1, keepdim=True)[0].expand_as(z) - z).softmax(-1) @ v.mT).mT


# name -> how, formula, score
CHANNELS: dict[str, tuple[Attend, str, str]] = {
    "cross_covariance": (cross_covariance, "softmax(gain[h] * l2(q).l2(k))", "cosine"),
    "cross_covariance_columns": (cross_covariance_columns, "softmax(gain[h] * l2(q).l2(k))", "cosine"),
    "cross_covariance_fused": (cross_covariance_fused, "softmax(gain[h] * l2(q).l2(k))", "cosine"),
    "cosine_of_channels": (cosine_of_channels, "softmax(l2(q).l2(k))", "cosine"),
    "channels": (channels, "softmax(0.25 * q.k)", "dot"),
    "channels_turned": (channels_turned, "softmax(-1 * q.k)", "dot"),
}
