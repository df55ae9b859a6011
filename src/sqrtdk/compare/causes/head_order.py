"""`head_order`: the rows of a projection are the same, in another order: heads, channels, parts of a fused QKV.

A fused QKV is laid out [q, k, v][head][channel] by some and [head][q, k, v][channel] by others; read in the wrong way
every row is there and in the wrong place. Rows that are not the same are `weights`; heads of k and v that stand in
order and are read by the wrong query heads are `group_order`; channels that are paired otherwise by the rotation, with
rows in place, are `rope_layout`. Rows that are laid out for the other layout of the rotation, with that layout, differ
in nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes._parts import LETTERS, listed, rotation, way, with_way
from sqrtdk.compare.causes._rows import bias_of, flat, layout_order, moved, pool, relabelled
from sqrtdk.compare.program import Affine, Program
from sqrtdk.compare.suspect import Sides, Suspicion

NAME = "head_order"
SHOWN = 8  # heads, or channels, in a text
IN_PLACE = "in order"


def suspect(sides: Sides) -> Iterator[Suspicion]:
    """All parts whose rows moved, at once, as rows may have moved from one part to another."""
    orders = {part: order for part, order in moved(sides).items() if not relabelled(sides, part)}
    if not orders:
        return
    together = sides.self_attention
    words = _words(sides, orders)

    def change(program: Program) -> Program:
        new = program
        for part, order in orders.items():
            own = way(program, part)
            if own.affine is not None:
                new = with_way(new, part, replace(own, affine=_taken(program, part, order, together)))
        return new

    letters = listed([LETTERS[part] for part in orders])
    yield Suspicion(
        NAME, next(iter(orders)), IN_PLACE, words, change, f"has the rows of {letters} in another order: {words}"
    )


def _taken(program: Program, part: str, order: Tensor, together: bool) -> Affine | None:
    """The projection whose rows are those of A's at `order`."""
    own, affines = way(program, part).affine, pool(program, part, together)
    if own is None:
        return None
    rows = torch.cat([flat(x) for x in affines])[order]
    bias = torch.cat([bias_of(x).flatten() for x in affines])[order].view(own.weight.shape[:2])
    features = torch.cat([x.features.flatten() for x in affines])[order].view_as(own.features)
    there = any(x.bias is not None for x in affines)
    return replace(own, weight=rows.view_as(own.weight), bias=bias if there else None, features=features)


def _words(sides: Sides, orders: dict[str, Tensor]) -> str:
    """What happened to the first part that moved."""
    part, order = next(iter(orders.items()))
    own, affines = way(sides.a, part).affine, pool(sides.a, part, sides.self_attention)
    if own is None:
        return "other rows"
    heads, channels = own.weight.shape[:2]
    first = sum(len(flat(x)) for x in affines[: next(i for i, x in enumerate(affines) if x is own)])
    local = (order - first).view(heads, channels)
    if bool((local < 0).any()) or bool((local >= heads * channels).any()):
        # rows of [q, k, v][head], read one head after the other
        strides = torch.arange(heads)[:, None] * channels * len(affines) + torch.arange(channels)
        layouts = ("[head][q, k, v]", "[q, k, v][head]")
        by_head = bool((order.view(heads, channels).cpu() == strides).all())
        read, written = layouts if by_head else layouts[::-1]
        return f"rows of q, k and v mixed, as where a fused projection is read {read} instead of {written}"
    head, channel = local // channels, local % channels
    in_order = torch.arange(channels)
    if bool((head == head[:, :1]).all()):
        if bool((channel == in_order).all()):
            return f"heads {_list(head[:, 0])}"
        turned = rotation(way(sides.a, part))
        if turned is not None and bool((channel == layout_order(in_order, turned)).all()):
            return "channels of each head in the order of the other rotary layout"
        if bool((channel == channel[:1]).all()):
            return f"channels {_list(channel[0])} of each head"
    if bool((local.flatten() == torch.arange(heads * channels).view(channels, heads).T.flatten()).all()):
        return "[channel][head] instead of [head][channel]"
    return "rows of different heads mixed"


def _list(numbers: Tensor) -> str:
    shown = " ".join(str(number) for number in numbers[:SHOWN].tolist())
    return shown if len(numbers) <= SHOWN else f"{shown} ..."
