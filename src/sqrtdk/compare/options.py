"""What a formula might be instead: the changes that ports make by mistake, part by part, simplest first.

An option changes one part of a formula. Two options of different parts can be taken together, whatever their order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from sqrtdk.audit.tolerance import inverse_root
from sqrtdk.compare.masks import NOT_APART, Parts, decompose, distances, recompose, with_padding, with_pattern
from sqrtdk.compare.numbers import one_number, rescaled, same, softcap_placed, total
from sqrtdk.compare.program import Formula
from sqrtdk.compare.suspect import Edit
from sqrtdk.positions import alibi_slopes

CAPS = (50.0, 30.0, 20.0, 15.0, 10.0, 100.0, 5.0)
HALF = ("float16", "bfloat16")
SCALE, SOFTCAP, BIAS, MASK, FILL, SINKS, ROUNDING, DROPOUT = range(8)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of one attention: B, Hq, L, S, E."""

    batch: int
    heads: int
    rows: int
    keys: int
    features: int


@dataclass(frozen=True, slots=True)
class Option:
    """A change of one part of a formula.

    Attributes:
        part: its number, in the order of an attention.
        changes: how many mistakes it stands for, 1 or 2.
        change: of the formula.
    """

    part: int
    changes: int
    change: Edit[Formula]


def options(base: Formula, sizes: Sizes) -> Iterator[Option]:
    """All that `base` might be instead, part by part."""
    for part, make in ((SCALE, scales), (SOFTCAP, softcaps), (BIAS, biases), (FILL, fills), (SINKS, sinks)):
        yield from (Option(part, 1, change) for change in make(base, sizes))
    yield from masks(base, sizes)
    for dtype in HALF:
        yield Option(ROUNDING, 1, _set(logits_dtype=dtype, weights_dtype=dtype))
        yield Option(ROUNDING, 1, _set(weights_dtype=dtype))
        yield Option(ROUNDING, 1, _set(logits_dtype=dtype))
    if base.kept is not None:
        yield Option(DROPOUT, 1, _set(kept=None, dropout=0.0))


def scales(base: Formula, sizes: Sizes) -> Iterator[Edit[Formula]]:
    """The dictionary of mistakes, of the base's own scale and of the textbook's."""
    own = one_number(total(base))
    root = inverse_root(sizes.features)
    numbers = [
        1.0,
        root,
        root * root,
        1.0 / root,
        inverse_root(sizes.heads * sizes.features),
        inverse_root(sizes.heads),
    ]
    if own:
        numbers += [own * own, 1.0 / own, own * root, own / root, -own]
    seen = [] if own is None else [own]
    for number in numbers:
        if not any(same(number, other) for other in seen):
            seen.append(number)
            yield _scale(number)


def softcaps(base: Formula, sizes: Sizes) -> Iterator[Edit[Formula]]:
    """No softcap, one of the usual values, and the places of the one that there is."""
    if base.softcap is None:
        for cap in CAPS:
            yield _set(softcap=cap)
        return
    yield lambda f: replace(softcap_placed(f, Formula()), softcap=None)
    for other in (Formula(softcap_at="scaled"), Formula(softcap_at="product"), Formula(softcap_at="masked")):
        if other.softcap_at != base.softcap_at:
            yield _placed(other)
    for cap in CAPS:
        if cap != base.softcap:
            yield _set(softcap=cap)


def biases(base: Formula, sizes: Sizes) -> Iterator[Edit[Formula]]:
    """None, one that the scale multiplies, of another sign or size, turned round, of other heads; ALiBi for none."""
    if base.bias is None:
        apart = distances(sizes.rows, sizes.keys).double()
        yield _set(bias=-torch.tensor(alibi_slopes(sizes.heads))[:, None, None] * apart, bias_name="alibi", bias_by=1.0)
        return
    bias = base.bias
    yield _set(bias=None, bias_by=1.0)
    yield _scaled_bias
    scale = one_number(total(base))
    if scale and scale != 1.0:
        yield lambda f: replace(f, bias_by=base.bias_by * scale)
    yield from (_set(bias=base.bias * by) for by in (-1.0, 2.0, 0.5))
    if bias.ndim > 1 and bias.shape[-1] == bias.shape[-2] > 1:
        yield _set(bias=bias.mT)
    if bias.ndim > 2 and bias.shape[-3] > 1:
        yield _set(bias=bias.flip(-3))


def fills(base: Formula, sizes: Sizes) -> Iterator[Edit[Formula]]:
    """Other numbers in place of minus infinity; of a row that sees no key they make an average."""
    lowest = float(torch.finfo(torch.float32).min)
    scale = one_number(total(base))
    if math.isfinite(base.fill) and scale and scale != 1.0:
        yield _set(fill_by=base.fill_by * scale)
    for fill, added in ((-math.inf, False), (lowest, False), (lowest, True), (-1e4, True), (-1e4, False), (0.0, False)):
        if fill != base.fill or (added != base.fill_added and math.isfinite(fill)):
            yield _set(fill=fill, fill_by=1.0, fill_added=added)


def sinks(base: Formula, sizes: Sizes) -> Iterator[Edit[Formula]]:
    """None, and sinks of 0."""
    if base.sinks is not None:
        yield _set(sinks=None)
    yield _set(sinks=torch.zeros(sizes.heads, dtype=torch.float64))


