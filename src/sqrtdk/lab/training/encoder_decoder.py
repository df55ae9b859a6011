"""An encoder and a decoder with cross attention, learned positions, pre-norm."""

from __future__ import annotations

from torch import Tensor, nn

from sqrtdk.lab.training.attention import AuxOutputs, Layer
from sqrtdk.lab.training.settings import Settings
from sqrtdk.lab.training.strings import LETTERS, START, SYMBOLS, letters_in


class EncoderDecoder(nn.Module):
    """A source and the target so far to the logits of the target's letters.

    Example:
        >>> import torch
        >>> settings = Settings("encoder_decoder", head_dim=16, rate=1e-3, seed=0)
        >>> source, target = torch.zeros(2, 12, dtype=torch.long), torch.zeros(2, 9, dtype=torch.long)
        >>> EncoderDecoder(settings)(source, target).shape
        torch.Size([2, 9, 16])
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        width = settings.width
        self.embed = nn.Embedding(SYMBOLS, width)
        self.source_places = nn.Embedding(settings.length, width)
        self.target_places = nn.Embedding(letters_in(settings.length), width)
        self.encoder = nn.ModuleList(Layer(settings) for _ in range(settings.layers))
        self.memory_norm = nn.RMSNorm(width, eps=1e-6)
        self.decoder = nn.ModuleList(Layer(settings, causal=True, cross=True) for _ in range(settings.layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.head = nn.Linear(width, LETTERS, bias=False)

    def forward(self, source: Tensor, target: Tensor, record: AuxOutputs | None = None) -> Tensor:
        """Source (B, S), target (B, T) to logits (B, T, letters); each sees the target's letters before it."""
        memory = self.embed(source) + self.source_places.weight
        for layer in self.encoder:
            memory = layer(memory, record=record)
        memory = self.memory_norm(memory)
        read = nn.functional.pad(target[:, :-1], (1, 0), value=START)
        x = self.embed(read) + self.target_places.weight
        for layer in self.decoder:
            x = layer(x, memory, record)
        return self.head(self.norm(x))  # type: ignore[no-any-return]
