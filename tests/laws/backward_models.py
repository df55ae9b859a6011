"""Attentions whose forward pass is right and whose backward pass is right or broken in one way: `model(name, broken)`.

Each fault is one that a kernel's author makes. The forward passes of both twins are equal up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 50


@dataclass(frozen=True)
class Size:
    """Heads, heads of k and v, width of a head, tokens, and whether the attention is causal."""

    heads: int = 4
    key_heads: int = 2
    width: int = 16
    length: int = 24
    causal: bool = True
    dtype: torch.dtype = torch.float32

    @property
    def scale(self) -> float:
        return self.width**-0.5


SIZES = {
    "small": Size(),
    "groups of three": Size(heads=6, key_heads=2, width=8, length=37),
    "not causal": Size(heads=4, key_heads=1, width=32, length=70, causal=False),
    "bfloat16": Size(heads=2, key_heads=1, width=24, length=21, dtype=torch.bfloat16),
}


@dataclass(frozen=True)
class Formula:
    """The formula of a kernel, and the fault of its backward pass."""

    size: Size
    fault: str = ""
    cap: float = 0.0
    window: int = 0
    lse: bool = False
    padding: int = 0

    def visible(self, rows: int) -> Tensor:
        """(L, S), True where a key is seen."""
        distance = torch.arange(rows)[:, None] - torch.arange(rows)
        seen = distance >= 0 if self.size.causal or self.window else torch.ones(rows, rows, dtype=torch.bool)
        seen = seen & (distance < self.window) if self.window else seen
        return seen & (torch.arange(rows) < rows - self.padding)

    def weights(
        self, q: Tensor, k: Tensor, sinks: Tensor | None, *, masked: bool = True, window: bool = True
    ) -> Tensor:
        """Return the weights of the keys, (B, Hq, L, S)."""
        z = q @ k.mT * self.size.scale
        if self.cap:
            z = self.cap * torch.tanh(z / self.cap)
        if masked:
            formula = self if window else replace(self, window=10**9)
            z = z.masked_fill(~formula.visible(z.shape[-1]), -math.inf)
        if sinks is not None:
            return torch.cat((z, sinks.view(1, -1, 1, 1).expand(*z.shape[:3], 1)), -1).softmax(-1)[..., :-1]
        return z.softmax(-1)


class Kernel(torch.autograd.Function):
    """Forward as written; backward as a kernel's author writes it, with the fault of the formula."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, formula: Formula) -> Any:
        group = q.shape[1] // k.shape[1]
        p = formula.weights(q, k.repeat_interleave(group, 1), sinks)
        ctx.formula, ctx.group = formula, group
        ctx.save_for_backward(q, k, v, sinks)
        out = p @ v.repeat_interleave(group, 1)
        if not formula.lse:
            return out
        z = q @ k.repeat_interleave(group, 1).mT * formula.size.scale
        return out, z.masked_fill(~formula.visible(z.shape[-1]), -math.inf).logsumexp(-1)

    @staticmethod
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor | None = None) -> Any:
        q, k, v, sinks = ctx.saved_tensors
        formula, group, fault = ctx.formula, ctx.group, ctx.formula.fault
        scale, cap = formula.size.scale, formula.cap
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if fault == "strided":  # reads the memory of dO in order, whatever its strides
            d_out = torch.as_strided(d_out, d_out.shape, torch.empty(d_out.shape).stride())
        if fault == "recomputed":
            p = formula.weights(q.half(), k.half(), sinks).to(q.dtype)
        else:
            formula = replace(formula, padding=0) if fault == "padding" else formula
            p = formula.weights(q, k, sinks, masked=fault != "mask", window=fault != "window")
        dv, dp, out = p.mT @ d_out, d_out @ v.mT, p @ v
        out = out.bfloat16().to(out.dtype) if fault == "rounded_delta" else out
        delta = (d_out * out).sum(-1, keepdim=True)
        dz = p * (dp - {"no_delta": 0, "delta_unsummed": p * dp}.get(fault, delta))
        if d_lse is not None and fault != "lse":
            dz = dz + p * d_lse[..., None]
        d_sinks = None
        if sinks is not None:
            d_sinks = -((1 - p.sum(-1)) * delta[..., 0]).sum((0, 2))
            d_sinks = torch.zeros_like(sinks) if fault == "sinks" else d_sinks
        if cap and fault != "softcap":
            dz = dz * (1 - torch.tanh(q @ k.mT * scale / cap) ** 2)
        if fault == "last_rows":
            dz = torch.cat((dz[:, :, :-5], torch.zeros_like(dz[:, :, -5:])), 2)
        dq, dk = dz @ k * scale, dz.mT @ q * (1.0 if fault == "scale_dk" else scale)
        if fault == "one_head":
            dq = torch.cat((dq[:, :1], dq[:, 1:2] * 2, dq[:, 2:]), 1)

        def grouped(x: Tensor) -> Tensor:
            x = x.unflatten(1, (-1, group))
            return x[:, :, 0] if fault == "group" else x.mean(2) if fault == "group_mean" else x.sum(2)

        dq, dk = (-dq, dk) if fault == "sign" else (dq, dk)
        dk, dv = (grouped(x) for x in ((dv, dk) if fault == "swapped" else (dk, dv)))
        return dq, dk, dv, d_sinks, None


