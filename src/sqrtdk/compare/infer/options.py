"""What a formula might be instead: changes that ports make by mistake, part by part, simplest first.

An option changes one part of a formula. Options of different parts can be combined in any order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from sqrtdk.audit.tolerance import inverse_root
from sqrtdk.compare.infer.evidence import AttentionSizes
from sqrtdk.compare.infer.fit import USUAL_SOFTCAPS
from sqrtdk.compare.inside.program import Formula
from sqrtdk.compare.inside.suspect import Edit
from sqrtdk.compare.numbers import rescaled, same, single_number, softcap_placed, total
from sqrtdk.masks.band import Band, distances
from sqrtdk.masks.decompose import decompose
from sqrtdk.masks.parts import NOT_APART, Parts, recompose, with_padding, with_pattern
from sqrtdk.positions import alibi_slopes

HALF_PRECISION = ("float16", "bfloat16")
SCALE, SOFTCAP, BIAS, MASK, FILL, SINKS, ROUNDING, DROPOUT = range(8)


@dataclass(frozen=True, slots=True)
class Option:
    """A change of one part of a formula.

    Attributes:
        part: number of the part, in the order of an attention.
        changes: number of mistakes that it stands for, 1 or 2.
        change: the change of the formula.
    """

    part: int
    changes: int
    change: Edit[Formula]


def formula_options(base: Formula, sizes: AttentionSizes) -> Iterator[Option]:
    """Yield changes of `base` that stand for common mistakes: of scale, softcap, bias, fill, sinks, mask, roundings.

    The last is the removal of dropout, if the formula has any.

    Args:
        base: the formula that is changed.
        sizes: sizes of the attention.
    """
    for part, make in (
        (SCALE, other_scales),
        (SOFTCAP, other_softcaps),
        (BIAS, other_biases),
        (FILL, other_fills),
        (SINKS, other_sinks),
    ):
        yield from (Option(part, 1, change) for change in make(base, sizes))
    yield from other_masks(base, sizes)
    for dtype in HALF_PRECISION:
        yield Option(ROUNDING, 1, _set(logits_dtype=dtype, weights_dtype=dtype))
        yield Option(ROUNDING, 1, _set(weights_dtype=dtype))
        yield Option(ROUNDING, 1, _set(logits_dtype=dtype))
    if base.kept is not None:
        yield Option(DROPOUT, 1, _set(kept=None, dropout=0.0))


def other_scales(base: Formula, sizes: AttentionSizes) -> Iterator[Edit[Formula]]:
    """Yield changes of the scale: common mistakes, applied to the formula's own scale and to 1 / sqrt(E)."""
    own, root = single_number(total(base)), inverse_root(sizes.features)
    every, heads = inverse_root(sizes.heads * sizes.features), inverse_root(sizes.heads)
    numbers = [1.0, root, root * root, 1.0 / root, every, heads]
    if own:
        # scale applied twice, inverted, with the textbook scale on top or removed, with the other sign
        numbers += [own * own, 1.0 / own, own * root, own / root, -own]
    seen = [] if own is None else [own]
    for number in numbers:
        if not any(same(number, other) for other in seen):
            seen.append(number)
            yield scaled(number)
    if base.softcap is not None:  # tanh(z / 50) that is not multiplied by 50 again, and the other way round
        for factor in (1.0 / base.softcap, base.softcap):
            yield _set(after=base.after * factor)


def other_softcaps(base: Formula, sizes: AttentionSizes) -> Iterator[Edit[Formula]]:
    """Yield changes of the softcap: none, the usual caps, and other places of an existing one."""
    if base.softcap is None:
        for cap in USUAL_SOFTCAPS:
            yield _set(softcap=cap)
        return
    yield lambda f: replace(softcap_placed(f, Formula()), softcap=None)
    for place in ("scaled", "product", "masked"):
        if place != base.softcap_at:
            yield partial(softcap_placed, other=Formula(softcap_at=place))
    for cap in USUAL_SOFTCAPS:
        if cap != base.softcap:
            yield _set(softcap=cap)


def other_biases(base: Formula, sizes: AttentionSizes) -> Iterator[Edit[Formula]]:
    """Yield changes of the bias: none, scaled, negated, doubled, halved, transposed, with heads reversed.

    ALiBi is the only one if the formula has no bias.
    """
    if base.bias is None:
        apart = distances(sizes.rows, sizes.keys).double()
        yield _set(bias=-torch.tensor(alibi_slopes(sizes.heads))[:, None, None] * apart, bias_name="alibi", bias_by=1.0)
        return
    bias = base.bias
    yield _set(bias=None, bias_by=1.0)
    yield _scaled_bias
    scale = single_number(total(base))
    if scale and scale != 1.0:
        yield lambda f: replace(f, bias_by=base.bias_by * scale)
    yield from (_set(bias=base.bias * by) for by in (-1.0, 2.0, 0.5))
    if bias.ndim > 1 and bias.shape[-1] == bias.shape[-2] > 1:
        yield _set(bias=bias.mT)
    if bias.ndim > 2 and bias.shape[-3] > 1:
        yield _set(bias=bias.flip(-3))


def other_fills(base: Formula, sizes: AttentionSizes) -> Iterator[Edit[Formula]]:
    """Yield changes of the number that hidden logits get, or that is added to them, by the usual fills."""
    lowest = float(torch.finfo(torch.float32).min)
    # finfo.min and -1e4 are the fills that codes write; added to logits or in place of them
    scale = single_number(total(base))
    if math.isfinite(base.fill) and scale and scale != 1.0:
        yield _set(fill_by=base.fill_by * scale)
    for fill, added in ((-math.inf, False), (lowest, False), (lowest, True), (-1e4, True), (-1e4, False), (0.0, False)):
        if fill != base.fill or (added != base.fill_added and math.isfinite(fill)):
            yield _set(fill=fill, fill_by=1.0, fill_added=added)


