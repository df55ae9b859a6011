"""What the weights of a tile are summed up to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.stats._block import Block

if TYPE_CHECKING:
    from jaxtyping import Float


@dataclass(frozen=True, slots=True)
class Values:
    """The output of attention: the weighted sum of values (B, H, S, Ev), widened a tile at a time."""

    value: Float[Tensor, "B H S Ev"]
    group: int  # query heads that share a value head

    @property
    def columns(self) -> int:
        """Ev."""
        return self.value.shape[-1]

    def __call__(self, weights: Float[Tensor, "B Hq R C"], block: Block) -> Float[Tensor, "B Hq R Ev"]:
        """One product for all query heads that share a value head."""
        depth, width, height, keys = block.sizes
        heads = slice(block.h0 // self.group, block.h1 // self.group)
        v = self.value[block.b0 : block.b1, heads, block.c0 : block.c1].to(weights.dtype)
        pairs, rows = depth * width // self.group, self.group * height
        out = torch.empty(pairs, rows, self.columns, dtype=v.dtype, device=v.device)
        # autocast leaves operations with out= alone
        torch.bmm(weights.view(pairs, rows, keys), v.reshape(pairs, keys, self.columns), out=out)
        return out.view(depth, width, height, self.columns)


@dataclass(frozen=True, slots=True)
class Future:
    """The weight on keys j > i."""

    columns: int = 1

    def __call__(self, weights: Float[Tensor, "B Hq R C"], block: Block) -> Float[Tensor, "B Hq R 1"]:
        """Of a tile, the part above the diagonal of the whole."""
        first = max(0, min(block.sizes[3], block.r0 - block.c0))
        return weights[..., first:].triu(1 + block.r0 - block.c0 - first).sum(-1, keepdim=True)
