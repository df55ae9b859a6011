"""Differences of the projections of q, k and v: permuted rows, other weights, another bias, heads read by others.

Two rows are equal if one is the other rounded, such as a bfloat16 weight and its float32 original. Rows that moved are
found by a sketch of each row (a few products with random vectors) and then compared in full. Some codes lay out a fused
QKV as [q, k, v][head][channel], others as [head][q, k, v][channel]. Read in the wrong layout, every row exists but in
the wrong place. Rows permuted for the other rotary layout, together with that layout, are no difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sqrtdk.compare.inside.compute import MOST_STORED
from sqrtdk.compare.inside.program import QK, QKV, Affine, Program, RoundingStep, VectorPath, layout_order
from sqrtdk.compare.inside.suspect import (
    NO_VALUE,
    QKV_LETTERS,
    BothParts,
    Edit,
    PartDifference,
    ProgramChange,
    Sides,
    change_path,
    path_of,
    rotation_of,
    with_path,
)
from sqrtdk.compare.numbers import four_digits, range_text, same, unequal_texts
from sqrtdk.compare.rounding.precision import rounded_to, rounding_unit, same_rows
from sqrtdk.messages import Message, joined

SKETCH_PRODUCTS = 8  # products for each row
ROWS_AT_ONCE = 2**10  # rows for which distances are computed at once
SKETCH_TOLERANCE = 0.05  # relative: sketches of the same rows have equal sums up to rounding
MOST_NUMBERS_LISTED = 8  # heads or channels listed in a text
ROUNDED = "causes.weights.rounded", "causes.weights.not_rounded"  # by B, by A
SOME, OTHER = "causes.projection_bias.some", "causes.projection_bias.another"


# -- rows --------------------------------------------------------------------------------------------------------------


def _flat(affine: Affine) -> Tensor:
    """Return the rows, (H * E, D)."""
    return affine.weight.flatten(0, 1).double()


def _bias(affine: Affine) -> Tensor:
    """Return the bias, (H, E), 0 without one."""
    return torch.zeros(affine.weight.shape[:2], dtype=torch.float64) if affine.bias is None else affine.bias.double()


def _pool(program: Program, vector: str, self_attention: bool) -> tuple[list[Affine], int]:
    """Return the projections of one input among whose rows a vector's rows may be, and its own first row there."""
    own = path_of(program, vector).affine
    affines = [path_of(program, name).affine for name in (QKV if self_attention else (vector,))]
    pool = [x for x in affines if x is not None and own is not None and x.weight.shape[-1] == own.weight.shape[-1]]
    before = pool[: next((i for i, x in enumerate(pool) if x is own), 0)]
    return pool, sum(x.weight.shape[0] * x.weight.shape[1] for x in before)


def _moved(sides: Sides) -> dict[str, Tensor]:
    """Returns, for each vector whose rows are A's in another order, the row of A's pool at each place.

    Vectors with rows in place, or with rows that A does not have, are left out.
    """
    orders = {vector: order for vector in QKV if (order := _order(sides, vector)) is not None}
    lost, size = torch.zeros(SKETCH_PRODUCTS, dtype=torch.float64), 0.0
    for vector in orders:
        sketches = [_sketch(_flat(x)) for side in (sides.a, sides.b) if (x := path_of(side, vector).affine) is not None]
        lost = lost + sketches[0].sum(0) - sketches[1].sum(0)
        size += float(sketches[0].abs().amax(1).mean())
    return {} if float(lost.abs().max()) > SKETCH_TOLERANCE * size else orders  # some rows twice, others gone


