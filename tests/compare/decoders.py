"""A small decoder, and what a port of it may get wrong outside of its attentions."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk.compare.records import DiffReport

WIDTH, VOCABULARY = 16, 23
IDS = torch.arange(14).view(2, 7)


class Attend(nn.Module):
    """Causal attention of two heads; its scale and how the heads are merged are for a port to get wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale: float | None = None
        self.transposed = True

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)
        return self.out(heads.transpose(1, 2).flatten(2) if self.transposed else heads.reshape(x.shape))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attend, self.norm2 = nn.LayerNorm(WIDTH), Attend(), nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.kept = 1.0  # of the residual around the attention

    def forward(self, x: Tensor) -> Tensor:
        x = self.kept * x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, returned: Callable[[Tensor, Tensor], Any] = lambda logits, _: logits) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.returned = returned

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.returned(self.head(self.norm(x)), x)


class LowRank(nn.Module):
    """An adapter around a projection, as peft puts one there."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def decoder(**options: Any) -> Decoder:
    torch.manual_seed(5)
    return Decoder(**options).eval()


def changed(*changes: Callable[[Decoder], None], **options: Any) -> Decoder:
    model = decoder(**options)
    for change in changes:
        change(model)
    return model


@torch.no_grad()
def doubled_head(model: Decoder) -> None:
    model.head.weight.mul_(2)


def adapted(model: Decoder) -> None:
    model.layers[1].attend.out = LowRank(model.layers[1].attend.out)  # type: ignore[union-attr,arg-type]


def other_activation(model: Decoder) -> None:
    model.layers[1].mlp[1] = nn.ReLU()  # type: ignore[union-attr,index,operator]


def other_activation_first(model: Decoder) -> None:
    model.layers[0].mlp[1] = nn.ReLU()  # type: ignore[union-attr,index,operator]


def other_norm(model: Decoder) -> None:
    model.norm.eps = 0.01


def lost_residual(model: Decoder) -> None:
    model.layers[1].kept = 0.0  # type: ignore[assignment]


def lost_residual_first(model: Decoder) -> None:
    model.layers[0].kept = 0.0  # type: ignore[assignment]


def untransposed(model: Decoder) -> None:
    model.layers[1].attend.transposed = False  # type: ignore[union-attr,assignment]


@torch.no_grad()
def other_embedding(model: Decoder) -> None:
    model.embed.weight[IDS.flatten()[3]] *= 1.5


def unscaled(model: Decoder) -> None:
    model.layers[0].attend.scale = 1.0  # type: ignore[union-attr,assignment]


def without_lines(text: str) -> str:
    """What is said, without the lines of the code: "(tests/compare/decoders.py:42)"."""
    return re.sub(r" ?[(（][\w/.]+\.py:[\d-]+[)）]", "", text)


def first(report: DiffReport) -> tuple[str, str] | None:
    return None if report.first_module is None else (report.first_module.a, report.first_module.b)
