"""Attention whose heads meet: mixed, averaged, combined. Each style is a function of the module, q, k and v."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.tracing import AttentionCall, Trace
from tests.attentions.each import each

B, L, H, E = 3, 9, 4, 16  # no two alike
D = H * E
ROOT = E**-0.5
Attend = Callable[[Any, Tensor, Tensor, Tensor], Tensor]


class Heads(nn.Module):
    """Self-attention in a style; `scale` is what its style multiplies q . k with."""

    def __init__(self, attend: Attend, scale: float = ROOT) -> None:
        super().__init__()
        self.attend, self.factor = attend, scale
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.mix, self.remix = (nn.Parameter(torch.eye(H) + 0.2 * torch.randn(H, H)) for _ in range(2))
        self.wider = nn.Parameter(torch.randn(H, 6))
        self.before, self.after = nn.Linear(H, H), nn.Linear(H, H)
        self.pixel, self.pixel_after = nn.Conv2d(H, H, 1, bias=False), nn.Conv2d(H, H, 1)
        self.batch, self.layer = nn.BatchNorm2d(H), nn.LayerNorm(H)
        self.position, self.gate = nn.Linear(3, H), nn.Parameter(torch.linspace(-1, 1, H))
        self.table = nn.Parameter(0.3 * torch.randn(L - 1, L - 1, E))
        self.share = nn.Parameter(torch.tensor(0.4))
        self.last = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (H, E)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.attend(self, q, k, v).transpose(1, 2).flatten(2)


def logits(m: Any, q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * m.factor


def linear(layer: nn.Module, heads: Tensor) -> Tensor:
    """A layer over the heads of (B, H, L, S)."""
    return layer(heads.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def causal(like: Tensor) -> Tensor:
    return torch.ones(L, L, dtype=torch.bool, device=like.device).tril()


over_devices = each("device", ["cpu", "meta"])


def trace(attend: Attend, device: str = "cpu") -> tuple[Heads, Tensor, Trace]:
    """A run in float64, whose output is that of a run without a trace."""
    torch.manual_seed(0)
    model = Heads(attend).double().eval().to(device)
    x = torch.randn(B, L, D, dtype=torch.float64, device=device)
    with torch.no_grad():
        torch.manual_seed(1)
        plain = model(x) if device == "cpu" else None
        torch.manual_seed(1)
        with sqrtdk.trace(model) as run:
            observed = model(x)
    assert plain is None or torch.equal(plain, observed)
    return model, x, run


def read(attend: Attend, device: str = "cpu") -> AttentionCall:
    _, _, run = trace(attend, device)
    (call,) = run.calls
    assert run.not_measured == ()
    return call


# -- logits mixed over the heads ---------------------------------------------------------------------------------------


def mixed(mix: Callable[[Any, Tensor], Tensor]) -> Attend:
    return lambda m, q, k, v: mix(m, logits(m, q, k)).softmax(-1) @ v


def heads_last(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Queries, keys, heads, as in the paper's pseudocode."""
    z = torch.einsum("bhid,bhjd->bijh", q * m.factor, k)
    w = torch.einsum("bijh,hg->bijg", z, m.mix).softmax(2)
    return torch.einsum("bijg,gh,bhjd->bhid", w, m.remix, v)


