"""Small models with one mistake each, and the same without it: what laws are shown on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention as sdpa

VOCABULARY, WIDTH, HEADS = 40, 32, 4


class Attention(nn.Module):
    """Self-attention that takes a mask of (B, L), or forgets it."""

    def __init__(self, *, causal: bool = False, takes_mask: bool = True) -> None:
        super().__init__()
        self.is_causal, self.takes_mask = True, takes_mask
        self.applies = causal
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, WIDTH // HEADS)).permute(2, 0, 3, 1, 4)
        length = x.shape[1]
        seen = torch.ones(length, length, dtype=torch.bool)
        seen = seen.tril() if self.applies else seen
        if attention_mask is not None and self.takes_mask:
            seen = seen & attention_mask[:, None, None, :].bool()
        return self.out(sdpa(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    """Ids to logits through one attention, which says that it is causal."""

    def __init__(self, *, causal: bool = True, takes_mask: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.attn = nn.Embedding(VOCABULARY, WIDTH), Attention(causal=causal, takes_mask=takes_mask)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        x = self.embed(input_ids)
        return self.head(x + self.attn(x, attention_mask))


def leaking() -> Decoder:
    """Later tokens move earlier outputs."""
    return Decoder(causal=False)


def ids(batch: int = 2, length: int = 12) -> dict[str, Tensor]:
    """Ids without padding, and their mask."""
    drawn = torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(0))
    return {"input_ids": drawn, "attention_mask": torch.ones_like(drawn)}
