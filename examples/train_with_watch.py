"""Train with a watch around the loop, and keep the logits in range by QK-clip.

A small decoder without 1/sqrt(d_k) is trained twice from the same weights: watched alone, and clipped after each step
by what the watch measured. The watch itself changes no number of the model.

    python examples/train_with_watch.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk

STEPS, THRESHOLD = 60, 20.0


class Attention(nn.Module):
    def __init__(self, width: int = 64, heads: int = 2) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0)  # 1/sqrt(32) is missing
        return self.out(mixed.transpose(1, 2).flatten(2))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int = 64, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.attention = nn.ModuleList(Attention(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for attention, norm in zip(self.attention, self.norms, strict=True):
            x = x + attention(norm(x))
        return self.head(x)


def train(clipped: bool) -> None:
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    alarms: list[sqrtdk.monitor.records.Alarm] = []
    with sqrtdk.watch(model, every=1, on_alarm=alarms.append) as watch:
        for _ in range(STEPS):
            start = torch.randint(64, (8, 1))
            ids = (start + torch.arange(33).square()) % 64  # a sequence to learn
            loss = functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            watch.step(loss)
            if clipped:
                sqrtdk.qk_clip_(model, watch, threshold=THRESHOLD)
    largest = max(max(call.columns["max_logit"]) for call in watch.samples[-1].calls)
    names = ", ".join(sorted({alarm.name for alarm in alarms})) or "none"
    print(f"clipped: {clipped}  loss {loss.item():.3f}  largest logit {largest:.1f}  alarms: {names}")


if __name__ == "__main__":
    train(clipped=False)
    train(clipped=True)
