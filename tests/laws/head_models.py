"""Attentions whose heads are laid out in one way or another, right and wrong, for the law `heads`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

HEADS, WIDTH, SIZE, LENGTH = 4, 32, 8, 12
MASKS = (torch.arange(LENGTH) < torch.tensor([[12], [8], [5]])).long()
Repeat = Callable[[Tensor], Tensor]


def x_of(batch: int = 2) -> Tensor:
    return torch.randn(batch, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def side_by_side(x: Tensor) -> Tensor:
    return x.repeat_interleave(HEADS // x.shape[1], 1)


def tiled(x: Tensor) -> Tensor:
    return x.repeat(1, HEADS // x.shape[1], 1, 1)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * SIZE**-0.5).softmax(-1) @ v


def halves_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query heads as (2, keys' heads): each head of keys meets q heads that are 2 apart."""
    q = q.unflatten(1, (-1, k.shape[1]))
    return (q @ k[:, None].mT * SIZE**-0.5).softmax(-1).matmul(v[:, None]).flatten(1, 2)


class Heads(nn.Module):
    """An attention of four query heads.

    Args:
        groups: Heads of keys and values.
        repeat: Makes k of all query heads, or None.
        repeat_values: The same for v; as `repeat` by default.
        core: The attention.
        norm: A norm of q and k: none, "each" (a gain for a feature), "all" (gains of all heads together), or
            "own" (a gain of each head and feature).
    """

    def __init__(
        self, groups: int = HEADS, repeat: Repeat | None = side_by_side, repeat_values: Repeat | None = None,
        core: Callable[..., Tensor] = F.scaled_dot_product_attention, norm: str = "",
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, groups * SIZE),
            nn.Linear(WIDTH, groups * SIZE),
        )
        self.o, self.groups, self.core, self.norm = nn.Linear(WIDTH, WIDTH), groups, core, norm
        self.repeat, self.repeat_values = repeat, repeat_values or repeat
        widths = {"each": (SIZE, SIZE), "all": (WIDTH, groups * SIZE)}.get(norm)
        if widths is not None:
            self.q_norm, self.k_norm = (nn.RMSNorm(width) for width in widths)
        self.gain = nn.Parameter(torch.rand(HEADS, 1, SIZE) + 0.5)
        with torch.no_grad():
            for part in self.modules():
                if isinstance(part, nn.RMSNorm):
                    part.weight.uniform_(0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self.norm == "all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, SIZE)).transpose(1, 2) for t in (q, k, v))
        if self.norm == "each":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.norm == "own":
            q = q * self.gain
        if self.repeat is not None and self.repeat_values is not None:
            k, v = self.repeat(k), self.repeat_values(v)
        return self.o(self.core(q, k, v).transpose(1, 2).flatten(2))


FUSED: dict[str, tuple[int, Callable[[Tensor], Any]]] = {
    "three": (3 * HEADS, lambda t: t.unflatten(2, (3, HEADS)).unbind(2)),  # q of all heads, k of all, v of all
    "by head": (3 * HEADS, lambda t: t.unflatten(2, (HEADS, 3)).unbind(3)),  # GPT-NeoX
    "by group": (2 * (2 + 2), lambda t: t.unflatten(2, (2, 4)).split((2, 1, 1), 3)),  # Falcon: 2 of q, then k and v
}


class Fused(nn.Module):
    """One projection of q, k and v, in one of the layouts that released models have; `wrong` tiles its groups."""

    def __init__(self, layout: str, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        parts, self.cut = FUSED[layout]
        self.qkv, self.o, self.wrong = nn.Linear(WIDTH, parts * SIZE), nn.Linear(WIDTH, WIDTH), wrong

    def forward(self, x: Tensor) -> Tensor:
        parts = self.cut(self.qkv(x).unflatten(-1, (-1, SIZE)))
        q, k, v = (t.flatten(2, -2).transpose(1, 2) for t in parts)
        k, v = (tiled(k), tiled(v)) if self.wrong else (side_by_side(k), side_by_side(v))
        return self.o(eager(q, k, v).transpose(1, 2).flatten(2))


TERMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # (batch * heads, 1 or rows, keys)
    "mask": lambda pad, bias: pad.repeat_interleave(HEADS, 0),
    "mask tiled": lambda pad, bias: pad.repeat(HEADS, 1, 1),
    "bias": lambda pad, bias: bias.repeat(len(pad), 1, 1),
    "bias tiled": lambda pad, bias: bias.repeat_interleave(len(pad), 0),
    "both": lambda pad, bias: TERMS["mask"](pad, bias) + TERMS["bias"](pad, bias),
}


class Terms(nn.Module):
    """A mask of each sample, or a bias of each head, for an attention that takes them as (batch * heads)."""

    def __init__(self, which: str, multihead: bool = False, groups: int = HEADS) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.which = TERMS[which]
        self.slopes = nn.Parameter(2.0 ** -torch.arange(1.0, 1 + HEADS))
        self.embed = nn.Embedding(50, WIDTH)
        self.multihead = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True) if multihead else None
        self.attention = None if multihead else Heads(groups)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x, distance = self.embed(input_ids), torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
        pad = torch.zeros(len(x), 1, LENGTH).masked_fill(~attention_mask.bool()[:, None], -torch.inf)
        terms = self.which(pad, -self.slopes[:, None, None] * distance.abs()).expand(-1, LENGTH, -1)
        if self.multihead is not None:
            return self.multihead(x, x, x, attn_mask=terms)[0]
        assert self.attention is not None
        self.attention.core = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, terms.unflatten(0, (-1, HEADS)))
        return self.attention(x)


class Latent(nn.Module):
    """Keys with a part that is common to all heads, as multi-head latent attention has it."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.down = nn.Linear(WIDTH, HEADS * 2 * SIZE), nn.Linear(WIDTH, 6 + SIZE)
        self.up, self.o = nn.Linear(6, HEADS * 2 * SIZE), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        low, common = self.down(x).split((6, SIZE), -1)
        k, v = self.up(low).unflatten(-1, (HEADS, -1)).transpose(1, 2).chunk(2, -1)
        k = torch.cat((k, common[:, None].expand(-1, HEADS, -1, -1)), -1)
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Sinks(Heads):
    """A learned sink for each head (gpt-oss)."""

    def __init__(self, repeat: Repeat = side_by_side) -> None:
        super().__init__(2, repeat)
        self.sinks = nn.Parameter(torch.tensor([1.0, 0.5, 2.0, -0.5]))
        self.core = self.with_sinks

    def with_sinks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        logits = q @ k.mT * SIZE**-0.5
        beside = self.sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat((logits, beside), -1).softmax(-1)[..., :-1] @ v


class Windows(Heads):
    """Half of the heads see their neighbours only, on purpose, and so does each head of a batch of any size."""

    def __init__(self) -> None:
        super().__init__(core=self.with_windows)

    def with_windows(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        near = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs() < 3
        seen = torch.stack([near if head % 2 else torch.ones_like(near) for head in range(HEADS)])
        return F.scaled_dot_product_attention(q, k, v, seen)
