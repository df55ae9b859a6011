"""A small attention whose q and k go through what a test gives, and what its record must say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.tracing import AttentionCall
from tests.attentions.each import each

B, L, DIM, H, E = 2, 8, 24, 4, 16
ROOT = E**-0.5

Turn = Callable[[Any, Tensor], Tensor]


class Attention(nn.Module):
    """Attention whose `attend` gets (B, H, L, E) of q, k and v."""

    def __init__(self, attend: Callable[..., Tensor], *, kv_heads: int = H, **parts: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, h * E) for h in (H, kv_heads, kv_heads))
        self.attend = attend
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, E)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.attend(self, q, k, v, *others)


def scores(q: Tensor, k: Tensor, v: Tensor, scale: float = ROOT) -> Tensor:
    """The plain attention."""
    return (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v


def traced(attend: Callable[..., Tensor], *others: Tensor, meta: bool = False, **options: Any) -> AttentionCall:
    """The one record of a model's run."""
    with torch.device("meta" if meta else "cpu"):
        model, x = Attention(attend, **options), torch.randn(B, L, DIM)
        model = model.to(x.device)
        with sqrtdk.trace(model) as run:
            model(x, *(other.to(x.device) for other in others))
    assert len(run.calls) == 1, (run.not_attention, run.not_measured)
    return run.calls[0]


def reads(call: AttentionCall, formula: str, scale: float | None, *, meta: bool, numeric: bool = True) -> None:
    """The record says this formula and this scale, by both readings where there is data."""
    assert call.formula == formula
    assert call.scale.effective == (None if scale is None else pytest.approx(scale, rel=1e-4))
    if numeric and not meta and scale is not None:
        assert call.scale.agree is True
        assert call.scale.numeric == pytest.approx(scale, rel=1e-4)
        assert call.scale.r_squared == pytest.approx(1.0, abs=1e-4)


def softmax_of(product: str, scale: float) -> str:
    """The formula of a product with a scale; a scale of 1 is not written.

    Example:
        >>> softmax_of("q.k", 0.25), softmax_of("q.k", 1.0)
        ('softmax(0.25 * q.k)', 'softmax(q.k)')
    """
    return f"softmax({product})" if scale == 1.0 else f"softmax({scale:.4g} * {product})"


everywhere = each("meta", [False, True])
scales = each("scale", [1.0, ROOT**2])  # the textbook's, which anything gives, is that of the tests without it


def angles(positions: Tensor) -> Tensor:
    """(B, 1, L, E / 2)."""
    return positions[:, None, :, None] * 100.0 ** (-torch.arange(0, E, 2, device=positions.device) / E)


def turned_by_halves(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def turned_as_a_whole(x: Tensor, angle: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    angle = torch.cat([angle, angle], -1)
    return x * angle.cos() + torch.cat([-b, a], -1) * angle.sin()


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def table(x: Tensor, width: int = E, speed: float = 1.0) -> Tensor:
    """Angles (L, width / 2)."""
    positions = torch.arange(L, device=x.device)[:, None]
    return speed * positions * 100.0 ** (-torch.arange(0, width, 2, device=x.device) / width)
