"""Attention whose heads lie in the batch, beside windows or grids, or come from pieces: one function a layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sqrtdk
from sqrtdk.tracing import Trace
from tests.attentions.heads import ROOT, B, D, E, H, L

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


def features_first(m: Any, x: Tensor) -> Tensor:
    """torch.einsum puts the weight first, W x, with its features first; so does jnp.einsum."""

    def project(layer: nn.Linear) -> Tensor:
        return torch.einsum("bld,dhe->hebl", x, layer.weight.view(H, E, D).permute(2, 0, 1))

    q, k, v = (project(layer).permute(2, 0, 3, 1) for layer in (m.q, m.k, m.v))
    return attention(m, q, k, v).transpose(1, 2).flatten(2)


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
    "features first": (features_first, (L,), B, H, (L, L)),
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


def traced(name: str, device: str = "cpu") -> Trace:
    """A run of a layout in float64."""
    run, read_by, *_ = LAID[name]
    torch.manual_seed(0)
    model = Laid(run).double().to(device)
    with torch.no_grad(), sqrtdk.trace(model) as trace:
        model(torch.randn(B, *read_by, D, dtype=torch.float64, device=device))
    return trace