def _order(sides: Sides, vector: str) -> Tensor | None:
    a, b = path_of(sides.a, vector).affine, path_of(sides.b, vector).affine
    if a is None or b is None or a.weight.shape != b.weight.shape:
        return None
    mine, wanted = _flat(a), _flat(b)
    there = same_rows(mine, wanted)
    if bool(there.all()):
        return None
    pool, first = _pool(sides.a, vector, sides.self_attention)
    rows = torch.cat([_flat(x) for x in pool])
    found = _nearest(_sketch(wanted[~there]), _sketch(rows))
    if not bool(same_rows(rows[found], wanted[~there]).all()):
        return None
    order = torch.arange(first, first + len(mine))
    order[~there] = found
    return order


def _sketch(rows: Tensor) -> Tensor:
    """Return products with random vectors, (rows, SKETCH), from a fixed seed so that both sides use the same."""
    generator = torch.Generator().manual_seed(rows.shape[-1])
    return rows @ torch.randn(rows.shape[-1], SKETCH_PRODUCTS, dtype=torch.float64, generator=generator)


def _nearest(wanted: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([torch.cdist(some, rows).argmin(-1) for some in torch.split(wanted, ROWS_AT_ONCE)])


def relabelled(sides: Sides, orders: dict[str, Tensor] | None = None) -> bool:
    """Return whether q and k have rows in the order of the other rotary layout and use that layout: no difference.

    Checkpoints are converted this way: the two channels of a pair stay a pair.

    Args:
        sides: both programs.
        orders: for each vector with moved rows, A's row at each place; None computes them.
    """
    orders = _moved(sides) if orders is None else orders
    for vector in QK:
        turned, other = (rotation_of(path_of(program, vector)) for program in (sides.a, sides.b))
        own = path_of(sides.a, vector).affine
        if turned is None or other is None or turned.layout == other.layout or turned.width != other.width:
            return False
        if own is None or vector not in orders:
            return False
        first = _pool(sides.a, vector, sides.self_attention)[1]
        rows = torch.arange(first, first + len(_flat(own))).view(own.weight.shape[:2])
        if not torch.equal(orders[vector], layout_order(rows, turned).flatten()):
            return False
    return True


# -- rows in another order ---------------------------------------------------------------------------------------------


def row_orders(sides: Sides) -> Iterator[BothParts[dict[str, Tensor]]]:
    """Yield one pair for all vectors whose rows are A's in another order; nothing if no rows moved.

    Rows may move from one vector to another. Both parts are the orders: A's row at each place, by name of the vector.
    """
    orders = _moved(sides)
    if orders and relabelled(sides, orders):
        orders = {vector: order for vector, order in orders.items() if vector not in QK}

    def change(program: Program) -> Program:
        new = program
        for vector, order in orders.items():
            new = with_path(new, vector, _with_row_order(program, vector, order, sides.self_attention))
        return new

    if orders:
        yield BothParts(sides, orders, orders, lambda _: change, next(iter(orders)))


def compare_head_order(both: BothParts[dict[str, Tensor]]) -> PartDifference:
    """Return the difference of rows in another order: heads, channels, parts of a fused QKV, whole weights."""
    parts = joined([QKV_LETTERS[vector] for vector in both.a], "and")
    if (holds := _exchanged(both)) is not None:
        words = {"parts": parts, "b": holds}
        return PartDifference(Message("causes.head_order.in_order"), holds, words, text="causes.head_order.holds")
    return PartDifference(Message("causes.head_order.in_order"), _order_words(both), {"parts": parts})


def _exchanged(both: BothParts[dict[str, Tensor]]) -> Message | None:
    """Return which whole weight of A each vector of B holds; None unless each holds that of another vector."""
    # load_state_dict with q_proj -> wk, k_proj -> wq: nothing is fused, and no row has moved within its weight
    held = []
    for vector, order in both.a.items():
        own, mine = path_of(both.sides.b, vector).affine, path_of(both.sides.a, vector).affine
        pool, first = _pool(both.sides.a, vector, both.sides.self_attention)
        starts = [sum(len(_flat(x)) for x in pool[:place]) for place in range(len(pool))]
        start = int(order[0])
        if own is None or mine is None or start == first or start not in starts:
            return None
        source = pool[starts.index(start)]
        if len(_flat(source)) != len(order) or not torch.equal(order, torch.arange(start, start + len(order))):
            return None
        names = [f"`{_short(name) or letter}`" for name, letter in (
            (own.name, QKV_LETTERS[vector]), (source.name, _letter(both.sides, source)),
        )]  # fmt: skip
        held.append(Message("causes.head_order.one_holds", own=names[0], other=names[1]))
    return joined(held, "and") if held else None  # type: ignore[return-value]


def _short(name: str) -> str:
    """Return the last part of a parameter's name without `weight`: "q_proj"."""
    return name.removesuffix(".weight").rpartition(".")[2]


def _letter(sides: Sides, affine: Affine) -> str:
    return next((QKV_LETTERS[name] for name in QKV if path_of(sides.a, name).affine is affine), "")


def _with_row_order(program: Program, vector: str, order: Tensor, together: bool) -> VectorPath:
    """Return the path with a projection that has A's rows in the given order."""
    path, (pool, _) = path_of(program, vector), _pool(program, vector, together)
    own = path.affine
    if own is None:
        return path
    rows = torch.cat([_flat(x) for x in pool])[order].view_as(own.weight)
    bias = torch.cat([_bias(x).flatten() for x in pool])[order].view(own.weight.shape[:2])
    features = torch.cat([x.features.flatten() for x in pool])[order].view_as(own.features)
    there = any(x.bias is not None for x in pool)
    return replace(path, affine=replace(own, weight=rows, bias=bias if there else None, features=features))


def _order_words(both: BothParts[dict[str, Tensor]]) -> Message:
    """Return what happened to the first vector that moved, as text."""
    own, order = path_of(both.sides.a, both.vector).affine, both.a[both.vector]
    assert own is not None
    pool, first = _pool(both.sides.a, both.vector, both.sides.self_attention)
    heads, channels = own.weight.shape[:2]
    local = (order - first).view(heads, channels)
    if bool((local < 0).any()) or bool((local >= heads * channels).any()):
        # rows of [q, k, v][head][channel], read one head after the other
        layouts, part = ("[head][q, k, v]", "[q, k, v][head]"), first // (heads * channels)
        if all(x.weight.shape == pool[0].weight.shape for x in pool):
            places = torch.arange(len(pool) * heads * channels)
            by_head = places.view(heads, len(pool), channels).transpose(0, 1)[part]
            by_part = places.view(len(pool), heads, channels).transpose(0, 1).reshape(len(pool), heads, channels)[part]
            for mixed, (read, written) in ((by_head, layouts), (by_part, layouts[::-1])):
                if torch.equal(order.cpu().view(heads, channels), mixed):
                    return Message("causes.head_order.qkv_mixed", read=read, written=written)
        return Message("causes.head_order.parts_mixed")
    head, channel = local // channels, local % channels
    in_order = torch.arange(channels)
    if bool((head == head[:, :1]).all()):
        if bool((channel == in_order).all()):
            return Message("causes.head_order.heads", heads=_list(head[:, 0]))
        turned = rotation_of(path_of(both.sides.a, both.vector))
        if turned is not None and bool((channel == layout_order(in_order, turned)).all()):
            return Message("causes.head_order.other_layout")
        if bool((channel == channel[:1]).all()):
            return Message("causes.head_order.channels", channels=_list(channel[0]))
    if bool((local.flatten() == torch.arange(heads * channels).view(channels, heads).T.flatten()).all()):
        return Message("causes.head_order.channel_first")
    return Message("causes.head_order.heads_mixed")


def _list(numbers: Tensor) -> str:
    shown = " ".join(str(number) for number in numbers[:MOST_NUMBERS_LISTED].tolist())
    return shown if len(numbers) <= MOST_NUMBERS_LISTED else f"{shown} ..."


# -- other weights, another bias ---------------------------------------------------------------------------------------


def projection_pairs(sides: Sides) -> Iterator[BothParts[Affine]]:
    """Yield the projections of q, k and v that both sides know and that have equal numbers of heads and features."""
    for vector in QKV:
        a, b = path_of(sides.a, vector).affine, path_of(sides.b, vector).affine
        if a is not None and b is not None and a.weight.shape[:2] == b.weight.shape[:2]:
            yield BothParts(sides, a, b, partial(_on_affine, vector), vector)


def _on_affine(vector: str, edit: Edit[Affine]) -> ProgramChange:
    return change_path(vector)(lambda path: path if path.affine is None else replace(path, affine=edit(path.affine)))


def compare_weight(both: BothParts[Affine]) -> PartDifference | None:
    """Return the difference of two weights; None for other shapes, equal weights or rows that only moved.

    Vectors that share a parameter, such as a fused QKV, make one difference. `a` and `b` are the names of the
    parameters.
    """
    a, b = both.a, both.b
    if a.weight.shape != b.weight.shape:
        return None
    if bool(same_rows(_flat(a), _flat(b)).all()):
        return _compare_rounded(both)
    if both.vector in _moved(both.sides):
        return None
    key = b.name or a.name or both.vector
    words = {"name": key, "how": _distance(_flat(a), _flat(b))}
    text = "causes.weights.other" if key in QKV else "causes.weights.other_named"
    return PartDifference(a.name or None, b.name or None, words, key=key, text=text)


def _compare_rounded(both: BothParts[Affine]) -> PartDifference | None:
    """Compares the same weights, of which one side's are rounded more than its run is."""
    # A checkpoint in bfloat16, loaded into float32: its run rounds far less than its weights are rounded.
    mine, wanted = _flat(both.a), _flat(both.b)
    sides = both.sides.b, both.sides.a
    for text, program, dtype in zip(ROUNDED, sides, (rounded_to(mine, wanted), rounded_to(wanted, mine)), strict=True):
        if dtype is not None and rounding_unit(program.dtype) < rounding_unit(dtype):
            name = str(dtype).removeprefix("torch.")
            return PartDifference(
                both.a.name or None, both.b.name or None, {"dtype": name}, key=(text, name), text=text
            )
    return None


def _distance(mine: Tensor, wanted: Tensor) -> Message:
    """Return the distance of two weights as text: a factor, some rows, or all."""
    factor = float((mine * wanted).sum() / (mine * mine).sum().clamp_min(1e-300))
    if bool(same_rows(mine * factor, wanted).all()):
        return Message("causes.weights.times", factor=unequal_texts(1.0, factor)[1])
    differ = int((~same_rows(mine, wanted)).sum())
    relative = float((mine - wanted).norm() / mine.norm().clamp_min(1e-300))
    return Message("causes.weights.rows", differ=differ, rows=len(mine), share=f"{four_digits(relative):g}")


def compare_projection_bias(both: BothParts[Affine]) -> PartDifference | None:
    """Return the difference if the biases are not equal; a missing bias counts as 0, a moved one as A's."""
    mine, wanted, sides = _bias(both.a), _bias(both.b), both.sides
    if _one_row(mine, wanted):
        return None
    order = _moved(sides).get(both.vector)
    if order is not None:
        rows = torch.cat([_bias(x).flatten() for x in _pool(sides.a, both.vector, sides.self_attention)[0]])
        if _one_row(rows[order], wanted):
            return None
    a = SOME if bool(mine.any()) else NO_VALUE
    b = NO_VALUE if not bool(wanted.any()) else SOME if a == NO_VALUE else OTHER
    return PartDifference(Message(a), Message(b))


def _one_row(a: Tensor, b: Tensor) -> bool:
    return bool(same_rows(a.reshape(1, -1), b.reshape(1, -1)).all())


# -- heads and factors of k and v --------------------------------------------------------------------------------------


def compare_group_order(both: BothParts[VectorPath]) -> PartDifference | None:
    """Return the difference in which key head each query head reads; None if it is the same or unknown.

    `a` and `b` list the head of each query head: 0 0 1 1 is `repeat_interleave` of two heads, 0 1 0 1 is `tile`.
    """
    a, b = both.a.heads, both.b.heads
    if both.a.affine is not None and both.b.affine is not None:
        a, b = _heads(both.a.affine, both.b.affine, a, b)
    if a is None or b is None or a.shape != b.shape or torch.equal(a, b):
        return None
    heads, code = b, _repeat(a.tolist())
    if code == _repeat(b.tolist()):  # 1 1 0 0 for 0 0 1 1: repeated alike, in another order
        code = ""
    return PartDifference(_list(a), _list(b), edit=lambda path: replace(path, heads=heads), code=code)


def _repeat(heads: list[int]) -> str:
    """Return how key heads are repeated: 0 0 1 1 is "interleaved", 0 1 0 1 "repeated"; "" if they are not, or else."""
    first = list(dict.fromkeys(heads))
    if len(first) == len(heads):
        return ""
    if heads == sorted(heads, key=first.index):
        return "interleaved"
    return "repeated" if heads == first * (len(heads) // len(first)) else ""


def _heads(a: Affine, b: Affine, heads_a: Tensor | None, heads_b: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the head of A's that each query head reads, on both sides; None if unknown."""
    every = torch.arange(len(b.weight))
    read = every if heads_b is None else heads_b
    if len(a.weight) == len(b.weight):
        return (every if heads_a is None else heads_a), read
    # a side that repeats the rows has a key head for each query head
    if a.weight.shape[1:] != b.weight.shape[1:]:
        return None, None
    mine, other = a.weight.flatten(1).double(), b.weight.flatten(1).double()
    found = _nearest(_sketch(other), _sketch(mine))
    return (heads_a, found[read]) if bool(same_rows(mine[found], other).all()) else (None, None)


def compare_kv_factor(both: BothParts[VectorPath]) -> PartDifference | None:
    """Return the difference of a factor of each head of k or v, such as `v * 0.5`; None if there is none.

    If a side stores k or v in 8 bits or fewer, it is the scale of this cache, applied twice or not at all. A factor on
    q, or one that the code applies to the logits, is `scale`. A factor in the rows of the projection is `weights`. An
    equal factor on q and k, both rotating, is `length_factor`.
    """
    a, b = (torch.as_tensor(path.scaled, dtype=torch.float64) for path in (both.a, both.b))
    if same(a, b, both.sides.slack) or (both.vector == "key" and like_amplitude(both.sides)):
        return None
    by = _size(b / a)
    stored = any(
        isinstance(step, RoundingStep) and step.dtype in MOST_STORED for path in (both.a, both.b) for step in path.steps
    )
    text = "" if stored else "causes.kv_scale.factor"
    return PartDifference(_size(a), _size(b), {"by": by if isinstance(by, str) else str(by)}, text=text)


def _size(factor: Tensor) -> float | str:
    text = range_text(factor)
    return text if isinstance(text, Message) else float(text)


def like_amplitude(sides: Sides) -> bool:
    """Return whether q and k both rotate and have the same factor other than 1 between the sides.

    Then the factor counts as the amplitude of cos and sin.
    """
    turning = all(rotation_of(path_of(side, vector)) is not None for vector in QK for side in (sides.a, sides.b))
    ratios = [torch.as_tensor(path_of(sides.b, x).scaled) / torch.as_tensor(path_of(sides.a, x).scaled) for x in QK]
    by = torch.cat([ratio.double().flatten() for ratio in ratios])
    one = torch.ones(1, dtype=torch.float64)
    return turning and same(by[:1], by, sides.slack) and not same(by[:1], one, sides.slack)
