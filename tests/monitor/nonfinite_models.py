"""A decoder that is hurt in one place, and what a watch says of one step of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sqrtdk.messages import said
from sqrtdk.monitor.samples import Alarm, StepSample
from sqrtdk.monitor.watch import Watch

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


Hurt = Callable[["Decoder"], object]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class LogNorm(nn.Module):
    """Divides by the logarithm of the size: of a row of zeros that is 0 * inf."""

    def forward(self, x: Tensor) -> Tensor:
        return x * x.abs().sum(-1, keepdim=True).log()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention, self.between = nn.LayerNorm(8), Attention(), nn.LayerNorm(8)
        self.mlp: nn.Module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), nn.Linear(16, 8))
        self.again: bool | None = None  # computed again in the backward pass; the value of use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        y = self.between(x)
        return x + (self.mlp(y) if self.again is None else checkpoint(self.mlp, y, use_reentrant=self.again))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(), Block()]), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Summed(Decoder):
    """The sums are taken between the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block.mlp(block.before(x))
        return self.head(x)


def ones(fill: float = 1.0) -> Tensor:
    x = torch.randn(2, 5, 8)
    return x if fill == 1.0 else torch.full_like(x, fill)


def squares(y: Tensor) -> Tensor:
    return y.float().square().mean()


def watched(
    model: nn.Module, *inputs: Tensor, loss: Callable[[Any], Tensor] = squares, called: nn.Module | None = None
) -> tuple[StepSample, str]:
    """One step of a forward pass for each input: its sample, and the alarm that is looked for, "" for none."""
    told: list[Alarm] = []
    with Watch(model, every=1, on_alarm=told.append) as health:
        losses = [loss((called or model)(x)) for x in inputs]
        for one in losses:
            one.backward()
        health.step(sum(losses))
    texts = [alarm.text for alarm in told if alarm.name == "nonfinite"]
    assert len(texts) < 2
    return health.samples[0], texts[0] if texts else ""


def first_of(*args: Any, **options: Any) -> tuple[str, str, str]:
    """Module, cause and detail; the alarm has them, in two languages."""
    sample, text = watched(*args, **options)
    assert sample.first is not None
    assert sample.first.site in text.partition("the first output that is not finite")[2]
    assert "first output" not in said(text, "zh")
    return sample.first.site, sample.first.cause, sample.first.detail


def filled(*numbers: tuple[str, float]) -> Hurt:
    """Parameters whose every number is this one."""

    def fill(model: Decoder) -> None:
        for name, number in numbers:
            nn.init.constant_(model.get_parameter(name), number)

    return fill
