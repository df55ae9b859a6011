"""A byte-level decoder: causal attention with rotary positions, and a network, in pre-norm layers."""

from __future__ import annotations

from torch import Tensor, nn

from sqrtdk.lab.training.attention import AuxOutputs, Layer
from sqrtdk.lab.training.settings import Settings
from sqrtdk.lab.training.text import BYTES


class Decoder(nn.Module):
    """Bytes to the logits of the next byte; the weights that read bytes also predict them.

    Example:
        >>> import torch
        >>> settings = Settings("decoder", head_dim=512, rate=1e-3, seed=0)
        >>> Decoder(settings)(torch.zeros(1, 5, dtype=torch.long)).shape
        torch.Size([1, 5, 256])
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.embed = nn.Embedding(BYTES, settings.width)
        self.layers = nn.ModuleList(Layer(settings, causal=True, rotary=True) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width, eps=1e-6)

    def forward(self, text: Tensor, record: AuxOutputs | None = None) -> Tensor:
        """Bytes (B, L) to logits (B, L, 256)."""
        x = self.embed(text)
        for layer in self.layers:
            x = layer(x, record=record)
        return nn.functional.linear(self.norm(x), self.embed.weight)
