"""Attention whose heads meet: mixed, averaged, combined. Each style is a function of the module, q, k and v."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

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


# -- heads and windows by their layout ---------------------------------------------------------------------------------

ROWS, COLUMNS, SIDE = 6, 9, 3  # of an image, and of a window
WINDOWS = (ROWS // SIDE) * (COLUMNS // SIDE)


class Laid(nn.Module):
    """Self-attention written as a whole, `run(m, x)`, on (B, L, D), or an image (B, ROWS, COLUMNS, D)."""

    def __init__(self, run: Callable[[Any, Tensor], Tensor], scale: float = ROOT) -> None:
        super().__init__()
        self.run, self.factor = run, scale
        self.q, self.k, self.v = (nn.Linear(D, D) for _ in range(3))
        self.qkv, self.last = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.one_a_head = nn.Parameter(torch.randn(3, H, D, E) * D**-0.5)
        self.gain = nn.Parameter(torch.linspace(1, 2, H))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)

    def parts(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.q(x), self.k(x), self.v(x)


def attention(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * m.factor).softmax(-1) @ v


def chunks_in_the_batch(m: Any, x: Tensor) -> Tensor:
    """As the first implementations of the paper had it: heads above the batch."""
    q, k, v = (torch.cat(part.chunk(H, -1), 0) for part in m.parts(x))
    return torch.cat(attention(m, q, k, v).chunk(H, 0), -1)


def splits_in_the_batch(m: Any, x: Tensor) -> Tensor:
    q, k, v = (torch.cat(part.split(E, 2)) for part in m.parts(x))
    w = (torch.bmm(q, k.transpose(1, 2)) / (1 / m.factor)).softmax(-1)
    return torch.cat(torch.bmm(w, v).split(len(x)), 2)


def stacked(dim: int) -> Callable[[Any, Tensor], Tensor]:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = (torch.stack(part.split(E, -1), dim) for part in m.parts(x))
        return torch.cat(attention(m, q, k, v).unbind(dim), -1)

    return run


def heads_above_the_batch(m: Any, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (H, E)).permute(2, 0, 1, 3).reshape(-1, L, E) for part in m.parts(x))
    y = torch.bmm((torch.bmm(q, k.mT) * m.factor).softmax(2), v)
    return y.view(H, -1, L, E).permute(1, 2, 0, 3).flatten(2)


def heads_first(m: Any, x: Tensor) -> Tensor:
    weights = (part.weight.view(H, E, D) for part in (m.q, m.k, m.v))
    q, k, v = (torch.einsum("bld,hed->hble", x, weight) for weight in weights)
    return attention(m, q, k, v).permute(1, 2, 0, 3).flatten(2)


def one_matrix_a_head(m: Any, x: Tensor) -> Tensor:
    """The input is repeated for every head, and met by a stack of matrices."""
    repeated = x.repeat(H, 1, 1).view(H, -1, D)
    q, k, v = (torch.bmm(repeated, weight).view(-1, L, E) for weight in m.one_a_head)
    return torch.cat(attention(m, q, k, v).split(len(x)), -1)


def class_token(m: Any, x: Tensor) -> Tensor:
    """CaiT (Touvron et al. 2021, arXiv:2103.17239): one query, the class token's."""
    q, k, v = (part.unflatten(-1, (H, E)).transpose(1, 2) for part in (m.q(x[:, :1]), m.k(x), m.v(x)))
    return attention(m, q, k, v).transpose(1, 2).flatten(2)


def class_token_without_an_axis(m: Any, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (H, E)) for part in (m.q(x[:, 0]), m.k(x), m.v(x)))
    w = (torch.einsum("bhe,bnhe->bhn", q, k) * m.factor).softmax(-1)
    return torch.einsum("bhn,bnhe->bhe", w, v).flatten(1)


def blocks(x: Tensor) -> Tensor:
    """(B, ROWS, COLUMNS, C) to (B * WINDOWS, SIDE * SIDE, C), as Swin and MaxViT's blocks have it."""
    x = x.view(-1, ROWS // SIDE, SIDE, COLUMNS // SIDE, SIDE, x.shape[-1])
    return x.permute(0, 1, 3, 2, 4, 5).reshape(-1, SIDE * SIDE, x.shape[-1])


def grid(x: Tensor) -> Tensor:
    """MaxViT's grid: each window takes every second or third pixel."""
    x = x.view(-1, SIDE, ROWS // SIDE, SIDE, COLUMNS // SIDE, x.shape[-1])
    return x.permute(0, 2, 4, 1, 3, 5).reshape(-1, SIDE * SIDE, x.shape[-1])


def in_windows(partition: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor], Tensor]:
    def run(m: Any, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (H, E)).transpose(1, 2) for part in m.parts(partition(x)))
        return attention(m, q, k, v)

    return run


