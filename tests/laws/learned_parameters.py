"""Attentions with parameters between projections and softmax: `LEARNED[name].attend(cut, self, q, k, v)`.

`cut` is applied to what is computed from the parameter: the identity, or what makes its gradient wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.laws.backward_models import One

Cut = Callable[[Tensor], Tensor]
LENGTH, HEADS, WIDTH = 40, 4, 16
DISTANCE = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
BUCKETS = DISTANCE.clamp(-5, 5) + 5


def detached(x: Tensor) -> Tensor:
    return x.detach()


def halved(x: Tensor) -> Tensor:
    """Give half of the gradient."""
    return (x + x.detach()) / 2


def of_one_head(x: Tensor) -> Tensor:
    """Give the gradient of the last axis's first entry alone."""
    return torch.cat([x[..., :1], x[..., 1:].detach()], -1)


def doubled_later(x: Tensor) -> Tensor:
    """Give twice the gradient to the second half of the first axis."""
    half = len(x) // 2
    return torch.cat([x[:half], 2 * x[half:] - x[half:].detach()])


@dataclass(frozen=True)
class Learned:
    """A parameter's start, the attention, a fault of its own, and the code of that fault."""

    start: Tensor
    attend: Callable[[Cut, Any, Tensor, Tensor, Tensor], Tensor]
    fault: Cut = halved
    code: str = "factor"


def _weighted(z: Tensor, v: Tensor) -> Tensor:
    return z.softmax(-1) @ v


def _rms(x: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()


def _clamped(cut: Cut, self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    cosine = functional.normalize(q, dim=-1) @ functional.normalize(k, dim=-1).mT
    return _weighted(cosine * cut(self.theta.clamp(max=4.6).exp()), v)


def _table(cut: Cut, self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = cut(functional.embedding(BUCKETS, self.theta)).permute(2, 0, 1)[None]
    return _weighted(q @ k.mT * 0.25 + bias, v)


def _indexed(cut: Cut, self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = cut(self.theta[BUCKETS.view(-1)]).view(LENGTH, LENGTH, HEADS)
    return _weighted(q @ k.mT * 0.25 + rows.permute(2, 0, 1).contiguous()[None], v)


def _fused(cut: Cut, self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    bias = cut(self.theta[BUCKETS.view(-1)]).view(LENGTH, LENGTH, HEADS).permute(2, 0, 1)
    return functional.scaled_dot_product_attention(q, k, v, bias.expand(2, -1, -1, -1))


def _normed(cut: Cut, self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(_rms(q) * cut(self.theta), _rms(k), v)


def _rotated(cut: Cut, self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A rotation with learned frequencies."""
    angles = torch.arange(LENGTH)[:, None] * cut(self.theta)
    cos, sin = angles.cos(), angles.sin()

    def turned(x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, -1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)

    return _weighted(turned(q) @ turned(k).mT * 0.25, v)


_DRAW = torch.Generator().manual_seed(3)


def _near(size: tuple[int, ...], about: float, by: float) -> Tensor:
    return about + by * torch.randn(size, generator=_DRAW)


LEARNED: dict[str, Learned] = {
    "temperature": Learned(
        torch.tensor(-1.3), lambda cut, self, q, k, v: _weighted(q @ k.mT * cut(self.theta.exp()), v)
    ),
    "softplus": Learned(
        torch.tensor(0.1), lambda cut, self, q, k, v: _weighted(q @ k.mT * cut(functional.softplus(self.theta)), v)
    ),
    "divisor": Learned(torch.tensor(3.7), lambda cut, self, q, k, v: _weighted(q @ k.mT / cut(self.theta), v)),
    "clamped temperature of each head": Learned(torch.full((HEADS, 1, 1), 2.3), _clamped),
    "one factor left out": Learned(
        torch.tensor(-1.3), lambda cut, self, q, k, v: _weighted(q @ k.mT * cut(self.theta.exp()), v),
        lambda x: x.detach() * (1 + x.log() / x.detach() - (x.log() / x.detach()).detach()),
    ),
    "gain of q": Learned(
        _near((WIDTH,), 1.0, 0.2), lambda cut, self, q, k, v: _weighted((q * cut(self.theta)) @ k.mT * 0.25, v),
        doubled_later, "unknown",
    ),
    "gain of a norm, fused": Learned(_near((WIDTH,), 1.0, 0.2), _normed, doubled_later, "unknown"),
    "addend of q": Learned(
        _near((HEADS, 1, WIDTH), 0.0, 1.0),
        lambda cut, self, q, k, v: _weighted((q + cut(self.theta)) @ k.mT * 0.25, v), doubled_later, "unknown",
    ),
    "slopes": Learned(
        _near((HEADS,), 0.3, 0.1),
        lambda cut, self, q, k, v: _weighted(q @ k.mT * 0.25 - cut(self.theta)[:, None, None] * DISTANCE.abs(), v),
        doubled_later, "unknown",
    ),
    "table": Learned(_near((11, HEADS), 0.0, 1.0), _table, of_one_head, "unknown"),
    "indexed table": Learned(_near((11, HEADS), 0.0, 1.0), _indexed, of_one_head, "unknown"),
    "table, fused": Learned(_near((11, HEADS), 0.0, 1.0), _fused, of_one_head, "unknown"),
    "frequencies": Learned(_near((WIDTH // 2,), 0.5, 0.3), _rotated, doubled_later, "unknown"),
}  # fmt: skip


class WithParameter(One):
    """Projections around an attention with a parameter."""

    def __init__(self, name: str, cut: Cut) -> None:
        super().__init__(LEARNED[name].attend)
        self.cut, self.theta = cut, nn.Parameter(LEARNED[name].start.clone())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, WIDTH)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(self.attend(self.cut, self, q, k, v).transpose(1, 2).flatten(2))


class Shared(nn.Module):
    """Two layers that read one parameter."""

    def __init__(self, name: str, cut: Cut) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([WithParameter(name, lambda x: x), WithParameter(name, cut)])
        self.layers[1].theta = self.layers[0].theta

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1](self.layers[0](x))