def masks(base: Formula, sizes: Sizes) -> Iterator[Option]:
    """Other bands, padding lost or on the other side, and both at once."""
    parts = decompose(base.visible, sizes.batch, sizes.rows, sizes.keys)
    found = []
    for (bounds, moved), (padding, padded) in product(_bands(parts), _paddings(parts)):
        if moved + padded:
            found.append(Option(MASK, min(2, moved + padded), _mask(parts, bounds, padding)))
    blind = ~torch.ones((), dtype=torch.bool) if base.visible is None else ~base.visible.any(-1)
    if bool(blind.any()):
        found.append(Option(MASK, 1, _opened))
    if bool((parts.apart != NOT_APART).any()):
        none = torch.full_like(parts.apart, NOT_APART)
        found.append(Option(MASK, 1, _mask(replace(parts, apart=none), (parts.least, parts.greatest), parts.padding)))
    for part, without in (
        (parts.rest, replace(parts, rest=None)),
        (parts.documents, replace(parts, documents=None)),
        (parts.blocks, replace(parts, blocks=None)),
    ):
        if part is not None:
            found.append(Option(MASK, 1, _mask(without, (parts.least, parts.greatest), parts.padding)))
    if base.visible is not None:
        found.append(Option(MASK, 1, _set(visible=~base.visible)))
        if base.visible.shape[-2] == base.visible.shape[-1]:
            found.append(Option(MASK, 1, _set(visible=base.visible.mT)))
    yield from sorted(found, key=lambda option: option.changes)


def _bands(parts: Parts) -> Iterator[tuple[tuple[int | None, int | None], int]]:
    """Bounds of other bands, and how many mistakes each is."""
    least, greatest = parts.least, parts.greatest
    yield (least, greatest), 0
    corners = dict.fromkeys((0, parts.rows - parts.keys))
    if parts.symmetric and greatest is not None:
        sizes = (greatest + 1, greatest - 1, 2 * greatest, greatest // 2)
        yield from (((-size, size), 1) for size in sizes if size != greatest)
        yield (None, None), 1
        return
    if least is None:
        for corner in corners:
            yield (corner, greatest), 1
            yield (corner - 1, greatest), 2
        return
    lows = {least - 1: 1, least + 1: 1, None: 1}
    shifts = [corner - least for corner in corners if corner != least]
    highs = {None: 1} if greatest is None else {greatest + 1: 1, greatest - 1: 1, None: 1}
    yield from (((low, greatest), 1) for low in lows)
    if greatest is not None:
        yield from (((least, high), 1) for high in highs)
        yield from (((least + by, greatest + by), 1) for by in (-1, 1))
        yield from (((low, high), 2) for low in lows for high in highs)
    for by in shifts:
        yield (least + by, None if greatest is None else greatest + by), 1
        yield from (((least + by + more, None if greatest is None else greatest + by + more), 2) for more in (-1, 1))


def _paddings(parts: Parts) -> Iterator[tuple[Tensor, int]]:
    yield parts.padding, 0
    if not bool(parts.padding.all()):
        yield torch.ones_like(parts.padding), 1
        yield ~parts.padding, 1
        if not bool((parts.padding == parts.padding.flip(-1)).all()):
            yield parts.padding.flip(-1), 1


def _mask(parts: Parts, bounds: tuple[int | None, int | None], padding: Tensor) -> Edit[Formula]:
    def change(formula: Formula) -> Formula:
        other = replace(parts, padding=padding, rest=None, apart=torch.full_like(parts.apart, NOT_APART))
        moved = parts if padding is parts.padding else with_padding(parts, other)
        moved = with_pattern(moved, other, least=bounds[0], greatest=bounds[1])
        return replace(formula, visible=recompose(moved))

    return change


def _opened(formula: Formula) -> Formula:
    """Rows that see no key see every one."""
    visible = formula.visible
    return formula if visible is None else replace(formula, visible=visible | ~visible.any(-1, keepdim=True))


def blind_rows(formula: Formula) -> Iterator[Formula]:
    """What rows that see no key may be: an average of all, every key seen, or their own alone."""
    visible = formula.visible
    if visible is None or bool(visible.any(-1).all()):
        return
    yield replace(formula, fill=float(torch.finfo(torch.float32).min), fill_by=1.0, fill_added=False)
    yield _opened(formula)
    rows, keys = visible.shape[-2:]
    for corner in dict.fromkeys((0, keys - rows)):
        own = torch.eye(keys, dtype=torch.bool, device=visible.device)[corner : corner + rows]
        if own.shape[0] == rows:
            yield replace(formula, visible=visible | (own & ~visible.any(-1, keepdim=True)))


def window(base: Formula, sizes: Sizes, row: int) -> Option:
    """The window of which `row` is the first that does not see the first key."""
    parts = decompose(base.visible, sizes.batch, sizes.rows, sizes.keys)
    return Option(MASK, 1, _mask(parts, (parts.least, row - 1), parts.padding))


def _set(**values: object) -> Edit[Formula]:
    return lambda formula: replace(formula, **values)  # type: ignore[arg-type]


def _scale(number: float) -> Edit[Formula]:
    return lambda formula: rescaled(formula, Formula(number))


def _placed(other: Formula) -> Edit[Formula]:
    return lambda formula: softcap_placed(formula, other)


def _scaled_bias(formula: Formula) -> Formula:
    """The scale multiplies the sum: what another option makes of the scale goes for the bias too."""
    scale = one_number(total(formula))
    return formula if scale is None else replace(formula, bias_by=scale)