def swin(m: Any, x: Tensor) -> Tensor:
    """Shifted windows (Liu et al. 2021, arXiv:2103.14030), the mask one a window."""
    q, k, v = m.qkv(blocks(x.roll((-1, -1), (1, 2)))).unflatten(-1, (3, H, E)).permute(2, 0, 3, 1, 4)
    region = torch.arange(WINDOWS * SIDE * SIDE, device=x.device).view(WINDOWS, -1) % 2
    hidden = (region[:, None] != region[:, :, None]) * -100.0
    z = (q * m.factor @ k.mT).unflatten(0, (-1, WINDOWS)) + hidden[:, None].to(x.dtype)
    return z.flatten(0, 1).softmax(-1) @ v


def windows_after_projection(x: Tensor) -> Tensor:
    """(B, ROWS, COLUMNS, D) to (B, windows, H, SIDE * SIDE, E)."""
    x = x.view(-1, ROWS // SIDE, SIDE, COLUMNS // SIDE, SIDE, H, E)
    return x.permute(0, 1, 3, 5, 2, 4, 6).reshape(len(x), -1, H, SIDE * SIDE, E)


def windows_before_heads(m: Any, x: Tensor) -> Tensor:
    return attention(m, *map(windows_after_projection, m.parts(x)))


def heads_before_windows(m: Any, x: Tensor) -> Tensor:
    return attention(m, *(windows_after_projection(part).transpose(1, 2) for part in m.parts(x)))


def windows_in_three_axes(m: Any, x: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (H, E)).transpose(1, 2).reshape(-1, SIDE * SIDE, E) for part in m.parts(blocks(x)))
    return torch.bmm(torch.bmm(q * m.factor, k.mT).softmax(-1), v)


def padded_windows(m: Any, x: Tensor) -> Tensor:
    """Segment Anything (arXiv:2304.02643): the image padded to whole windows, heads folded into the batch."""
    x = functional.pad(x[:, :-1, :-1], (0, 0, 0, 1, 0, 1))
    qkv = m.qkv(blocks(x)).reshape(-1, SIDE * SIDE, 3, H, E).permute(2, 0, 3, 1, 4)
    return attention(m, *qkv.reshape(3, -1, SIDE * SIDE, E))


def mask_units(m: Any, x: Tensor) -> Tensor:
    """Hiera (Ryali et al. 2023, arXiv:2306.00989): windows run fastest along the tokens."""
    tokens = blocks(x).unflatten(0, (-1, WINDOWS)).transpose(1, 2).flatten(1, 2)
    return attention(m, *m.qkv(tokens).reshape(len(x), -1, WINDOWS, 3, H, E).permute(3, 0, 4, 2, 1, 5))


def mask_units_fused(m: Any, x: Tensor) -> Tensor:
    tokens = blocks(x).unflatten(0, (-1, WINDOWS)).transpose(1, 2).flatten(1, 2)
    q, k, v = m.qkv(tokens).reshape(len(x), -1, WINDOWS, 3, H, E).permute(3, 0, 4, 2, 1, 5)
    return functional.scaled_dot_product_attention(q, k, v, scale=m.factor)


def axial(*axes: int) -> Callable[[Any, Tensor], Tensor]:
    """Along one axis of the image alone; `axes` orders (B, ROWS, COLUMNS, H, E)."""
    return lambda m, x: attention(m, *(part.unflatten(-1, (H, E)).permute(axes) for part in m.parts(x)))


