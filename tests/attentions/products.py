"""Attention whose product of q and k, or of weights and values, is written in other words than a matrix product."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

B, H, L, E = 2, 4, 6, 16
DIM = H * E
ROOT = E**-0.5
GRID = (2, 3)  # L as height and width

Attend = Callable[[Any, Tensor, Tensor, Tensor, float], Tensor]


class Attention(nn.Module):
    """Three projections, and one way to attend, which takes (B, H, L, E) three times and the scale."""

    def __init__(self, attend: Attend, factor: float = ROOT) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.num_heads = H
        self.attend = attend
        self.factor = (factor,)  # in a tuple, so that no attribute declares it
        self.gain = nn.Parameter(torch.rand(H) + 0.5)
        self.vector, self.other_vector = (nn.Parameter(torch.randn(E)) for _ in range(2))
        self.wq, self.wk = nn.Linear(E, E), nn.Linear(E, E)
        self.wide, self.one = nn.Linear(2 * E, E), nn.Linear(E, 1)
        self.conv = nn.Conv2d(E, 1, 1)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (p(x).unflatten(-1, (H, E)).transpose(1, 2) for p in (self.q, self.k, self.v))
        return q, k, v

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(self, *self.project(x), self.factor[0])


def inputs() -> Tensor:
    return torch.randn(B, L, DIM)


def pairs(q: Tensor, k: Tensor) -> Tensor:
    return (q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1)


def average(weights: Tensor, v: Tensor) -> Tensor:
    return (weights.unsqueeze(-1) * v.unsqueeze(-3)).sum(-2)


# -- the whole product: the same numbers as softmax(scale * q @ k.mT) @ v ----------------------------------------------


def broadcast(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return average((pairs(q, k) * s).softmax(-1), v)


def matrix_values(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (pairs(q, k) * s).softmax(-1) @ v


def values_alone(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return average((q @ k.mT * s).softmax(-1), v)


def scaled_before_the_sum(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (q.unsqueeze(-2) * k.unsqueeze(-3) * s).sum(-1).softmax(-1) @ v


def scaled_query(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return average(pairs(q * s, k).softmax(-1), v)


def expanded(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    q, k = q.unsqueeze(-2).expand(B, H, L, L, E), k.unsqueeze(-3).expand(B, H, L, L, E)
    return ((q * k).sum(-1) * s).softmax(-1) @ v


def repeated(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    q, k = q.unsqueeze(-2).repeat(1, 1, 1, L, 1), k.unsqueeze(-3).repeat(1, 1, L, 1, 1)
    return ((q * k).sum(-1) * s).softmax(-1) @ v


def heads_last(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    weights = ((q[:, :, None] * k[:, None]).sum(-1) * s).softmax(2)
    return (weights[..., None] * v[:, None]).sum(2).transpose(1, 2)


def keys_first(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (pairs(k, q) * s).softmax(-2).mT @ v


def mean_times_width(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return ((q.unsqueeze(-2) * k.unsqueeze(-3)).mean(-1) * (E * s)).softmax(-1) @ v


def softmax_by_hand(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    z = pairs(q, k) * s
    z = (z - z.amax(-1, keepdim=True)).exp()
    return average(z / z.sum(-1, keepdim=True), v)


def in_place(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return pairs(q, k).mul_(s).softmax(-1) @ v


def vecdot(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (torch.linalg.vecdot(q.unsqueeze(-2), k.unsqueeze(-3)) * s).softmax(-1) @ v


def three_operands(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    z = torch.einsum("bhqd,bhkd,->bhqk", q, k, torch.tensor(s))
    return torch.einsum("bhqk,bhkd->bhqd", z.softmax(-1), v)


def three_operands_features(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return torch.einsum("bhqd,bhkd,d->bhqk", q, k, torch.full((E,), s)).softmax(-1) @ v


def subtracted(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (1.0 - q @ k.mT * -s).softmax(-1) @ v


def grid(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    """A softmax over two axes at once."""
    q, k, v = (t.unflatten(2, GRID) for t in (q, k, v))
    z = torch.einsum("bhxyd,bhuvd->bhxyuv", q, k) * s
    weights = z.flatten(-2).softmax(-1).view_as(z)
    return torch.einsum("bhxyuv,bhuvd->bhxyd", weights, v).flatten(2, 3)


def kept_axis(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    weights = ((q.unsqueeze(-2) * k.unsqueeze(-3)).sum(-1, keepdim=True) * s).softmax(-2)
    return (weights * v.unsqueeze(-3)).sum(-2)


WHOLE: dict[str, Attend] = {
    function.__name__: function
    for function in (
        broadcast, matrix_values, values_alone, scaled_before_the_sum, scaled_query, expanded, repeated, heads_last,
        keys_first, mean_times_width, softmax_by_hand, in_place, vecdot, three_operands,
        three_operands_features, subtracted, grid, kept_axis,
    )
}  # fmt: skip


# -- one head of one sequence ------------------------------------------------------------------------------------------


def tensordot(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    weights = (torch.tensordot(q[0, 0], k[0, 0], dims=([-1], [-1])) * s).softmax(-1)
    return torch.tensordot(weights, v[0, 0], dims=1)


def inner(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (torch.inner(q[0, 0], k[0, 0]) * s).softmax(-1) @ v[0, 0]


def tensordot_of_heads(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    z = torch.tensordot(q[0], k[0], dims=([-1], [-1])).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    return (z * s).softmax(-1) @ v[0]


SINGLE: dict[str, Attend] = {function.__name__: function for function in (tensordot, inner, tensordot_of_heads)}


# -- along one axis of a grid: name -> how, batch, rows ----------------------------------------------------------------


def along_rows(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    q, k, v = (t.unflatten(2, GRID) for t in (q, k, v))
    weights = (torch.einsum("bhxyd,bhxvd->bhxyv", q, k) * s).softmax(-1)
    return torch.einsum("bhxyv,bhxvd->bhxyd", weights, v)


def along_columns(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    q, k, v = (t.unflatten(2, GRID) for t in (q, k, v))
    weights = (torch.einsum("bhuyd,bhxyd->bhuxy", k, q) * s).softmax(2)
    return torch.einsum("bhuxy,bhuyd->bhxyd", weights, v)


def frames(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    q, k, v = (t.unflatten(2, GRID).transpose(1, 2) for t in (q, k, v))
    return average((pairs(q, k) * s).softmax(-1), v)


AXIAL: dict[str, tuple[Attend, int, int]] = {
    "along_rows": (along_rows, B * GRID[0], GRID[1]),
    "along_columns": (along_columns, B * GRID[1], GRID[0]),
    "frames": (frames, B * GRID[0], GRID[1]),
}


# -- one query against many keys ---------------------------------------------------------------------------------------


def vector(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return (torch.mv(k[0, 0], q[0, 0, 0]) * s).softmax(-1) @ v[0, 0]


def vector_by_sum(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    return ((k[0, 0] @ q[0, 0, 0] * s).softmax(0)[:, None] * v[0, 0]).sum(0)


def squeezed(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    z = torch.bmm(k[:, 0], q[:, 0, 0].unsqueeze(-1)).squeeze(-1) * s
    return torch.bmm(z.softmax(-1).unsqueeze(1), v[:, 0]).squeeze(1)


def summed(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    z = (k[:, 0] * q[:, 0, :1]).sum(-1) * s
    return (z.softmax(-1).unsqueeze(-1) * v[:, 0]).sum(1)


def summed_heads(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    z = (k * q[:, :, :1]).sum(-1) * s
    return (z.softmax(-1).unsqueeze(-1) * v).sum(2)


def summed_expanded(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    z = (k * q[:, :, :1].expand_as(k)).sum(-1) * s
    return (z.softmax(-1).unsqueeze(-1) * v).sum(2)


# name -> how, batch, heads
ONE_QUERY: dict[str, tuple[Attend, int, int]] = {
    "vector": (vector, 1, 1),
    "vector_by_sum": (vector_by_sum, 1, 1),
    "squeezed": (squeezed, B, 1),
    "summed": (summed, B, 1),
    "summed_heads": (summed_heads, B, H),
    "summed_expanded": (summed_expanded, B, H),
}


# -- windows: every query has keys of its own --------------------------------------------------------------------------


def line_einsum(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    k, v = (functional.pad(t, (0, 0, 1, 1)).unfold(2, 3, 1) for t in (k, v))  # (B, H, L, E, 3)
    return torch.einsum("bhlw,bhlew->bhle", (torch.einsum("bhle,bhlew->bhlw", q, k) * s).softmax(-1), v)


def line_matmul(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    k, v = (functional.pad(t, (0, 0, 1, 1)).unfold(2, 3, 1) for t in (k, v))
    return ((q.unsqueeze(-2) @ k * s).softmax(-1) @ v.mT).squeeze(-2)


def line_sum(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    k, v = (functional.pad(t, (0, 0, 1, 1)).unfold(2, 3, 1) for t in (k, v))
    weights = ((q.unsqueeze(-1) * k).sum(-2) * s).softmax(-1)
    return (weights.unsqueeze(-2) * v).sum(-1)


def image(t: Tensor) -> Tensor:
    return t.mT.reshape(B, DIM, *GRID)


def patches(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    k, v = (functional.unfold(image(t), 3, padding=1).view(B, H, E, 9, L) for t in (k, v))
    weights = ((q.mT.unsqueeze(3) * k).sum(2) * s).softmax(2)
    return (weights.unsqueeze(2) * v).sum(3).mT


def patches_matmul(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    k, v = (functional.unfold(image(t), 3, padding=1).view(B, H, E, 9, L) for t in (k, v))
    weights = (q.unsqueeze(3) @ k.permute(0, 1, 4, 2, 3) * s).softmax(-1)
    return (weights @ v.permute(0, 1, 4, 3, 2)).squeeze(3)


def stand_alone(m: Any, q: Tensor, k: Tensor, v: Tensor, s: float) -> Tensor:
    """Stand-alone self-attention (Ramachandran et al. 2019, arXiv:1906.05909): a softmax over both window axes."""
    k, v = (functional.pad(image(t), (1, 1, 1, 1)).unfold(2, 3, 1).unfold(3, 3, 1) for t in (k, v))
    q, k, v = (t.unflatten(1, (H, E)) for t in (image(q), k, v))
    z = (q[..., None, None] * k).sum(2) * s
    weights = z.flatten(-2).softmax(-1).view_as(z)
    return (weights.unsqueeze(2) * v).sum((-1, -2)).flatten(3).mT


# name -> how, keys of a window
WINDOWS: dict[str, tuple[Attend, int]] = {
    "line_einsum": (line_einsum, 3),
    "line_matmul": (line_matmul, 3),
    "line_sum": (line_sum, 3),
    "patches": (patches, 9),
    "patches_matmul": (patches_matmul, 9),
    "stand_alone": (stand_alone, 9),
}
