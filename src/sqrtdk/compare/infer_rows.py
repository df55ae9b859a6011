"""What the rows of an attention tell by themselves: which keys they see, what a sink takes, what hidden keys have.

With e_j = exp(z_j) of a supposed scale, softcap and bias, the output o of a row that sees the keys lo to hi - 1 has
sum_j e_j (v_j - o) = 0 over them. Differences of prefix sums give that of all lo and hi at once, so that no band needs
to be guessed. With a sink, o is a part c < 1 of the same average, and the sink is lse + log((1 - c) / c). A number x in
place of e at hidden keys is in o (D + x Dh) = N + x Nh, which is linear in it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from sqrtdk.compare.compute import attend, logits, parts_of, spread
from sqrtdk.compare.masks import band
from sqrtdk.compare.program import Formula
from sqrtdk.compare.recorded import Recorded, evenly

ENTRIES = 2**21  # intervals that are looked at in one go
MOST_KEYS = 1024  # with more the intervals of one row alone are too many
FEW, MANY = (2, 2, 5), (8, 4, 24)  # entries of the batch, heads, rows: to rank what is supposed, to find its mask
FEWEST_ROWS = 4
BEST = 3  # of what is supposed
VOTES = 3  # bounds that are tried
LOST = 1e-15  # of float64 sums that cancel
MOST_SHARE = 1.001  # of an average: what a sink leaves of it, and rounding
SAME = 8.0  # roundings, of the output, within which a longer interval does as well
NEAR = 0.1  # of the root of a rounding, relative: as finely as a fill shows
FEWEST = 3  # digits of a fill that was chosen by hand


@dataclass(frozen=True, slots=True, eq=False)
class _Misses:
    """(B, r, S + 1, S + 1), how far the keys lo to hi - 1 are from giving a row, relative, squared, of all heads.

    Attributes:
        index: numbers of the rows.
        plain: without sinks.
        sunk: with whatever sinks do best.
        unit: square of what rounding of the output leaves.
    """

    index: Tensor
    plain: Tensor
    sunk: Tensor
    unit: float


def from_rows(call: Recorded, supposed: Sequence[Formula], *, masked: bool, sunk: bool) -> Iterator[Formula]:
    """Formulas with the mask, and the sinks, that the rows tell.

    Args:
        call: what was recorded.
        supposed: formulas, of which scale, softcap and bias are taken; those are kept under which the rows are nearest
            to what some keys give.
        masked: whether the mask is known, which is that of the formulas then.
        sunk: whether the sinks are, likewise.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 12, 16, generator=torch.Generator().manual_seed(0))
        >>> visible = band(12, 12, 1, 4)
        >>> call = Recorded(q, k, v, attend(q, k, v, Formula(0.25, visible=visible))[0].float(), None)
        >>> found = next(from_rows(call, [Formula(1.0), Formula(0.25)], masked=False, sunk=False))
        >>> found.scale, torch.equal(found.visible[0, 0], visible)
        (0.25, True)
    """
    if masked or call.sizes.keys > MOST_KEYS or not call.sizes.rows:
        yield from (found for formula in supposed[:BEST] for found in _sunk(call, formula, sunk))
        return
    for sinks, ranked in zip((False,) if sunk else (False, True), _ranked(call, supposed)):  # noqa: B905
        for formula in ranked[:BEST]:
            for visible in _masks(call, formula, sinks):
                found = replace(formula, visible=visible, mask=formula.mask or "mask")
                yield from _sunk(call, found, known=False) if sinks else (found,)


def _sunk(call: Recorded, formula: Formula, known: bool) -> Iterator[Formula]:
    yield formula
    if not known:
        yield from sinks_of(call, formula)


def _ranked(call: Recorded, supposed: Sequence[Formula]) -> Iterator[list[Formula]]:
    """What is supposed, nearest first: without sinks, and with."""
    misses = [_misses(call, formula, *FEW) for formula in supposed]
    for found in ([one.plain for one in misses], [one.sunk for one in misses]):
        scores = [float(squares.flatten(2).amin(-1).clamp(max=1.0).mean()) for squares in found]
        yield [supposed[place] for place in sorted(range(len(scores)), key=scores.__getitem__)]


def _misses(call: Recorded, formula: Formula, entries: int, heads: int, rows: int) -> _Misses:
    """Of as many rows as there is room for, the last ones among them, of which masks leave most keys."""
    sizes = call.sizes
    entries = min(entries, sizes.batch)
    room = ENTRIES // (entries * (sizes.keys + 1) ** 2)
    of_heads = evenly(0, sizes.heads, max(1, min(heads, room // FEWEST_ROWS)))
    index = evenly(min(1, sizes.rows - 1), sizes.rows, max(FEWEST_ROWS, min(rows, room // len(of_heads))))
    bare = replace(formula, visible=None, sinks=None, kept=None, logits_dtype=None, weights_dtype=None)
    some, bare = call.part(bare, of_heads, index)
    bare = parts_of(bare, lambda part: part[:entries] if part.ndim == 4 else part)
    key, value = (spread(x[:entries], len(of_heads)) for x in (some.key, some.value))
    z = logits(some.query[:entries], key, bare)
    e = (z - z.amax(-1, keepdim=True)).exp()
    output = some.output[:entries].double().nan_to_num()
    apart = value.double()[:, :, None] - output[..., None, :]  # (B, H, r, S, Ev)
    sums = _prefix((e[..., None] * apart).transpose(-1, -2)).transpose(-1, -2)
    gram = sums @ sums.mT
    size = gram.diagonal(dim1=-2, dim2=-1)
    ends = size[..., None, :] + size[..., :, None]
    total = _prefix(e)
    # [lo, hi]
    weight = total[..., None, :] - total[..., :, None]
    square = (ends - 2 * gram).clamp_min(0.0) + LOST * ends
    length = output.square().sum(-1)[..., None, None].clamp_min(1e-30)
    along = (sums @ output[..., None])[..., 0]
    across = along[..., None, :] - along[..., :, None]
    whole = square + 2 * weight * across + length * weight.square()
    share = (across + length * weight) * weight / whole
    sunk = (length * square - across.square()).clamp_min(0.0) / whole / length
    plain = square / (weight.square() * length)
    sunk = sunk.masked_fill((share <= 0) | (share > MOST_SHARE), 4.0)
    unit = (SAME * max(torch.finfo(call.output.dtype).eps, torch.finfo(torch.float32).eps)) ** 2
    backward = ~torch.ones(plain.shape[-2:], dtype=torch.bool).triu(1) | (weight <= 0)
    plain, sunk = (x.masked_fill(backward, math.inf).nan_to_num(nan=math.inf).mean(1) for x in (plain, sunk))
    return _Misses(index, plain, sunk, unit)


def _prefix(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))


# -- the mask ----------------------------------------------------------------------------------------------------------


def _masks(call: Recorded, formula: Formula, sinks: bool) -> Iterator[Tensor | None]:
    """Bands with padding at either end that the rows agree with best."""
    sizes = call.sizes
    misses = _misses(call, formula, *MANY)
    squares = misses.sunk if sinks else misses.plain
    found = []
    for least, greatest in product(*_bounds(misses, squares, sizes.keys)):
        padding, left = _padding(misses, squares, least, greatest, sizes.keys)
        moved = (least is not None) + (greatest is not None) + (padding is not None)
        found.append((left > misses.unit, left if left > misses.unit else 0.0, moved, least, greatest, padding))
    for *_, least, greatest, padding in sorted(found, key=lambda entry: entry[:3])[:2]:
        visible = band(sizes.rows, sizes.keys, least, greatest)[None, None]
        if padding is not None:
            visible = visible & (padding if padding.shape[0] == sizes.batch else padding[:1])[:, None, None]
        yield None if bool(visible.all()) else visible


def _bounds(misses: _Misses, squares: Tensor, keys: int) -> tuple[list[int | None], list[int | None]]:
    """Least and greatest i - j that most rows have, and None."""
    lows: Counter[int] = Counter()
    highs: Counter[int] = Counter()
    for row, i in zip(squares.transpose(0, 1), misses.index.tolist(), strict=True):
        for one in row:
            near = one <= max(4 * float(one.min()), misses.unit)
            for lo, hi in {_longest(near), _longest(one == one.min())}:
                lows.update([i - hi + 1] if hi < keys else [])
                highs.update([i - lo] if lo > 0 else [])
    usual = [bound for bound, _ in lows.most_common(VOTES)], [bound for bound, _ in highs.most_common(VOTES)]
    return [None, *usual[0]], [None, *usual[1]]


def _longest(near: Tensor) -> tuple[int, int]:
    pairs = torch.nonzero(near)
    lo, hi = pairs[(pairs[:, 1] - pairs[:, 0]).argmax()].tolist() if len(pairs) else (0, near.shape[-1] - 1)
    return lo, hi


def _padding(
    misses: _Misses, squares: Tensor, least: int | None, greatest: int | None, keys: int
) -> tuple[Tensor | None, float]:
    """(B, S), False at keys at one end of an entry that no row sees beside a band, and what is left with it."""
    index = misses.index
    low = torch.zeros_like(index) if greatest is None else (index - greatest).clamp(0, keys)
    high = torch.full_like(index, keys) if least is None else (index - least + 1).clamp(0, keys)
    count, rows = torch.arange(keys + 1), torch.arange(len(index))
    kept, left = [], 0.0
    for own in squares:
        entry = (0, keys, _left(own[rows, low, high], low < high))
        from_left = _left(own[rows, torch.maximum(count[:, None], low), high], count[:, None] < high)
        from_right = _left(own[rows, low, torch.minimum(count[:, None], high)], low < count[:, None])
        if entry[2] > misses.unit:
            sides = [(int(from_left.argmin()), keys, from_left.min()), (0, int(from_right.argmin()), from_right.min())]
            entry = min([entry, *sides], key=lambda one: float(one[2]))
        kept.append((count[:-1] >= entry[0]) & (count[:-1] < entry[1]))
        left += float(entry[2]) / len(squares)
    padding = torch.stack(kept)
    return None if bool(padding.all()) else padding, left


def _left(squares: Tensor, sees: Tensor) -> Tensor:
    """Mean over the rows that see a key; all of it where none does."""
    counted = squares.clamp(max=1.0).masked_fill(~sees, 0.0).sum(-1)
    some = sees.expand(squares.shape).sum(-1)
    return torch.where(some > 0, counted / some.clamp_min(1), torch.ones_like(counted)) + (some == 0)


# -- sinks, and numbers for hidden keys --------------------------------------------------------------------------------


def sinks_of(call: Recorded, formula: Formula) -> Iterator[Formula]:
    """The formula with the sinks that the lengths of the outputs tell: of 0, where they are near, first."""
    some, here = call.tried(replace(formula, sinks=None), every_head=True)
    output, lse = attend(some.query, some.key, some.value, here)
    there = some.output.double()
    share = (there * output).sum(-1) / output.square().sum(-1).clamp_min(1e-30)
    known = (share > 0) & (share < 1) & torch.isfinite(lse)
    if not bool(known.any(-1).any(0).all()):
        return
    safe = torch.where(known, share, 0.5)
    sinks = torch.where(known, lse + ((1 - safe) / safe).log(), 0.0)
    weight = torch.where(known, (1 - safe).square() * output.square().sum(-1), 0.0)  # the finer the more it takes
    sinks = (sinks * weight).sum((0, 2)) / weight.sum((0, 2)).clamp_min(1e-300)
    if float(sinks.abs().max()) < 0.1:
        yield replace(formula, sinks=torch.zeros_like(sinks))
    yield replace(formula, sinks=sinks)


def fills_of(call: Recorded, formula: Formula) -> Iterator[Formula]:
    """The formula with the number in place of hidden logits, or added to them, that the outputs tell."""
    if formula.visible is None or bool(formula.visible.all()):
        return
    some, here = call.tried(formula)
    key, value = (spread(x, some.query.shape[1]).double() for x in (some.key, some.value))
    z = logits(some.query, key, replace(here, visible=None, logits_dtype=None))
    visible = here.visible.expand(z.shape) if here.visible is not None else torch.ones_like(z, dtype=torch.bool)
    seen = visible.any(-1) & ~visible.all(-1)
    top = z.masked_fill(~visible, -math.inf).amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    e = (z - top).exp()
    there = some.output.double().nan_to_num()
    by_sinks = 0.0 if here.sinks is None else (here.sinks.double()[:, None, None] - top).exp()
    left = (e * visible) @ value - there * ((e * visible).sum(-1, keepdim=True) + by_sinks)
    for added in (False, True):
        other = (e if added else (-top).exp().expand(z.shape)) * ~visible
        slope = there * other.sum(-1, keepdim=True) - other @ value
        slope, wanted = slope * seen[..., None], left * seen[..., None]
        ratio = float((slope * wanted).sum() / slope.square().sum().clamp_min(1e-300))
        if ratio > 0:
            fill = math.log(ratio)
            chosen = float(f"{fill:.{FEWEST}g}")
            near = abs(chosen - fill) <= NEAR * torch.finfo(some.output.dtype).eps ** 0.5 * abs(fill)
            yield replace(formula, fill=chosen if near else fill, fill_by=1.0, fill_added=added)
