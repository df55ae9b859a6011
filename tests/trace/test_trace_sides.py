"""What happens to q and k between projection and product: the record says so, and takes the scale from beneath it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import sqrtdk
from sqrtdk.tracing import AttentionCall

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
        with sqrtdk.trace(model) as run:
            model(x, *(other.to(x.device) for other in others))
    assert len(run.calls) == 1, (run.not_attention, run.not_measured)
    return run.calls[0]


def test_keys_joined_by_cat_keep_their_groups() -> None:
    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = torch.cat([part.repeat_interleave(2, dim=1) for part in k.chunk(2, dim=-2)], -2)
        return scores(q, k, v.repeat_interleave(2, dim=1))

    call = traced(attend, kv_heads=H // 2)
    assert (call.heads, call.kv_heads, call.formula) == (H, H // 2, "softmax(0.25 * q.k)")