def one_head_in_windows(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.parts(blocks(x).unflatten(0, (-1, WINDOWS)))
    return (q @ k.mT * (m.factor / ROOT * D**-0.5)).softmax(-1) @ v


IMAGE = (ROWS, COLUMNS)
# name -> run, what it reads, batch, heads, queries and keys
LAID: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...], int, int, tuple[int, int]]] = {
    "cat of chunks": (chunks_in_the_batch, (L,), B, H, (L, L)),
    "cat of splits": (splits_in_the_batch, (L,), B, H, (L, L)),
    "stack of splits, first": (stacked(0), (L,), B, H, (L, L)),
    "stack of splits, second": (stacked(1), (L,), B, H, (L, L)),
    "heads above the batch": (heads_above_the_batch, (L,), B, H, (L, L)),
    "heads first": (heads_first, (L,), B, H, (L, L)),
    "one matrix a head": (one_matrix_a_head, (L,), B, H, (L, L)),
    "class token": (class_token, (L,), B, H, (1, L)),
    "class token without an axis": (class_token_without_an_axis, (L,), B, H, (1, L)),
    "blocks": (in_windows(blocks), IMAGE, B * WINDOWS, H, (9, 9)),
    "grid": (in_windows(grid), IMAGE, B * WINDOWS, H, (9, 9)),
    "swin": (swin, IMAGE, B * WINDOWS, H, (9, 9)),
    "windows before heads": (windows_before_heads, IMAGE, B * WINDOWS, H, (9, 9)),
    "heads before windows": (heads_before_windows, IMAGE, B * WINDOWS, H, (9, 9)),
    "windows in three axes": (windows_in_three_axes, IMAGE, B * WINDOWS, H, (9, 9)),
    "padded windows": (padded_windows, IMAGE, B * WINDOWS, H, (9, 9)),
    "mask units": (mask_units, IMAGE, B * WINDOWS, H, (9, 9)),
    "mask units, fused": (mask_units_fused, IMAGE, B * WINDOWS, H, (9, 9)),
    "rows": (axial(0, 1, 3, 2, 4), IMAGE, B * ROWS, H, (COLUMNS, COLUMNS)),
    "rows, heads first": (axial(0, 3, 1, 2, 4), IMAGE, B * ROWS, H, (COLUMNS, COLUMNS)),
    "columns": (axial(0, 2, 3, 1, 4), IMAGE, B * COLUMNS, H, (ROWS, ROWS)),
    "columns, heads first": (axial(3, 0, 2, 1, 4), IMAGE, B * COLUMNS, H, (ROWS, ROWS)),
    "one head in windows": (one_head_in_windows, IMAGE, B * WINDOWS, 1, (9, 9)),
}


# -- logits written part by part ---------------------------------------------------------------------------------------


def larger(fill: float, first: int = 0) -> Attend:
    """Logits beside columns of a number, which the weights leave again."""

    def attend(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        z = torch.full((B, H, L, L + 2), fill, device=q.device, dtype=q.dtype)
        z[..., first : first + L] = logits(m, q, k)
        return z.softmax(-1)[..., first : first + L] @ v

    return attend


def number_first(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q.new_zeros(B, H, L, L + 1)
    z[..., L:] = -1e9
    z[..., :L] = logits(m, q, k)
    return z.softmax(-1)[..., :L] @ v


def number_last(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q.new_empty(B, H, L, L + 1)
    z[..., :L] = logits(m, q, k)
    z[..., L:] = -1e9
    return z.softmax(-1)[..., :L] @ v


def zero_column(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A key whose logit is 0, with no value."""
    z = q.new_zeros(B, H, L, L + 1)
    z[..., :L] = logits(m, q, k)
    return z.softmax(-1)[..., :L] @ v


def hidden_by_slice(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = logits(m, q, k)
    z[..., -2:] = -1e9
    return z.softmax(-1) @ v


def hidden_by_tensor(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = logits(m, q, k)
    z[:, :, :, 7:] = torch.full((L, 2), -1e9, device=q.device, dtype=q.dtype)
    return z.softmax(-1) @ v


def rows_at_a_time(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q.new_empty(B, H, L, L)
    for rows in (slice(0, 4), slice(4, L)):
        z[:, :, rows] = logits(m, q[:, :, rows], k)
    return z.softmax(-1) @ v


def heads_at_a_time(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q.new_empty(B, H, L, L)
    for head in range(H):
        z[:, head] = logits(m, q[:, head], k[:, head])
    return z.softmax(-1) @ v


def biased_behind_the_class_token(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """MViT v2 (Li et al. 2021, arXiv:2112.01526): relative positions for the patches alone, put back in place."""
    z, n = logits(m, q, k), L - 1
    relative = torch.einsum("bhic,ijc->bhij", q[:, :, 1:], m.table)
    z[:, :, 1:, 1:] = (z[:, :, 1:, 1:].view(B, -1, n, 2, n // 2) + relative.unflatten(-1, (2, -1))).view(B, -1, n, n)
    return z.softmax(-1) @ v


# name -> attend, mask, keys, and whether there is one product, which the logits can be compared with
WRITTEN: dict[str, tuple[Attend, str | None, int, bool]] = {
    "larger": (larger(-math.inf), "padding", L + 2, True),
    "larger, behind": (larger(-1e9, 2), "padding", L + 2, True),
    "number first": (number_first, "padding", L + 1, True),
    "number last": (number_last, "padding", L + 1, True),
    "zero column": (zero_column, None, L, True),
    "hidden by slice": (hidden_by_slice, "padding", L, True),
    "hidden by tensor": (hidden_by_tensor, "padding", L, True),
    "biased in part": (biased_behind_the_class_token, None, L, True),
    "rows at a time": (rows_at_a_time, None, L, False),
    "heads at a time": (heads_at_a_time, None, L, False),
}
