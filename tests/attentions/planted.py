"""Attention written in seven styles, each with the right scale or with one of the ten mistakes planted in it.

A style is how an engineer writes the attention; a mistake is what went wrong with its scale. `planted(style,
mistake)` builds a stack of three such layers; `None` is the healthy one.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional

HEADS, HEAD_DIM, LAYERS = 4, 24, 3
WIDTH = HEADS * HEAD_DIM
PADDED = 32
BROAD = 160  # a width whose part for a head, 40, is not the head's size
FACTOR = 16.0

STYLES = ("eager", "sdpa_scale", "prescaled_q", "rope", "gqa", "qk_norm", "fused_qkv")
PLANTED = (
    "missing",
    "twice",
    "inverted",
    "model_dim",
    "head_count",
    "derived_head",
    "padded_head",
    "length_factor",
    "layer_index",
    "cosine",
)

SCALES = {
    "inverted": HEAD_DIM**0.5,
    "model_dim": WIDTH**-0.5,
    "head_count": HEADS**-0.5,
    "derived_head": (BROAD // HEADS) ** -0.5,
    "padded_head": PADDED**-0.5,
}

_LITERALS: dict[str | None, float] = (
    dict.fromkeys((None, *PLANTED), HEAD_DIM**-0.5) | SCALES | {"missing": HEAD_DIM**-0.5}
)


def width_of(mistake: str | None) -> int:
    """The width of the model."""
    return BROAD if mistake == "derived_head" else WIDTH


def _rotate(x: Tensor) -> Tensor:
    length, width = x.shape[-2:]
    angle = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(0, width, 2) / width)
    table = torch.cat((angle, angle), -1)
    left, right = x.chunk(2, -1)
    return x * table.cos() + torch.cat((-right, left), -1) * table.sin()


class Attention(nn.Module):
    """One attention in the given style, with the given mistake."""

    def __init__(self, style: str, mistake: str | None, layer: int) -> None:
        super().__init__()
        self.style, self.mistake, self.layer = style, mistake, layer
        self.num_heads, self.head_dim = HEADS, HEAD_DIM
        self.kv_heads = HEADS // 2 if style == "gqa" else HEADS
        # What the author believed the scale to be. Forgetting it leaves the attribute right and unused. In the eager
        # style the number stands in the code, and no attribute tells of it.
        if style != "eager":
            self.scale = _LITERALS[mistake]
        width = width_of(mistake)
        if style == "fused_qkv":
            self.qkv = nn.Linear(width, 3 * WIDTH)
        else:
            self.q = nn.Linear(width, WIDTH)
            self.k = nn.Linear(width, self.kv_heads * HEAD_DIM)
            self.v = nn.Linear(width, self.kv_heads * HEAD_DIM)
        if style == "qk_norm":
            self.q_norm, self.k_norm = nn.RMSNorm(HEAD_DIM), nn.RMSNorm(HEAD_DIM)
        self.out = nn.Linear(WIDTH, width)

    def _project(self, x: Tensor) -> list[Tensor]:
        parts = self.qkv(x).chunk(3, -1) if self.style == "fused_qkv" else (self.q(x), self.k(x), self.v(x))
        return [part.unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2) for part in parts]

    def _believed(self) -> float:
        return _LITERALS[self.mistake] if self.style == "eager" else self.scale

    def _factor(self) -> float:
        """The factor that reaches the logits."""
        if self.mistake == "missing":
            return 1.0
        if self.mistake == "layer_index":
            return self._believed() / (self.layer + 1)
        return self._believed()

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, width) in and out, causal."""
        q, k, v = self._project(x)
        if self.style == "qk_norm":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.mistake == "cosine":
            q, k = functional.normalize(q, dim=-1), functional.normalize(k, dim=-1)
        if self.style == "rope":
            q, k = _rotate(q), _rotate(k)
        factor = self._factor()
        if self.mistake == "twice":
            q = q * self._believed()  # and once more below
        if self.style == "gqa":
            k, v = (t.repeat_interleave(HEADS // self.kv_heads, dim=1) for t in (k, v))
        if self.style == "sdpa_scale":
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=factor)
        else:
            if self.style == "prescaled_q":
                q, factor = q * factor, 1.0
            logits = q @ k.transpose(-1, -2)
            if factor != 1.0:
                logits = logits * factor
            hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            y = logits.masked_fill(hidden, -math.inf).softmax(-1) @ v
        return self.out(y.transpose(1, 2).flatten(2))


class Stack(nn.Module):
    """A residual stack of attentions; its config declares what the length factor should have been."""

    def __init__(self, style: str, mistake: str | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Attention(style, mistake, i) for i in range(LAYERS))
        if mistake == "length_factor":
            yarn = {"rope_type": "yarn", "factor": FACTOR, "mscale_all_dim": 1.0}
            self.config = SimpleNamespace(rope_parameters=yarn)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, width) in and out."""
        for layer in self.layers:
            x = x + layer(x)
        return x


def planted(style: str, mistake: str | None) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A stack with the mistake planted in that style, and an input."""
    torch.manual_seed(0)
    return Stack(style, mistake).eval(), (torch.randn(2, 10, width_of(mistake)),)
