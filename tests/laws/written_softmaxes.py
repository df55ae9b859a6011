"""Attentions whose softmax is written by hand, in the ways that people write it: `FORMS[name].attend(cut, q, k, v)`.

`cut` is applied to one tensor: the identity leaves the backward pass right, and `Tensor.detach` makes it wrong. The
forward pass is the same. q, k and v are (B, H, L, E).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

Cut = Callable[[Tensor], Tensor]
SCALE = 0.25
BLOCK = 16


@dataclass(frozen=True)
class Form:
    """A way to write it, and what the law says of the wrong one: "code: operands"."""

    attend: Callable[[Cut, Tensor, Tensor, Tensor], Tensor]
    says: tuple[str, ...]


def logits(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT * SCALE


def powers(z: Tensor) -> Tensor:
    """exp(z - max), where the maximum is a constant: its gradient is zero in a softmax."""
    return torch.exp(z - z.amax(-1, keepdim=True).detach())


def total(e: Tensor) -> Tensor:
    return e.sum(-1, keepdim=True)


def _maximum_with_a_gradient(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = logits(q, k)
    e = torch.exp(z - z.amax(-1, keepdim=True))
    return (e @ v) / total(cut(e))


def _logsumexp(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = logits(q, k)
    return torch.exp(z - cut(z.logsumexp(-1, keepdim=True))) @ v


def _stable_powers(q: Tensor, k: Tensor) -> Tensor:
    z = logits(q, k)
    return torch.exp(z - z.logsumexp(-1, keepdim=True).detach())


def _divided_in_place(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = powers(logits(q, k))
    out = e @ v
    out.div_(cut(total(e)))
    return out


def _column_of_ones(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out = powers(logits(q, k)) @ torch.cat([v, torch.ones_like(v[..., :1])], -1)
    return out[..., :-1] / cut(out[..., -1:])


def _masked_later(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    e = powers(logits(q, k)) * torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return (e @ v) / cut(total(e))


def _by_two(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = logits(q, k) * 1.4426950408889634
    e = torch.exp2(z - z.amax(-1, keepdim=True).detach())
    return (e @ v) / cut(total(e))


def _renormalised(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    p = logits(q, k).softmax(-1)
    return cut(p / total(p)) @ v


def _difference(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    (q1, q2), (k1, k2) = q.chunk(2, -1), k.chunk(2, -1)
    return logits(q1, k1).softmax(-1) @ v - 0.4 * (cut(logits(q2, k2).softmax(-1)) @ v)


def _einsum(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = torch.einsum("bhld,bhsd->bhls", q, cut(k)) * SCALE
    return torch.einsum("bhls,bhsd->bhld", z.softmax(-1), v)


def _heads_third(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    z = torch.einsum("blhd,bshd->bhls", q, k) * SCALE
    return torch.einsum("bhls,bshd->blhd", z.softmax(-1), cut(v)).transpose(1, 2)


def _bmm(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q1, k1, v1 = (x.flatten(0, 1) for x in (q, k, v))
    return torch.bmm(torch.bmm(cut(q1), k1.mT).mul(SCALE).softmax(-1), v1).view(q.shape)


def _baddbmm(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q1, k1, v1 = (x.flatten(0, 1) for x in (q, k, v))
    z = torch.baddbmm(torch.zeros(1, 1, 1, dtype=q.dtype), q1, cut(k1).mT, alpha=SCALE, beta=0)
    return torch.bmm(z.softmax(-1), v1).view(q.shape)


def _rows_in_blocks(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = enumerate(q.split(BLOCK, 2))
    return torch.cat([logits(part, cut(k) if number == 1 else k).softmax(-1) @ v for number, part in parts], 2)


def _keys_in_blocks(cut: Cut, q: Tensor, k: Tensor, v: Tensor, *, constant: bool) -> Tensor:
    top = q.new_full((*q.shape[:-1], 1), -1e30)
    sums, out = torch.zeros_like(top), torch.zeros_like(q)
    for key, value in zip(k.split(BLOCK, 2), v.split(BLOCK, 2), strict=True):
        z = logits(q, key)
        largest = z.amax(-1, keepdim=True)
        new = torch.maximum(top, largest.detach() if constant else largest)
        e, by = torch.exp(z - new), torch.exp(top - new)
        sums, out, top = sums * by + total(e), out * by + e @ value, new
    return out / cut(sums)


def _rows_and_keys_in_blocks(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    parts = [_keys_in_blocks(cut, part, k, v, constant=True) for part in q.split(BLOCK, 2)]
    return torch.cat(parts, 2)


def _heads_in_a_loop(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.stack([logits(q[:, h], cut(k[:, h])).softmax(-1) @ v[:, h] for h in range(q.shape[1])], 1)


def _logits_in_place(cut: Cut, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    z = cut(q) @ k.mT
    z *= SCALE
    z.masked_fill_(torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1), float("-inf"))
    return z.softmax(-1) @ v


FORMS: dict[str, Form] = {
    "softmax": Form(lambda cut, q, k, v: cut(logits(q, k).softmax(-1)) @ v, ("weights_detached: q, k",)),
    "exp of log_softmax": Form(
        lambda cut, q, k, v: cut(logits(q, k).log_softmax(-1)).exp() @ v, ("weights_detached: q, k",)
    ),
    "divided before the product": Form(
        lambda cut, q, k, v: ((e := powers(logits(q, k))) / cut(total(e))) @ v, ("no_delta: q, k",)
    ),
    "divided after the product": Form(
        lambda cut, q, k, v: ((e := powers(logits(q, k))) @ v) / cut(total(e)), ("no_delta: q, k",)
    ),
    "times the inverse of the sum": Form(
        lambda cut, q, k, v: ((e := powers(logits(q, k))) @ v) * cut(total(e)).reciprocal(), ("no_delta: q, k",)
    ),
    "sum with an epsilon": Form(
        lambda cut, q, k, v: ((e := powers(logits(q, k))) @ v) / (cut(total(e)) + 1e-6), ("no_delta: q, k",)
    ),
    "without a maximum": Form(
        lambda cut, q, k, v: ((e := logits(q, k).exp()) @ v) / cut(total(e)), ("no_delta: q, k",)
    ),
    "a maximum with a gradient": Form(_maximum_with_a_gradient, ("unknown: q", "unknown: k")),
    "powers in the numerator": Form(
        lambda cut, q, k, v: (cut(e := powers(logits(q, k))) @ v) / total(e), ("denominator_alone: q, k",)
    ),
    "divided in place": Form(_divided_in_place, ("no_delta: q, k",)),
    "logsumexp": Form(_logsumexp, ("no_delta: q, k",)),
    "a constant logsumexp, divided after": Form(
        lambda cut, q, k, v: ((e := _stable_powers(q, k)) @ v) / cut(total(e)), ("no_delta: q, k",)
    ),
    "a constant logsumexp, divided before": Form(
        lambda cut, q, k, v: ((e := _stable_powers(q, k)) / cut(total(e))) @ v, ("no_delta: q, k",)
    ),
    "a constant logsumexp, k": Form(
        lambda cut, q, k, v: ((e := _stable_powers(q, cut(k))) @ v) / total(e), ("none: k",)
    ),
    "a column of ones": Form(_column_of_ones, ("no_delta: q, k",)),
    "masked after exp": Form(_masked_later, ("no_delta: q, k",)),
    "powers of two": Form(_by_two, ("no_delta: q, k",)),
    "renormalised before": Form(_renormalised, ("weights_detached: q, k",)),
    "renormalised after": Form(
        lambda cut, q, k, v: ((p := logits(q, k).softmax(-1)) @ cut(v)) / total(p), ("none: v",)
    ),
    "float32 inside": Form(lambda cut, q, k, v: logits(q, cut(k)).float().softmax(-1).to(q.dtype) @ v, ("none: k",)),
    "all in float32": Form(
        lambda cut, q, k, v: (logits(cut(q).float(), k.float()).softmax(-1) @ v.float()).to(q.dtype), ("none: q",)
    ),
    "an output that is gated": Form(
        lambda cut, q, k, v: (cut(logits(q, k).softmax(-1)) @ v) * torch.sigmoid(q), ("weights_detached: q, k",)
    ),
    "an output that is dropped": Form(
        lambda cut, q, k, v: functional.dropout(logits(q, k).softmax(-1) @ cut(v), 0.3), ("none: v",)
    ),
    "weights that are dropped": Form(
        lambda cut, q, k, v: functional.dropout(logits(q, cut(k)).softmax(-1), 0.3) @ v, ("none: k",)
    ),
    "two softmaxes subtracted": Form(_difference, ("weights_detached: q, k",)),
    "einsum": Form(_einsum, ("none: k",)),
    "einsum with heads third": Form(_heads_third, ("none: v",)),
    "bmm": Form(_bmm, ("none: q",)),
    "baddbmm": Form(_baddbmm, ("none: k",)),
    "logits in place": Form(_logits_in_place, ("none: q",)),
    "rows in blocks": Form(_rows_in_blocks, ("none: k",)),
    "keys in blocks": Form(
        lambda cut, q, k, v: _keys_in_blocks(cut, q, k, v, constant=False), ("unknown: q", "unknown: k")
    ),
    "keys in blocks, constant maxima": Form(
        lambda cut, q, k, v: _keys_in_blocks(cut, q, k, v, constant=True), ("no_delta: q, k",)
    ),
    "rows and keys in blocks": Form(_rows_and_keys_in_blocks, ("no_delta: q, k",)),
    "heads in a loop": Form(_heads_in_a_loop, ("none: k",)),
}
