"""Attention as people write it: what a style is, the module that runs it, and its dense float64 oracle.

A `Style` says how the attention is written (`attend`) and, apart from that, what it means: scale, rotation and norm
(`turn`), softcap, bias, visible keys. `dense` turns the meaning into logits without running the style, and a test
compares the two, so that what a trace is held against is proven and not copied from the trace.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

B, L, DIM, H, E = 2, 7, 24, 4, 16  # batch, length, model width, heads, head width: no two alike
ROOT = E**-0.5  # 0.25
PLAIN = "softmax(0.25 * q.k)"

CAUSAL = torch.ones(L, L, dtype=torch.bool).tril()
WINDOW = CAUSAL & ~torch.ones(L, L, dtype=torch.bool).tril(-3)
PADDING = torch.arange(L).expand(B, 1, 1, L) < torch.tensor([L, L - 2]).view(B, 1, 1, 1)
SPOTS = torch.rand(L, L, generator=torch.Generator().manual_seed(1)).gt(0.4) | torch.eye(L, dtype=torch.bool)


@dataclass(frozen=True)
class Style:
    """How an attention is written, and what it means."""

    attend: Callable[[Any, Tensor, Tensor, Tensor], Tensor]  # (model, q, k, v), each (B, H, L, E) -> (B, H, L, Ev)
    formula: str = PLAIN
    scale: float | Callable[[Any], Tensor] = ROOT  # one number, or one a head from the module
    kind: str = "eager"
    turn: Callable[[Any, Tensor], Tensor] = lambda model, x: x  # what norm and rotation do to q and k
    norm: str | None = None
    rope: bool = False
    cap: float | None = None
    bias: str | None = None
    addend: Callable[[Any], Tensor] | None = None  # values of the bias, (1 or H, L, S)
    content: Callable[[Any, Tensor, Tensor], Tensor] | None = None  # further content terms, already scaled
    score: str = "dot"
    terms: int = 1
    mask: str | None = None
    form: str | None = None
    visible: Tensor | None = None
    scaled_mask: float | None = None
    sinks: Callable[[Any], Tensor] | None = None  # logit of the sink, one a head
    mixing: Callable[[Any, Tensor], Tensor] | None = None  # weights after the softmax -> weights that meet the values
    setup: Callable[[Any], None] = lambda model: None
    project: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    dense_project: Callable[[Any, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    first_row: int = 0  # queries before it are left out: they came with an earlier call
    kv_heads: int = H
    value_dim: int = E
    dropout: float = 0.0
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    dtype: torch.dtype = torch.float32


class Attention(nn.Module):
    """One attention in a style, with projections in front."""

    def __init__(self, style: Style) -> None:
        super().__init__()
        self.style, self.num_heads = style, H
        if style.project is None:
            self.q = nn.Linear(DIM, H * E)
            self.k = nn.Linear(DIM, style.kv_heads * E)
            self.v = nn.Linear(DIM, style.kv_heads * style.value_dim)
        style.setup(self)

    def forward(self, x: Tensor) -> Tensor:
        """(B, L, DIM) to (B, L, H * Ev)."""
        if self.style.project is None:
            q, k, v = heads(self.q(x), E), heads(self.k(x), E), heads(self.v(x), self.style.value_dim)
        else:
            q, k, v = self.style.project(self, x)
        return self.style.attend(self, q, k, v).transpose(1, 2).flatten(2)


@dataclass
class Expected:
    """What a record must say about one attention."""

    site: str
    style: Style
    logits: Tensor  # float64 (B, H, L, S), -inf where hidden
    heads: int = H
    kv_heads: int = H
    head_dim: int = E
    scale: Tensor = field(
        default_factory=lambda: torch.tensor([ROOT], dtype=torch.float64)
    )  # one number, or one a head
    numeric: bool = True  # the logits can be regressed on the projections
    rows: Tensor | None = None  # (B, L), False for rows of padding that were never computed


@dataclass
class Case:
    """A model, its inputs, and what a trace of it must say."""

    model: nn.Module
    inputs: tuple[Any, ...]
    expected: list[Expected]
    kwargs: dict[str, Any] = field(default_factory=dict)
    context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext
    output: Tensor | None = None  # float64, where the oracle knows it
    dtype: torch.dtype = torch.float32

    def run(self) -> Any:
        """One forward pass."""
        with self.context():
            return self.model(*self.inputs, **self.kwargs)


def case(style: Style) -> Case:
    """A style as a model with inputs and oracle."""
    torch.manual_seed(0)
    model = Attention(style).to(style.dtype)
    x = torch.randn(B, L, DIM).to(style.dtype)
    logits, output = dense(model, x)
    scale = style.scale(model).detach().double().flatten() if callable(style.scale) else torch.tensor([style.scale])
    dtype = torch.bfloat16 if style.context is autocast else style.dtype
    return Case(
        model,
        (x,),
        [Expected("", style, logits, kv_heads=style.kv_heads, scale=scale.double())],
        context=style.context,
        output=None if style.dropout else output,
        dtype=dtype,
    )


def dense(model: Attention, x: Tensor) -> tuple[Tensor, Tensor]:
    """Logits (B, H, L, S) and output (B, L, H * Ev) of a style, in float64 from its meaning."""
    style = model.style
    with torch.no_grad(), doubled(model):
        x = x.double()
        if style.dense_project is not None:
            q, k, v = style.dense_project(model, x)
        else:
            q, k, v = (heads(part(x), n) for part, n in ((model.q, E), (model.k, E), (model.v, style.value_dim)))
        q, k = style.turn(model, q)[:, :, style.first_row :], style.turn(model, k)
        k, v = (t.repeat_interleave(H // t.shape[1], 1) for t in (k, v))
        scale = style.scale(model).double().reshape(-1, 1, 1) if callable(style.scale) else style.scale
        logits = q @ k.mT * scale
        if style.content is not None:
            logits = logits + style.content(model, q, k)
        if style.cap is not None:
            logits = style.cap * torch.tanh(logits / style.cap)
        if style.addend is not None:
            logits = logits + style.addend(model).double()
        if style.visible is not None:
            logits = logits.masked_fill(~style.visible, -math.inf)
        whole = logits
        if style.sinks is not None:
            sink = style.sinks(model).double().view(1, -1, 1, 1).expand(B, H, logits.shape[2], 1)
            whole = torch.cat([logits, sink], -1)
        weights = whole.softmax(-1)[..., : logits.shape[-1]]
        if style.mixing is not None:
            weights = style.mixing(model, weights)
        return logits, (weights @ v).transpose(1, 2).flatten(2)


@contextlib.contextmanager
def doubled(model: nn.Module) -> Iterator[None]:
    """The module in float64 for a while; its own tensors come back untouched."""
    kept = [(t, t.data) for t in (*model.parameters(), *model.buffers())]
    try:
        for tensor, data in kept:
            if data.is_floating_point():
                tensor.data = data.double()
        yield
    finally:
        for tensor, data in kept:
            tensor.data = data


def autocast() -> contextlib.AbstractContextManager[Any]:
    """Mixed precision, as in training."""
    return torch.autocast("cpu", torch.bfloat16)


def heads(x: Tensor, width: int) -> Tensor:
    """(B, L, H * E) to (B, H, L, E)."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def tolerance(dtype: torch.dtype) -> float:
    """Relative error of a short chain of operations: some hundred roundings."""
    return 256 * torch.finfo(dtype).eps if dtype != torch.bfloat16 else 4 * torch.finfo(dtype).eps


def scale_tolerance(dtype: torch.dtype) -> float:
    """Allowed relative error of a scale that was read."""
    return 1e-2 if dtype in (torch.bfloat16, torch.float16) else 1e-4


def rotary(width: int, amplitude: float = 1.0) -> tuple[Tensor, Tensor]:
    """Cosines and sines, (L, width / 2), in float64."""
    angle = torch.arange(L)[:, None].double() * 100.0 ** (-torch.arange(0, width, 2).double() / width)
    return amplitude * angle.cos(), amplitude * angle.sin()


def turned(x: Tensor, *, interleaved: bool = False, width: int = E, amplitude: float = 1.0) -> Tensor:
    """The rotation by its definition: each pair of channels as a point in the plane."""
    part, rest = x[..., :width], x[..., width:]
    cos, sin = rotary(width, amplitude)
    a, b = (part[..., 0::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    a, b = a * cos - b * sin, a * sin + b * cos
    both = torch.stack([a, b], -1).flatten(-2) if interleaved else torch.cat([a, b], -1)
    return torch.cat([both, rest], -1)
