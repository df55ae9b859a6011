"""The smallest causal model: one attention of two heads with a residual."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

WIDTH = 8


class Attention(nn.Module):
    is_causal = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
