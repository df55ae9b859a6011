"""Attention computed block by block of keys, the ways people write it; each takes the scale of every block.

q, k and v are (B, H, L, E). `hide` (L, L) is True where a row may not see a key, `padding` (B, 1, 1, L) where the key
is none; either may be None. Ways that take no mask leave both out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 4
Masks = tuple[Tensor | None, Tensor | None]
Way = Callable[[Tensor, Tensor, Tensor, tuple[float, ...], Masks], Tensor]


def blocks(k: Tensor, v: Tensor, scales: tuple[float, ...]) -> list[tuple[int, Tensor, Tensor, float]]:
    """First key, keys, values and scale of every block."""
    parts = zip(k.split(BLOCK, -2), v.split(BLOCK, -2), scales, strict=True)
    return [(place * BLOCK, key, value, scale) for place, (key, value, scale) in enumerate(parts)]


def logits(q: Tensor, key: Tensor, scale: float, masks: Masks, first: int, row: int = 0) -> Tensor:
    """Of one block; without a scale nothing is multiplied."""
    z = q @ key.mT if scale == 1 else q @ key.mT * scale
    hide, padding = masks
    if hide is not None:
        z = z.masked_fill(hide[row : row + q.shape[-2], first : first + key.shape[-2]], -1e30)
    return z if padding is None else z.masked_fill(padding[..., first : first + key.shape[-2]], -1e30)


def running(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """Maximum, sum and output start empty; one division in the end."""
    top = q.new_full((*q.shape[:-1], 1), -math.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for first, key, value, scale in blocks(k, v, scales):
        z = logits(q, key, scale, masks, first)
        new = torch.maximum(top, z.amax(-1, keepdim=True))
        power, keep = torch.exp(z - new), torch.exp(top - new)
        total = total * keep + power.sum(-1, keepdim=True)
        out = out * keep + power @ value
        top = new
    return out / total


def in_place(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """All of it overwritten, the exp too, and the rows' numbers without the axis of the keys."""
    top = q.new_full(q.shape[:-1], -math.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for first, key, value, scale in blocks(k, v, scales):
        z = logits(q, key, scale, masks, first)
        new = torch.maximum(top, torch.max(z, -1)[0])
        keep = (top - new).exp_()
        z.sub_(new[..., None]).exp_()
        total.mul_(keep).add_(z.sum(-1))
        out.mul_(keep.unsqueeze(-1)).add_(z @ value)
        top.copy_(new)
    out /= total[..., None]
    return out


def from_the_first_block(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """The first block sets maximum, sum and output; the last division is a product with the inverse."""
    (first, key, value, scale), *others = blocks(k, v, scales)
    z = logits(q, key, scale, masks, first)
    top = z.max(dim=-1, keepdim=True).values
    power = (z - top).exp()
    total, out = power.sum(dim=-1, keepdim=True), torch.einsum("bhij,bhjd->bhid", power, value)
    for first, key, value, scale in others:
        z = logits(q, key, scale, masks, first)
        new = torch.max(top, z.max(dim=-1, keepdim=True).values)
        keep, power = (top - new).exp(), (z - new).exp()
        total = keep * total + power.sum(dim=-1, keepdim=True)
        out = keep * out + torch.einsum("bhij,bhjd->bhid", power, value)
        top = new
    return out * total.reciprocal()


def by_blocks_of_queries(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """Rows in blocks as well; blocks of keys that all rows would hide are left out."""
    out = []
    for row in range(0, q.shape[-2], BLOCK):
        part = q[..., row : row + BLOCK, :]
        top = part.new_full((*part.shape[:-1], 1), -math.inf)
        total, acc = torch.zeros_like(top), torch.zeros_like(part)
        for first, key, value, scale in blocks(k, v, scales):
            if masks[0] is not None and first > row + BLOCK - 1:
                continue
            z = logits(part, key, scale, masks, first, row)
            new = torch.maximum(top, z.amax(-1, keepdim=True))
            power, keep = torch.exp(z - new), torch.exp(top - new)
            total = total * keep + power.sum(-1, keepdim=True)
            acc, top = acc * keep + power @ value, new
        out.append(acc / total)
    return torch.cat(out, -2)


def divided_at_every_block(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """FlashAttention's first algorithm: keys outside, rows inside, the output divided by the sum so far each time."""
    rows = list(q.split(BLOCK, -2))
    outs = [torch.zeros_like(part) for part in rows]
    totals = [part.new_zeros((*part.shape[:-1], 1)) for part in rows]
    tops = [part.new_full((*part.shape[:-1], 1), -1e30) for part in rows]
    for first, key, value, scale in blocks(k, v, scales):
        for i, part in enumerate(rows):
            z = logits(part, key, scale, masks, first, i * BLOCK)
            top = z.amax(-1, keepdim=True)
            power = torch.exp(z - top)
            total = power.sum(-1, keepdim=True) + 1e-10
            new = torch.maximum(tops[i], top)
            sums = torch.exp(tops[i] - new) * totals[i] + torch.exp(top - new) * total
            before = (totals[i] / sums) * torch.exp(tops[i] - new) * outs[i]
            outs[i] = before + (torch.exp(top - new) / sums) * (power @ value)
            totals[i], tops[i] = sums, new
    return torch.cat(outs, -2)


def in_pieces_of_buffers(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """Output, sums and maxima are pieces of whole tensors, written in place; hidden weights are zeroed once more."""
    out, sums = torch.zeros_like(q), q.new_zeros((*q.shape[:-1], 1))
    tops = q.new_full((*q.shape[:-1], 1), -1e30)
    pieces = (t.split(BLOCK, dim=-2) for t in (q, out, sums, tops))
    for i, (part, acc, total, top) in enumerate(zip(*pieces, strict=True)):
        for first, key, value, scale in blocks(k, v, scales):
            z = logits(part, key, scale, masks, first, i * BLOCK)
            new = torch.maximum(z.amax(dim=-1, keepdims=True), top)
            power = torch.exp(z - new)
            if masks[1] is not None:
                power.masked_fill_(masks[1][..., first : first + BLOCK], 0.0)
            keep = torch.exp(top - new)
            fresh = keep * total + power.sum(dim=-1, keepdims=True).clamp(min=1e-10)
            acc.mul_(keep).add_(torch.einsum("... i j, ... j d -> ... i d", power, value))
            top.copy_(new)
            total.copy_(fresh)
        acc.div_(total)
    return out


def summarised(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """Rabe & Staats: every block gives sum, output and maximum, which are stacked and put together in the end."""
    parts = []
    for first, key, value, scale in blocks(k, v, scales):
        z = logits(q, key, scale, masks, first)
        top = z.amax(dim=-1, keepdim=True).detach()
        power = (z - top).exp()
        parts.append((power.sum(dim=-1), power @ value, top.squeeze(-1)))
    sums, outs, tops = (torch.stack(each) for each in zip(*parts, strict=True))
    keep = torch.exp(tops - tops.amax(0, keepdim=True))
    outs *= keep[..., None]
    sums *= keep
    return outs.sum(0) / (sums.sum(0)[..., None] + 1e-10)


def heads_third(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """The same with (B, L, H, E), stacked last, as written for JAX."""
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    parts = []
    for place, scale in enumerate(scales):
        keys = slice(place * BLOCK, place * BLOCK + BLOCK)
        z = torch.einsum("bqhd,bkhd->bqhk", q * scale, k[:, keys])
        top, _ = z.max(-1, keepdim=True)
        power = torch.exp(z - top)
        parts.append((torch.einsum("bvhf,bqhv->bqhf", v[:, keys], power), power.sum(-1), top.squeeze(-1)))
    outs, sums, tops = (torch.stack(each, -1) for each in zip(*parts, strict=True))
    keep = (tops - tops.amax(-1, keepdim=True)).exp()
    out = (outs * keep.unsqueeze(-2)).sum(-1) / (sums * keep).sum(-1).unsqueeze(-1)
    return out.transpose(1, 2)


def by_logsumexp(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """A running logsumexp divides in the exponent."""
    whole, out = q.new_full((*q.shape[:-1], 1), -1e30), torch.zeros_like(q)
    for first, key, value, scale in blocks(k, v, scales):
        z = logits(q, key, scale, masks, first)
        new = torch.logaddexp(whole, z.logsumexp(-1, keepdim=True))
        out = out * (whole - new).exp() + (z - new).exp() @ value
        whole = new
    return out


def base_two(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """As GPU kernels have it: powers of 2, log2(e) in the scale, and the logarithm of the sum."""
    top = q.new_full((*q.shape[:-1], 1), -1e30)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for first, key, value, scale in blocks(k, v, scales):
        z = logits(q, key, scale * math.log2(math.e), masks, first)
        new = torch.maximum(top, z.amax(-1, keepdim=True))
        power, keep = torch.exp2(z - new), torch.exp2(top - new)
        total, out, top = total * keep + power.sum(-1, keepdim=True), out * keep + power @ value, new
    return out * torch.exp2(top - (top + torch.log2(total)))


def without_a_maximum(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """Sums of plain exps."""
    total, out = 0.0, 0.0
    for first, key, value, scale in blocks(k, v, scales):
        power = logits(q, key, scale, masks, first).exp()
        total, out = total + power.sum(-1, keepdim=True), out + power @ value
    return out / total


def column_of_ones(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """Ones beside the values keep the sum."""
    v = torch.cat([v, torch.ones_like(v[..., :1])], -1)
    top, out = q.new_full((*q.shape[:-1], 1), -1e30), torch.zeros_like(v)
    for first, key, value, scale in blocks(k, v, scales):
        z = logits(q, key, scale, masks, first)
        new = torch.maximum(top, z.amax(-1, keepdim=True))
        out, top = out * (top - new).exp() + (z - new).exp() @ value, new
    return out[..., :-1] / out[..., -1:]


def attended(q: Tensor, key: Tensor, value: Tensor, scale: float, masks: Masks, first: int) -> tuple[Tensor, Tensor]:
    """An attention to one block, with its logsumexp."""
    z = logits(q, key, scale, masks, first)
    return z.softmax(-1) @ value, z.logsumexp(-1, keepdim=True)


def merged(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """A softmax of each block, and the outputs weighed by the logsumexp of each."""
    parts = [attended(q, key, value, scale, masks, first) for first, key, value, scale in blocks(k, v, scales)]
    outs, sums = (torch.stack(each) for each in zip(*parts, strict=True))
    return (outs * (sums - sums.logsumexp(0)).exp()).sum(0)


def by_a_softmax_of_sums(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """The share of every block is a softmax of the logsumexp."""
    parts = [attended(q, key, value, scale, masks, first) for first, key, value, scale in blocks(k, v, scales)]
    outs, sums = (torch.stack(each) for each in zip(*parts, strict=True))
    return (outs * sums.softmax(0)).sum(0)


def by_shares(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """The same written out, block by block."""
    parts = [attended(q, key, value, scale, masks, first) for first, key, value, scale in blocks(k, v, scales)]
    top = torch.stack([lse for _, lse in parts]).amax(0)
    shares = [torch.exp(lse - top) for _, lse in parts]
    return sum(out * share for (out, _), share in zip(parts, shares, strict=True)) / sum(shares)


def ring(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """Ring attention's merge, by a sigmoid of the difference of two logsumexp."""
    out = whole = None
    for first, key, value, scale in blocks(k, v, scales):
        part, lse = attended(q, key, value, scale, masks, first)
        if out is None:
            out, whole = part, lse
            continue
        out = out - torch.sigmoid(lse - whole) * (out - part)
        whole = whole - torch.nn.functional.logsigmoid(whole - lse)
    return out


def flashed(
    q: Tensor, key: Tensor, value: Tensor, scale: float, masks: Masks, first: int, base: float = math.e
) -> tuple[Tensor, Tensor]:
    """The same as flash attention has it: a maximum, a sum, one division; in powers of e or of 2."""
    z = logits(q, key, scale, masks, first) * (1.0 if base == math.e else math.log2(math.e))
    top = z.amax(-1, keepdim=True)
    power = (z - top).exp() if base == math.e else torch.exp2(z - top)
    total = power.sum(-1, keepdim=True)
    lse = top + total.log() if base == math.e else (top + total.log2()) / math.log2(math.e)
    return power @ value / total, lse


def flash_lse(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """Blocks of flash attention, merged by the logsumexp."""
    parts = [flashed(q, key, value, scale, masks, first) for first, key, value, scale in blocks(k, v, scales)]
    out, whole = parts[0]
    for part, lse in parts[1:]:
        both = torch.logaddexp(whole, lse)
        out, whole = out * (whole - both).exp() + part * (lse - both).exp(), both
    return out


def flash_sigmoid(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """The same by a sigmoid of the difference."""
    parts = [flashed(q, key, value, scale, masks, first) for first, key, value, scale in blocks(k, v, scales)]
    out, whole = parts[0]
    for part, lse in parts[1:]:
        out = out - torch.sigmoid(lse - whole) * (out - part)
        whole = whole - torch.nn.functional.logsigmoid(whole - lse)
    return out


def flash_shares(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """The same with a running maximum of the logsumexp, and a division by the sum of both weights."""
    parts = [flashed(q, key, value, scale, masks, first) for first, key, value, scale in blocks(k, v, scales)]
    out, whole = parts[0]
    for part, lse in parts[1:]:
        top = torch.maximum(whole, lse)
        a, b = (whole - top).exp(), (lse - top).exp()
        out, whole = (a * out + b * part) / (a + b), top + (a + b).log()
    return out


def flash_base_two(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """The same in powers of 2, weighed by a softmax of the logsumexp."""
    parts = [flashed(q, key, value, scale, masks, first, 2.0) for first, key, value, scale in blocks(k, v, scales)]
    outs, sums = (torch.stack(each) for each in zip(*parts, strict=True))
    return (outs * sums.softmax(0)).sum(0)


def tiles_of_one_product(q: Tensor, k: Tensor, v: Tensor, scales: tuple[float, ...], masks: Masks) -> Tensor:
    """All products at once, and their softmax tile by tile."""
    whole = q @ k.mT
    top = q.new_full((*q.shape[:-1], 1), -1e30)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for first, _, value, scale in blocks(k, v, scales):
        z = whole[..., first : first + BLOCK] * scale
        for mask in (masks[0], masks[1]):
            z = z if mask is None else z.masked_fill(mask[..., first : first + BLOCK], -1e30)
        new = torch.maximum(top, z.amax(-1, keepdim=True))
        power, keep = torch.exp(z - new), torch.exp(top - new)
        total, out, top = total * keep + power.sum(-1, keepdim=True), out * keep + power @ value, new
    return out / total


@dataclass(frozen=True)
class Written:
    """A way, and what it can do."""

    way: Way
    masks: bool = True


WAYS: dict[str, Written] = {
    way.__name__: Written(way, masks=way is not heads_third)
    for way in (
        running,
        in_place,
        from_the_first_block,
        by_blocks_of_queries,
        divided_at_every_block,
        in_pieces_of_buffers,
        summarised,
        heads_third,
        by_logsumexp,
        base_two,
        without_a_maximum,
        column_of_ones,
        flash_lse,
        flash_sigmoid,
        flash_shares,
        flash_base_two,
        tiles_of_one_product,
        merged,
        by_a_softmax_of_sums,
        by_shares,
        ring,
    )
}
