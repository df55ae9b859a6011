"""Attentions of all kinds and the ways to compute each, with the precision of each way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import flex_attention

import sqrtdk
from sqrtdk.compare.inside.program import Formula
from sqrtdk.compare.rounding.precision import Precision

HIDDEN = float("-inf")


@dataclass(frozen=True, eq=False)
class Attended:
    """q, k and v in the dtype of the side, and the formula, whose scale is a number."""

    kind: str
    query: Tensor
    key: Tensor
    value: Tensor
    formula: Formula
    scale: float

    @property
    def grouped(self) -> bool:
        return self.query.shape[1] != self.key.shape[1]

    def wide(self, tensor: Tensor) -> Tensor:
        return tensor.repeat_interleave(self.query.shape[1] // tensor.shape[1], 1)


Way = tuple[str, Callable[[Attended], Tensor], Precision, int]  # and how many of q and k a factor was rounded into


def eager(call: Attended, fold: int = 0, softmax: torch.dtype | None = None, upcast: bool = False) -> Tensor:
    """As models write it: `fold` 1 scales q, 2 both q and k by the root, before the product."""
    f, q, k = call.formula, call.query, call.wide(call.key)
    if upcast:
        q, k = q.float(), k.float()
    if fold == 2:
        q, k = q * call.scale**0.5, k * call.scale**0.5
    z = (q * call.scale) @ k.mT if fold == 1 else q @ k.mT
    if fold == 0:
        z = z * call.scale
    if f.softcap is not None:
        z = (z / f.softcap).tanh() * f.softcap
    if f.bias is not None:
        z = z + f.bias.to(z.dtype)
    if f.visible is not None:
        z = z.masked_fill(~f.visible, f.fill) if not f.fill_added else z + (~f.visible).to(z.dtype) * f.fill
    if f.sinks is not None:
        column = f.sinks.to(z.dtype).view(1, -1, 1, 1).expand(*z.shape[:3], 1)
        weights = torch.cat([z, column], -1).softmax(-1, dtype=softmax)[..., :-1]
    else:
        weights = z.to(softmax or z.dtype).softmax(-1)
    weights = weights.to(call.value.dtype)
    if f.kept is not None:
        weights = weights * f.kept / (1.0 - f.dropout)
    return weights @ call.wide(call.value)


def fused(call: Attended) -> Tensor:
    f, mask = call.formula, call.formula.visible
    if f.bias is not None:
        mask = f.bias.to(call.query.dtype)
        mask = mask if f.visible is None else mask.masked_fill(~f.visible, HIDDEN)
    return functional.scaled_dot_product_attention(
        call.query, call.key, call.value, mask, scale=call.scale, enable_gqa=call.grouped
    )


def composed(call: Attended) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return fused(call)


def flexible(call: Attended) -> Tensor:
    f = call.formula

    def change(score: Tensor, _: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        if f.softcap is not None:
            score = (score / f.softcap).tanh() * f.softcap
        if f.bias is not None:
            score = score + f.bias[head, row, key]
        return score if f.visible is None else torch.where(f.visible[row, key], score, HIDDEN)

    output = flex_attention(
        call.query, call.key, call.value, score_mod=change, scale=call.scale, enable_gqa=call.grouped
    )
    assert isinstance(output, Tensor)
    return output


def compiled(call: Attended) -> Tensor:
    """Our own kernel."""
    f = call.formula
    output = sqrtdk.attention(
        call.query,
        call.key,
        call.value,
        f.visible,
        scale=call.scale,
        enable_gqa=call.grouped,
        softcap=f.softcap,
        bias=f.bias,
        sinks=f.sinks,
        impl="cpu",
    )
    assert isinstance(output, Tensor)
    return output


def ways(call: Attended, kernel: bool) -> Iterator[Way]:
    """All that can compute it. `kernel`: our compiled one is there."""
    f, dtype = call.formula, call.query.dtype
    steps = 2 + 3 * (f.softcap is not None) + (f.bias is not None)
    stored, inside = Precision(dtype, dtype, dtype, steps), Precision(dtype, None, dtype, steps)
    yield "eager", eager, stored, 0
    yield "q scaled", lambda c: eager(c, fold=1), stored, 1
    yield "q and k scaled", lambda c: eager(c, fold=2), stored, 2
    if dtype != torch.float32:
        yield "softmax in float32", lambda c: eager(c, softmax=torch.float32), stored, 0
        yield "logits in float32", lambda c: eager(c, upcast=True), inside, 0
    if f.kept is not None or f.fill_added or (f.visible is not None and f.fill != HIDDEN):
        return
    if f.softcap is None and f.sinks is None:
        yield "sdpa", fused, inside, 0
        yield "sdpa math", composed, inside, 0
    if f.sinks is None:
        yield "flex", flexible, inside, 0
    if kernel:
        yield "compiled", compiled, inside, 0


def draw(dtype: torch.dtype, small: bool) -> Attended:
    """An attention of random size and kind."""

    def pick(*choices: int) -> int:
        return choices[int(torch.randint(len(choices), ()))]

    features, length = (
        pick(8, 16, 32, 64, 80, 128),
        pick(1, 2, 7, 16, 33, 64, 128, 300, *(() if small else (512, 1024, 2048))),
    )
    rows = pick(1, 5, 16, length) if length <= 300 else pick(1, 5, 64)
    heads, kv_heads = ((2, 2), (4, 2), (4, 1), (1, 1))[pick(0, 1, 2, 3)]
    batch = 2 if length < 500 else 1
    q, k, v = (torch.randn(batch, h, n, features) for h, n in ((heads, rows), (kv_heads, length), (kv_heads, length)))
    kind = ("normal", "large", "small", "offset", "peaked", "repeated", "outlier", "aligned", "flat", "raised")[
        pick(*range(10))
    ]
    scale = features**-0.5
    if kind == "large":
        q = q * 8
    elif kind == "small":
        scale, v = 1 / features, v * 0.01
    elif kind == "offset":
        k, v = k + 3 * torch.randn(features), v + 2
    elif kind == "peaked":
        q, k[..., 0], v[..., 0] = q * 3, k[..., 0] * 10, v[..., 0] * 50
    elif kind == "aligned":
        v = k * 2  # values go with their keys
    elif kind == "flat":
        q, v = q * 0.01, v + 1  # weights within a few steps of half precision
    elif kind == "raised":
        q[..., 0], k[..., 0] = 8.0, 50.0 / (8 * scale)  # logits about 50
        v = k * 2
    elif kind == "repeated":
        k, v = k[:, :, torch.arange(length) % 3 % length], v[:, :, torch.arange(length) % 5 % length]
    elif kind == "outlier":
        q[..., :2], k[..., :1], k[..., 1:2] = 8.0, 20.0, -20.0  # two features that nearly cancel
    formula = Formula(scale)
    if pick(0, 1, 1) == 0:
        formula = replace(formula, softcap=float(pick(5, 30, 50)))
    mask = pick(0, 1, 2, 3)
    if mask == 1:
        formula = replace(formula, visible=torch.ones(rows, length).tril(max(0, length - rows)).bool())
    elif mask == 2:
        visible = torch.rand(rows, length) < 0.5
        visible[:, 0] = True
        formula = replace(formula, visible=visible)
    elif mask == 3 and dtype != torch.float16:
        visible = torch.rand(rows, length) < 0.5  # some rows see nothing
        formula = replace(
            formula, visible=visible, fill=float((-1e4, -1e9, -8.0)[pick(0, 1, 2)]), fill_added=pick(0, 1) == 0
        )
    if pick(0, 1, 2, 3) == 0:
        formula = replace(formula, bias=(torch.randn(heads, rows, length) * 2).to(dtype))
    if pick(0, 1, 2, 3, 4) == 0:
        formula = replace(formula, sinks=torch.randn(heads).to(dtype))
    if pick(0, 1, 2, 3, 4, 5) == 0:
        formula = replace(formula, kept=torch.rand(batch, heads, rows, length) < 0.7, dropout=0.3)
    return Attended(kind, q.to(dtype), k.to(dtype), v.to(dtype), formula, scale)