def mixed_and_masked(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = torch.einsum("bhij,hg->bgij", logits(m, q, k), m.mix).masked_fill(~causal(q), -math.inf)
    return torch.einsum("bhij,hg->bgij", z.softmax(-1), m.remix) @ v


def capped(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (5 * torch.tanh(linear(m.before, logits(m, q, k)) / 5)).softmax(-1) @ v


# name -> attend, and the matrix that mixes (H mixed, H)
MIXED: dict[str, tuple[Attend, Callable[[Any], Tensor]]] = {
    "linear": (mixed(lambda m, z: linear(m.before, z)), lambda m: m.before.weight),
    "einsum": (mixed(lambda m, z: torch.einsum("bhij,hg->bgij", z, m.mix)), lambda m: m.mix.mT),
    "heads last": (mixed(lambda m, z: (z.permute(0, 2, 3, 1) @ m.mix).permute(0, 3, 1, 2)), lambda m: m.mix.mT),
    "from the left": (mixed(lambda m, z: (m.mix @ z.flatten(2)).unflatten(2, (L, L))), lambda m: m.mix),
    "convolution": (mixed(lambda m, z: m.pixel(z)), lambda m: m.pixel.weight[:, :, 0, 0]),
    "convolution with a bias": (mixed(lambda m, z: m.pixel_after(z)), lambda m: m.pixel_after.weight[:, :, 0, 0]),
    "added to themselves": (mixed(lambda m, z: z + m.pixel(z)), lambda m: torch.eye(H) + m.pixel.weight[:, :, 0, 0]),
    "added to themselves, turned": (
        mixed(lambda m, z: torch.einsum("bhij,hg->bgij", z, m.mix) + z),
        lambda m: torch.eye(H) + m.mix.mT,
    ),
    "linear, then linear on the weights": (
        lambda m, q, k, v: linear(m.after, linear(m.before, logits(m, q, k)).softmax(-1)) @ v,
        lambda m: m.before.weight,
    ),
}

# -- weights over the heads --------------------------------------------------------------------------------------------


def weighed(change: Callable[[Any, Tensor], Tensor]) -> Attend:
    return lambda m, q, k, v: change(m, logits(m, q, k).softmax(-1)) @ v


# name -> what happens to the weights, and the stages that say so
AFTER: dict[str, tuple[Callable[[Any, Tensor], Tensor], list[str]]] = {
    "linear": (lambda m, w: linear(m.after, w), ["mix"]),
    "einsum": (lambda m, w: torch.einsum("bhij,hg->bgij", w, m.remix), ["mix"]),
    "convolution": (lambda m, w: m.pixel_after(w), ["mix"]),
    "added to themselves": (lambda m, w: w + m.pixel(w), ["mix"]),
    "added to themselves, turned": (lambda m, w: torch.einsum("bhij,hg->bgij", w, m.remix) + w, ["mix"]),
    "batch norm": (lambda m, w: m.batch(m.pixel(w)), ["mix", "norm"]),
    "layer norm": (lambda m, w: linear(m.layer, torch.einsum("bhij,hg->bgij", w, m.remix)), ["mix", "norm"]),
    "mean": (lambda m, w: w.mean(1, keepdim=True), ["mean"]),
    "mean without its axis": (lambda m, w: w.mean(1)[:, None], ["mean"]),
    "sum by the heads": (lambda m, w: w.sum(1, keepdim=True) / H, ["sum"]),
    "gate, then mean": (lambda m, w: (w * m.gate.view(H, 1, 1)).mean(1, keepdim=True), ["mean"]),
}

# -- weights of two softmaxes ------------------------------------------------------------------------------------------


def distances(like: Tensor) -> Tensor:
    """(1, L, L, 3): functions of i - j, from which ConViT learns where a head looks."""
    i = torch.arange(L, device=like.device, dtype=like.dtype)
    far = i[:, None] - i[None, :]
    return torch.stack([far, far.square(), far.abs()], -1)[None] / L


def positional(m: Any, like: Tensor) -> Tensor:
    return m.position(distances(like).expand(len(like), -1, -1, -1)).permute(0, 3, 1, 2).softmax(-1)


def convit(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    content, gate = logits(m, q, k).softmax(-1), torch.sigmoid(m.gate.view(1, -1, 1, 1))
    w = (1 - gate) * content + gate * positional(m, q)
    w /= w.sum(dim=-1).unsqueeze(-1)
    return w @ v


def positions_first(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    there, content = positional(m, q), logits(m, q, k).softmax(-1)
    return (0.3 * there + 0.7 * content) @ v


def fixed_positions(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (0.5 * logits(m, q, k).softmax(-1) + 0.5 * (-distances(q)[..., 1]).softmax(-1)) @ v


def halves(m: Any, q: Tensor, k: Tensor) -> list[Tensor]:
    """The weights of two groups of heads, each by a softmax of its own."""
    return [logits(m, a, b).softmax(-1) for a, b in zip(q.chunk(2, 1), k.chunk(2, 1), strict=True)]


def differential(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    first, second = halves(m, q, k)
    share = torch.exp(m.share) - torch.exp(2 * m.share) + 0.8
    return (first - share * second).repeat(1, 2, 1, 1) @ v


def differential_in_one(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One softmax for twice as many heads, whose halves are subtracted."""
    hidden = torch.full((L, L), -math.inf, device=q.device, dtype=q.dtype).triu(1)
    w = functional.softmax(logits(m, q, k) + hidden, dim=-1).unflatten(1, (H // 2, 2))
    return (w[:, :, 0] - m.share * w[:, :, 1]) @ v.unflatten(1, (H // 2, 2)).transpose(2, 3).flatten(3)


def mixture(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (0.5 * sum(halves(m, q, k))).repeat(1, 2, 1, 1) @ v


def groups(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat(halves(m, q, k), 1) @ v


# name -> attend, heads of each call, softmaxes that are no attention, the words for it
COMBINED: dict[str, tuple[Attend, list[int], int, str]] = {
    "convit": (convit, [H], 1, "added to another softmax"),
    "positions first": (positions_first, [H], 1, "added to another softmax"),
    "lerp": (
        lambda m, q, k, v: torch.lerp(logits(m, q, k).softmax(-1), positional(m, q), 0.3) @ v,
        [H],
        1,
        "averaged with another softmax",
    ),
    "fixed positions": (fixed_positions, [H], 1, "added to another softmax"),
    "differential": (differential, [H // 2] * 2, 0, "less another softmax"),
    "differential in one": (differential_in_one, [H], 0, "less another softmax"),
    "mixture": (mixture, [H // 2] * 2, 0, "added to another softmax"),
    "groups of heads": (groups, [H // 2] * 2, 0, "side by side with another softmax"),
}