class DropKernel(torch.autograd.Function):
    """Dropout on the weights, whose mask a broken backward pass draws again, or forgets."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, formula: Formula, rate: float) -> Tensor:
        p = formula.weights(q, k, None)
        keep = (torch.rand_like(p, dtype=torch.float32) >= rate).to(p.dtype) / (1 - rate)
        ctx.save_for_backward(q, k, v, keep)
        ctx.formula, ctx.rate = formula, rate
        return (p * keep) @ v

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> Any:
        q, k, v, keep = ctx.saved_tensors
        if ctx.formula.fault == "dropout":
            keep = (torch.rand_like(keep, dtype=torch.float32) >= ctx.rate).to(keep.dtype) / (1 - ctx.rate)
        if ctx.formula.fault == "no_dropout":
            keep = torch.ones_like(keep)
        p, scale = ctx.formula.weights(q, k, None), ctx.formula.size.scale
        dp = (d_out @ v.mT) * keep
        dz = p * (dp - (p * dp).sum(-1, keepdim=True))
        return dz @ k * scale, dz.mT @ q * scale, (p * keep).mT @ d_out, None, None


class Attention(nn.Module):
    """One attention of a kind of `FAULTS`, right or broken."""

    def __init__(self, name: str, broken: bool, size: Size) -> None:
        super().__init__()
        fault = FAULTS[name]
        self.name, self.broken = name, broken
        self.formula = Formula(size, name if broken else "", **fault.options)
        self.key_heads = size.key_heads if fault.groups else size.heads
        self.sinks = nn.Parameter(torch.randn(size.heads)) if name == "sinks" else None
        if name == "temperature":
            self.tau = nn.Parameter(torch.tensor(1.3))
        if name == "bias":
            self.bias = nn.Parameter(torch.randn(size.heads, size.length, size.length) * 0.3)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        own = FAULTS[self.name].own
        if own is not None:
            return own(self, q, k, v)
        if self.name in ("dropout", "no_dropout"):
            return (
                DropKernel.apply(q, k, v, self.formula, 0.2) if self.training else self.formula.weights(q, k, None) @ v
            )
        result = Kernel.apply(q, k, v, self.sinks, self.formula)
        if not self.formula.lse:
            return result
        return result[0] * torch.sigmoid(result[1]).to(result[0].dtype)[..., None]


def _detached_k(self: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return self.formula.weights(q, k.detach() if self.broken else k, None) @ v


def _detached_weights(self: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = self.formula.weights(q, k, None)
    return (p.detach() if self.broken else p) @ v


def _temperature(self: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return self.formula.weights(q * (self.tau.detach() if self.broken else self.tau), k, None) @ v


def _bias(self: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = q @ k.mT * self.formula.size.scale + (self.bias.data if self.broken else self.bias)
    return z.masked_fill(~self.formula.visible(z.shape[-1]), -math.inf).softmax(-1) @ v


def _overwritten(self: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = self.formula.weights(q, k, None)
    out = p @ v
    if self.broken:
        p.data.mul_(1.5)  # reuses the buffer behind autograd's back
    return out


@dataclass(frozen=True)
class Fault:
    """A kind of attention: the code of the broken twin's finding, and its operands.

    `groups` says that k and v have fewer heads than q; `own` is the forward of a kind that is no kernel.
    """

    code: str
    operands: str
    options: dict[str, Any]
    groups: bool = False
    own: Callable[[Attention, Tensor, Tensor, Tensor], Tensor] | None = None


FAULTS: dict[str, Fault] = {
    "scale_dk": Fault("scale_missing", "k", {}, True),
    "dropout": Fault("dropout_drawn", "q, k, v", {}),
    "sinks": Fault("none", "the sinks", {}),
    "softcap": Fault("flat_softcap", "q, k", {"cap": 1.0}, True),
    "lse": Fault("no_lse", "q, k", {"lse": True}, True),
    "group": Fault("group", "k, v", {}, True),
    "window": Fault("no_window", "q, k, v", {"window": 6}),
    "recomputed": Fault("rounded_softmax", "q, k, v", {}),
    "rounded_delta": Fault("rounded_output", "q, k", {}, True),
    "detached_k": Fault("none", "k", {}, own=_detached_k),
    "detached_weights": Fault("weights_detached", "q, k", {}, own=_detached_weights),
    "temperature": Fault("none", "attn.tau", {}, own=_temperature),
    "bias": Fault("none", "the bias", {}, own=_bias),
    "overwritten": Fault("overwritten", "q, k, v", {}, own=_overwritten),
    # beyond the reports
    "no_dropout": Fault("no_dropout", "q, k, v", {}),
    "no_delta": Fault("no_delta", "q, k", {}, True),
    "delta_unsummed": Fault("delta_unsummed", "q, k", {}, True),
    "group_mean": Fault("mean", "k, v", {}, True),
    "padding": Fault("no_padding", "q, k, v", {"padding": 5}, True),
    "mask": Fault("no_mask", "q, k, v", {"padding": 5}),
    "last_rows": Fault("no_rows", "q, k", {}),
    "one_head": Fault("factor", "q", {}),
    "sign": Fault("sign", "q", {}, True),
    "swapped": Fault("swapped", "k, v", {}),
    "strided": Fault("strided", "q, k, v", {}, True),
}


class Model(nn.Module):
    """Token embeddings, one attention, and a head."""

    def __init__(self, name: str, broken: bool, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attn = Attention(name, broken, size)
        width = size.heads * size.width
        self.embed = nn.Embedding(VOCABULARY, width)
        self.q = nn.Linear(width, width)
        self.k, self.v = (nn.Linear(width, self.attn.key_heads * size.width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)
        self.width = size.width

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)
        q, k, v = (part(x).unflatten(-1, (-1, self.width)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.head(self.attn(q, k, v).transpose(1, 2).flatten(2))


def model(name: str, broken: bool, size: str = "small") -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the model in train mode, and its inputs."""
    of = SIZES[size]
    ids = torch.randint(1, VOCABULARY, (2, of.length), generator=torch.Generator().manual_seed(1))
    return Model(name, broken, of).to(of.dtype).train(), {"input_ids": ids}


class One(nn.Module):
    """Projections around an attention of the module itself, (B, H, L, E) -> (B, H, L, E)."""

    def __init__(self, attend: Callable[..., Tensor], key_heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.attend = attend
        self.q, self.out = nn.Linear(64, 64), nn.Linear(64, 64)
        self.k, self.v = (nn.Linear(64, key_heads * 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, 16)).transpose(1, 2) for part in (self.q, self.k, self.v))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))


def features(length: int = 40) -> dict[str, Tensor]:
    return {"x": torch.randn(2, length, 64, generator=torch.Generator().manual_seed(0))}
