"""Models with ids and a padding mask, whose attention is written in several ways: some give NaN, some do not."""

import math

import torch
from torch import nn
from torch.nn import functional as F

NAN, INF = math.nan, math.inf
HEADS, WIDTH = 4, 32


def softened(q, k, v, hidden):
    return (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -INF).softmax(-1) @ v


def written_out(q, k, v, hidden):
    logits = (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -INF)
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    return weights / weights.sum(-1, keepdim=True) @ v


def cleaned(q, k, v, hidden):
    return (q @ k.mT / math.sqrt(WIDTH // HEADS)).masked_fill(hidden, -INF).softmax(-1).nan_to_num(0.0) @ v


def fused(q, k, v, hidden):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=~hidden)


def multiplied(q, k, v, hidden):
    """Zero times infinity: every key that is not hidden gets a NaN."""
    return (q @ k.mT / math.sqrt(WIDTH // HEADS) + hidden.to(q.dtype) * -INF).softmax(-1) @ v


class Block(nn.Module):
    def __init__(self, attend):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down, self.attend = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH), attend

    def forward(self, x, hidden):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(self.attend(q, k, v, hidden).transpose(1, 2).flatten(2))
        return x + self.down(self.up(x).relu())


class Reader(nn.Module):
    """Ids and a padding mask in, a prediction for each token out."""

    def __init__(self, attend=softened, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, WIDTH)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(layers))
        self.register_buffer("gain", torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, 50)
        self.eval()

    def forward(self, ids, attention_mask):
        hidden = ~attention_mask.bool()[:, None, None, :] | ~torch.ones(ids.shape[1], ids.shape[1]).bool().tril()
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x, hidden)
        return {"logits": self.head(x * self.gain)}


def inputs(padding=0):
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, :padding] = 0
    return {"ids": torch.arange(24).view(2, 12), "attention_mask": mask}


def of_nonfinite(report):
    return [finding for finding in report.findings if finding.rule == "nonfinite"]
