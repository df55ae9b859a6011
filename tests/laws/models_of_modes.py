"""Models that do something otherwise in train mode: what the law `modes` finds, and what it lets pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.laws.own_models import HEADS, LENGTH, VOCABULARY, WIDTH, ids, padded


class Attention(nn.Module):
    """Self-attention that does one thing otherwise in one of its modes, and drops weights by 0.3 in train mode."""

    def __init__(self, wrong: str | None = None, written_out: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.RMSNorm(WIDTH // HEADS)
        self.wrong, self.written_out, self.rate = wrong, written_out, 0.3

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        train, wrong = self.training, self.wrong
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4) * 2
        length = x.shape[1]
        if not (wrong == "norm" and train):
            q = self.norm(q)
        q = turned(q, 5 if wrong == "rotation" and train else 0)
        k = turned(k, 0)
        seen = shown[:, None, None].bool().expand(-1, 1, length, -1)
        if wrong == "mask" and train:
            seen = torch.ones_like(seen)
        if wrong == "causal" and train:
            seen = seen.tril()
        scale = q.shape[-1] ** (-0.25 if wrong == "scale" and train else -0.5)
        rate = self.rate if train else 0.0
        if self.written_out:
            logits = (q @ k.mT * scale).masked_fill(~seen, -1e9)
            out = F.dropout(logits.softmax(-1), self.rate, train) @ v
        else:
            out = F.scaled_dot_product_attention(q, k, v, seen, rate, scale=scale)
        if wrong == "rate":
            out = out * (1 - rate)
        return self.out(out.transpose(1, 2).flatten(2))


def turned(x: Tensor, first: int) -> Tensor:
    angle = (torch.arange(x.shape[-2]) + first)[:, None] * 0.5 ** torch.arange(x.shape[-1] // 2)
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


class Model(nn.Module):
    """Ids in, hidden states out, through two layers of which the second may be wrong; `extra` runs between them."""

    def __init__(self, wrong: str | None = None, written_out: bool = False, extra: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.dropout = nn.Embedding(VOCABULARY, WIDTH), nn.Dropout(0.2)
        self.first, self.second = Attention(None, written_out), Attention(wrong, written_out)
        self.extra = nn.Identity() if extra is None else extra

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        x = self.dropout(self.embed(input_ids))
        x = self.extra(x + self.first(x, attention_mask))
        return x + self.second(x, attention_mask)


def inputs() -> dict[str, Tensor]:
    return {"input_ids": ids(), "attention_mask": padded()}


class Drops(nn.Module):
    """A dropout that is written by hand, whose rate stands where it is put."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        if where == "attribute":
            self.drop_prob = 0.4
        elif where == "config":
            self.config = type("Config", (), {})()
            self.config.hidden_dropout = 0.4
        elif where == "dict":
            self.options = {"drop_path": 0.4}

    def forward(self, x: Tensor) -> Tensor:
        rate = {
            "attribute": lambda: self.drop_prob, "config": lambda: self.config.hidden_dropout,
            "dict": lambda: self.options["drop_path"], "constant": lambda: 0.4,
        }[self.where]()  # fmt: skip
        if not self.training:
            return x
        return x * (torch.rand_like(x) >= rate) / (1 - rate)


class Takes(nn.Module):
    """A function of the hidden states and the mode."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.function(x, self.training)
        return out


class First(nn.Module):
    """The first of several outputs."""

    def forward(self, outputs: Any) -> Any:
        return outputs[0]


class Keeps(nn.Module):
    """A dropout by hand that knows the share it keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout_keep_prob = 0.8

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * (torch.rand_like(x) < self.dropout_keep_prob) / self.dropout_keep_prob


class Chance(nn.Module):
    """Random in train mode, from one generator or another."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return x * (1 + self.draw()) if self.training else x


class Statistics(nn.Module):
    """A mean over the batch that train mode counts, and eval mode applies."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "parameter":
            self.mean = nn.Parameter(torch.zeros(WIDTH))
        else:
            self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.how == "replaced":
            self.mean = self.mean.lerp(x.mean((0, 1)), 0.1)
        elif self.training:
            self.mean.data.lerp_(x.mean((0, 1)), 0.1)
        return x - self.mean


class Other(Model):
    """Other outputs in train mode."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        x = super().forward(input_ids, attention_mask)
        if self.how == "auxiliary":
            return {"logits": x, "loss": x.mean()} if self.training else {"logits": x}
        if not self.training:
            return x
        if self.how == "raises":
            raise ValueError("labels are needed")
        return (x[:, :1], x.mean()) if self.how == "shape" else (x + 1, x - 1)


class Leaves(nn.Module):
    """Changes what it can in train mode, and may raise then."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.code, self.count, self.kept, self.raises = nn.Parameter(torch.ones(WIDTH)), 0, [], raises
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
            self.seen += 1
            self.kept.append(self.count)
            self.made = True
            self.code.data.mul_(0.5)
            if self.raises:
                raise ValueError("too late")
        return x * self.code


class Encoder(nn.Module):
    """Torch's own encoder, which in eval mode runs fused and puts zeros at padding."""

    def __init__(self, wrong: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.wrong = wrong
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 64, 0.1, batch_first=True)
        self.embed, self.encoder = nn.Embedding(VOCABULARY, WIDTH), nn.TransformerEncoder(layer, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if self.wrong and self.training else None
        return self.encoder(self.embed(input_ids), mask, src_key_padding_mask=attention_mask == 0)


class Longest(Model):
    """Counts over the whole batch."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids, attention_mask) / len(input_ids)


class Mixed(Model):
    """Samples see one another."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = super().forward(input_ids, attention_mask)
        return x + x.mean(0, keepdim=True)