def other_sinks(base: Formula, sizes: AttentionSizes) -> Iterator[Edit[Formula]]:
    """Yield changes of the sinks: none, if the formula has some, and sinks of 0."""
    if base.sinks is not None:
        yield _set(sinks=None)
    yield _set(sinks=torch.zeros(sizes.heads, dtype=torch.float64))


def other_masks(base: Formula, sizes: AttentionSizes) -> Iterator[Option]:
    """Yield changes of the mask, those that stand for one mistake first.

    They are other bounds, padding that is lost or on the other end, both at once, and lost, inverted or transposed
    parts.
    """
    parts = decompose(base.visible, sizes.batch, sizes.rows, sizes.keys)
    moved = [
        Option(MASK, min(2, moved + padded), _mask(parts, band, padding))
        for (band, moved), (padding, padded) in product(_bands(parts), _paddings(parts))
        if moved + padded
    ]
    others: list[Edit[Formula]] = []
    visible = base.visible
    # rows without a key that see every key, special rows without their rule, lost parts, inverted and transposed masks
    if visible is not None and not bool(visible.any(-1).all()):
        others.append(_opened)
    if bool((parts.apart != NOT_APART).any()):
        others.append(_mask(replace(parts, apart=torch.full_like(parts.apart, NOT_APART))))
    there = [name for name in ("rest", "documents", "blocks") if getattr(parts, name) is not None]
    others += [_mask(replace(parts, **{name: None})) for name in there]  # type: ignore[arg-type]
    if visible is not None:
        others.append(_set(visible=~visible))
        if visible.shape[-2] == visible.shape[-1]:
            others.append(_set(visible=visible.mT))
    yield from sorted([*moved, *(Option(MASK, 1, change) for change in others)], key=lambda option: option.changes)


def _bands(parts: Parts) -> Iterator[tuple[Band, int]]:
    """Yield other bands, with the number of mistakes that each stands for."""
    least, greatest = parts.least, parts.greatest
    corners = dict.fromkeys((0, parts.rows - parts.keys))
    if parts.symmetric and greatest is not None:
        # window sizes off by one, or counted over both directions instead of one
        sizes = (greatest + 1, greatest - 1, 2 * greatest, greatest // 2)
        yield from ((Band(-size, size), int(size != greatest)) for size in (greatest, *sizes))
        yield Band(), 1
        return
    lows, highs = {least: 0}, {greatest: 0}
    if greatest is not None:
        highs |= {greatest + 1: 1, greatest - 1: 1, None: 1}
    if least is None:
        lows |= {corner - more: 1 + more for more in (1, 0) for corner in corners}
    else:
        lows |= {least - 1: 1, least + 1: 1, None: 1}
    yield from ((Band(low, high), highs[high] + lows[low]) for high, low in product(highs, lows))
    if least is None:
        return
    by_one = [(-1, 1), (1, 1)] if greatest is not None else []
    # The causal bound moves alone or with the window; with L != S it may also move to the other corner.
    turned = [(corner - least + more, 1 + abs(more)) for corner in corners if corner != least for more in (0, -1, 1)]
    for by, changes in (*by_one, *turned):
        yield Band(least + by, None if greatest is None else greatest + by), changes


def _paddings(parts: Parts) -> Iterator[tuple[Tensor, int]]:
    yield parts.padding, 0
    if not bool(parts.padding.all()):
        yield torch.ones_like(parts.padding), 1
        yield ~parts.padding, 1
        if not bool((parts.padding == parts.padding.flip(-1)).all()):
            yield parts.padding.flip(-1), 1


def _mask(parts: Parts, band: Band | None = None, padding: Tensor | None = None) -> Edit[Formula]:
    least, greatest = (parts.least, parts.greatest) if band is None else band
    tokens = parts.padding if padding is None else padding

    def change(formula: Formula) -> Formula:
        other = replace(parts, padding=tokens, rest=None, apart=torch.full_like(parts.apart, NOT_APART))
        moved = parts if tokens is parts.padding else with_padding(parts, other)
        return replace(formula, visible=recompose(with_pattern(moved, other, least=least, greatest=greatest)))

    return change


def _opened(formula: Formula) -> Formula:
    """Return the formula in which rows that see no key see every key."""
    visible = formula.visible
    return formula if visible is None else replace(formula, visible=visible | ~visible.any(-1, keepdim=True))


def other_blind_rows(formula: Formula) -> Iterator[Formula]:
    """Yield formulas in which rows that see no key get something: a mean over keys, every key, or their own key.

    Nothing is yielded if every row sees a key.
    """
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


def window_before_key_0(base: Formula, sizes: AttentionSizes, row: int) -> Option:
    """Return the change to the largest window that hides key 0 from `row`: the greatest i - j is row - 1."""
    parts = decompose(base.visible, sizes.batch, sizes.rows, sizes.keys)
    return Option(MASK, 1, _mask(parts, Band(parts.least, row - 1), parts.padding))


def _set(**values: object) -> Edit[Formula]:
    return lambda formula: replace(formula, **values)  # type: ignore[arg-type]


def scaled(number: float) -> Edit[Formula]:
    """Return the change of a formula that makes `number` the product of all its factors on q . k."""
    return partial(rescaled, other=Formula(number))


def _scaled_bias(formula: Formula) -> Formula:
    """Return the formula with the scale on the sum of product and bias, whatever another option does to the scale."""
    scale = single_number(total(formula))
    return formula if scale is None else replace(formula, bias_by=scale)
