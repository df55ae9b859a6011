"""What the rows of an attention reveal by themselves: the keys they see, the share of a sink, the fill of hidden keys.

Let e_j = exp(z_j) for an assumed scale, softcap and bias. The output o of a row that sees keys lo to hi - 1 satisfies
sum_j e_j (v_j - o) = 0 over these keys. Differences of prefix sums give that sum for all lo and hi at once, so no band
has to be guessed. With a sink, o is a share c < 1 of the same average, and the sink is lse + log((1 - c) / c). If
hidden keys have a number x in place of e, then o (D + x Dh) = N + x Nh, which is linear in x.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from sqrtdk.compare.infer.evidence import ROW_MASKS, Recorded, SearchWork, evenly
from sqrtdk.compare.inside.compute import compute_logits, compute_output, parts_of, repeat_heads
from sqrtdk.compare.inside.program import Formula
from sqrtdk.masks.band import band_mask

MOST_INTERVALS = 2**21  # (lo, hi) intervals that are examined for one formula, unless the fewest rows have more
MOST_KEYS = 1024  # beyond this the intervals of a single row take too much memory
# batch entries, heads, rows, and the fewest rows: few to rank the assumptions, many to find the mask
FEW, MANY = (2, 2, 5, 2), (8, 4, 24, 4)
RANKING_SHARE = 0.5  # share of the work left that ranking may take: the mask of the best has to be found as well
MOST_ASSUMPTIONS = 3  # assumptions that are kept
MOST_BOUNDS = 3  # bounds that are tried
CANCELLATION_ERROR = 1e-15  # rounding of float64 sums that cancel, relative
MOST_SHARE = 1.001  # upper limit of a share: a sink leaves less than 1 of the average, and rounding adds a little
EQUAL_FIT_ROUNDINGS = 8.0  # roundings of the output within which a longer interval fits as well as the best one
FILL_ACCURACY = 0.1  # relative, in units of sqrt(eps): the accuracy to which an output shows a fill
MOST_FILL_DIGITS = 3  # digits of a fill that was chosen by hand, for example -10000 or -5.25


@dataclass(frozen=True, slots=True, eq=False)
class _Misses:
    """Squared relative misfit of every interval of keys, (B, r, S + 1, S + 1) by (lo, hi), over all heads.

    Attributes:
        index: indices of the rows.
        plain: misfit without sinks.
        sunk: misfit with the best possible sinks.
        unit: square of the misfit that rounding of the output causes.
    """

    index: Tensor
    plain: Tensor
    sunk: Tensor
    unit: float


def formulas_from_rows(
    call: Recorded, supposed: Sequence[Formula], *, masked: bool, sunk: bool, work: SearchWork | None = None
) -> Iterator[Formula]:
    """Yield formulas with the mask, and the sinks, that the rows reveal.

    Args:
        call: the recorded tensors.
        supposed: formulas that provide scale, softcap and bias. The best `MOST_ASSUMPTIONS` are kept: those under
            which each row is closest to an average over some interval of keys.
        masked: whether the mask is known; then that of the formulas is kept.
        sunk: whether the sinks are known; then those of the formulas are kept.
        work: what may be computed; None bounds nothing.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 12, 16, generator=torch.Generator().manual_seed(0))
        >>> visible = band_mask(12, 12, 1, 4)
        >>> call = Recorded(q, k, v, compute_output(q, k, v, Formula(0.25, visible=visible))[0].float(), None)
        >>> found = next(formulas_from_rows(call, [Formula(1.0), Formula(0.25)], masked=False, sunk=False))
        >>> found.scale, torch.equal(found.visible[0, 0], visible)
        (0.25, True)
    """
    work = work or SearchWork()
    if masked or not call.sizes.rows or (call.sizes.keys > MOST_KEYS and work.leaves_out(ROW_MASKS)):
        yield from (found for formula in supposed[:MOST_ASSUMPTIONS] for found in _sunk(call, formula, sunk))
        return
    for sinks, ranked in zip((False,) if sunk else (False, True), _ranked(call, supposed, work)):  # noqa: B905
        for formula in ranked[:MOST_ASSUMPTIONS]:
            if not work.takes(_Chosen.of(call, *MANY).cost, ROW_MASKS):
                return
            for visible in _masks(call, formula, sinks):
                found = replace(formula, visible=visible, mask=formula.mask or "mask")
                yield from _sunk(call, found, known=False) if sinks else (found,)


def _sunk(call: Recorded, formula: Formula, known: bool) -> Iterator[Formula]:
    yield formula
    if not known:
        yield from sinks_of(call, formula)


def _ranked(call: Recorded, supposed: Sequence[Formula], work: SearchWork) -> Iterator[list[Formula]]:
    """Yield the assumed formulas, best fit first: ranked without sinks, then with sinks."""
    scores: list[tuple[float, float]] = []
    cost, most = _Chosen.of(call, *FEW).cost, RANKING_SHARE * work.left
    for number, formula in enumerate(supposed, 1):
        if (number * cost > most and work.leaves_out(ROW_MASKS)) or not work.takes(cost, ROW_MASKS):
            break
        # Only the smallest misfit of each row is kept: the intervals of all formulas together would not fit in memory.
        rows = _of_rows(call, formula, _Chosen.of(call, *FEW))
        best = [[x.flatten(1).amin(-1).clamp(max=1.0) for x in both] for both in rows]
        plain, sunk = (float(torch.stack(column).mean()) for column in zip(*best, strict=True))
        scores.append((plain, sunk))
    for which in (0, 1):
        yield [supposed[place] for place in sorted(range(len(scores)), key=lambda place: scores[place][which])]


@dataclass(frozen=True, slots=True, eq=False)
class _Chosen:
    """The batch entries, heads and rows whose intervals are examined.

    The last rows are among them: causal masks show them the most keys.
    """

    entries: int
    heads: Tensor
    rows: Tensor
    cost: int

    @classmethod
    def of(cls, call: Recorded, entries: int, heads: int, rows: int, fewest: int) -> _Chosen:
        """Chooses as many as the budget allows, and at least the fewest rows of one head."""
        sizes = call.sizes
        each = (sizes.keys + 1) ** 2
        entries = max(1, min(entries, sizes.batch, MOST_INTERVALS // (fewest * each)))
        room = MOST_INTERVALS // (entries * each)
        of_heads = evenly(0, sizes.heads, max(1, min(heads, room // fewest)))
        index = evenly(min(1, sizes.rows - 1), sizes.rows, max(fewest, min(rows, room // len(of_heads))))
        return cls(entries, of_heads, index, entries * len(of_heads) * len(index) * each)


def _misses(call: Recorded, formula: Formula) -> _Misses:
    """Return misfits for as many rows as fit the budget."""
    chosen = _Chosen.of(call, *MANY)
    plain, sunk = zip(*_of_rows(call, formula, chosen), strict=True)
    unit = (EQUAL_FIT_ROUNDINGS * max(torch.finfo(call.output.dtype).eps, torch.finfo(torch.float32).eps)) ** 2
    return _Misses(chosen.rows, torch.stack(plain, 1), torch.stack(sunk, 1), unit)


def _of_rows(call: Recorded, formula: Formula, chosen: _Chosen) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each chosen row the misfits without and with sinks, (B, S + 1, S + 1), means over heads."""
    bare = replace(formula, visible=None, sinks=None, kept=None, logits_dtype=None, weights_dtype=None)
    some, bare = call.part(bare, chosen.heads, chosen.rows)
    bare = parts_of(bare, lambda part: part[: chosen.entries] if part.ndim == 4 else part)
    key, value = (repeat_heads(x[: chosen.entries], len(chosen.heads)) for x in (some.key, some.value))
    z = compute_logits(some.query[: chosen.entries], key, bare)
    e = (z - z.amax(-1, keepdim=True)).exp()
    output = some.output[: chosen.entries].double().nan_to_num()
    backward = band_mask(key.shape[-2] + 1, key.shape[-2] + 1, 0, None)
    for row in range(len(chosen.rows)):  # one at a time: its intervals stay in the processor's cache
        yield _of_row(e[:, :, row], value, output[:, :, row], backward)


def _of_row(e: Tensor, value: Tensor, output: Tensor, backward: Tensor) -> tuple[Tensor, Tensor]:
    """Return the misfits of one row: e (B, H, S), value (B, H, S, Ev), output (B, H, Ev)."""
    apart = value.double() - output[..., None, :]
    sums = _prefix((e[..., None] * apart).mT).mT
    gram = sums @ sums.mT
    size = gram.diagonal(dim1=-2, dim2=-1)
    # the last two axes are (lo, hi) from here on
    ends = size[..., None, :] + size[..., :, None]
    total = _prefix(e)
    weight = total[..., None, :] - total[..., :, None]
    square = gram.mul_(-2.0).add_(ends).clamp_min_(0.0).add_(ends, alpha=CANCELLATION_ERROR)
    length = output.square().sum(-1)[..., None, None].clamp_min(1e-30)
    along = (sums @ output[..., None])[..., 0]
    across = along[..., None, :] - along[..., :, None]
    backward = backward | (weight <= 0)
    weighted = length * weight
    whole = square + (2 * across).add_(weighted).mul_(weight)
    plain = square / weighted.mul_(weight)
    # Best scaling of o by a sink: project the interval's average onto o, and keep only what is orthogonal to it.
    share = (across + length * weight).mul_(weight).div_(whole)
    sunk = (length * square).sub_(across.square_()).clamp_min_(0.0).div_(whole.mul_(length))
    sunk = sunk.masked_fill_((share <= 0) | (share > MOST_SHARE), 4.0)
    plain, sunk = (
        x.masked_fill_(backward, math.inf).nan_to_num_(nan=math.inf, posinf=math.inf).mean(1) for x in (plain, sunk)
    )
    return plain, sunk


def _prefix(values: Tensor) -> Tensor:
    return torch.nn.functional.pad(values.cumsum(-1), (1, 0))


# -- the mask ----------------------------------------------------------------------------------------------------------


def _masks(call: Recorded, formula: Formula, sinks: bool) -> Iterator[Tensor | None]:
    """Yield the two bands, with padding at either end, that fit the rows best."""
    sizes = call.sizes
    misses = _misses(call, formula)
    squares = misses.sunk if sinks else misses.plain
    found = []
    for least, greatest in product(*_bounds(misses, squares, sizes.keys)):
        padding, left = _padding(misses, squares, least, greatest, sizes.keys)
        # Among fits within rounding the mask with the fewest parts wins.
        moved = (least is not None) + (greatest is not None) + (padding is not None)
        found.append((left > misses.unit, left if left > misses.unit else 0.0, moved, least, greatest, padding))
    for *_, least, greatest, padding in sorted(found, key=lambda entry: entry[:3])[:2]:
        visible = band_mask(sizes.rows, sizes.keys, least, greatest)[None, None]
        if padding is not None:
            visible = visible & (padding if padding.shape[0] == sizes.batch else padding[:1])[:, None, None]
        yield None if bool(visible.all()) else visible


def _bounds(misses: _Misses, squares: Tensor, keys: int) -> tuple[list[int | None], list[int | None]]:
    """Return the lower and upper bounds of i - j that most rows vote for, and None for no bound."""
    lows: Counter[int] = Counter()
    highs: Counter[int] = Counter()
    for row, i in zip(squares.transpose(0, 1), misses.index.tolist(), strict=True):
        for one in row:
            # Two votes a row: the longest interval within rounding, and the best one.
            near = one <= max(4 * float(one.min()), misses.unit)
            for lo, hi in {_longest(near), _longest(one == one.min())}:
                lows.update([i - hi + 1] if hi < keys else [])
                highs.update([i - lo] if lo > 0 else [])
    usual = (
        [bound for bound, _ in lows.most_common(MOST_BOUNDS)],
        [bound for bound, _ in highs.most_common(MOST_BOUNDS)],
    )
    return [None, *usual[0]], [None, *usual[1]]


def _longest(near: Tensor) -> tuple[int, int]:
    pairs = torch.nonzero(near)
    lo, hi = pairs[(pairs[:, 1] - pairs[:, 0]).argmax()].tolist() if len(pairs) else (0, near.shape[-1] - 1)
    return lo, hi


def _padding(
    misses: _Misses, squares: Tensor, least: int | None, greatest: int | None, keys: int
) -> tuple[Tensor | None, float]:
    """Return True at keys that aren't padding at one end, (B, S), given the band, and the misfit that remains."""
    index = misses.index
    low = torch.zeros_like(index) if greatest is None else (index - greatest).clamp(0, keys)
    high = torch.full_like(index, keys) if least is None else (index - least + 1).clamp(0, keys)
    count, rows = torch.arange(keys + 1), torch.arange(len(index))
    kept, left = [], 0.0
    for own in squares:
        entry = (0, keys, _mean_misfit(own[rows, low, high], low < high))
        from_left = _mean_misfit(own[rows, torch.maximum(count[:, None], low), high], count[:, None] < high)
        from_right = _mean_misfit(own[rows, low, torch.minimum(count[:, None], high)], low < count[:, None])
        if entry[2] > misses.unit:
            sides = [(int(from_left.argmin()), keys, from_left.min()), (0, int(from_right.argmin()), from_right.min())]
            entry = min([entry, *sides], key=lambda one: float(one[2]))
        kept.append((count[:-1] >= entry[0]) & (count[:-1] < entry[1]))
        left += float(entry[2]) / len(squares)
    padding = torch.stack(kept)
    return None if bool(padding.all()) else padding, left


def _mean_misfit(squares: Tensor, sees: Tensor) -> Tensor:
    """Return the mean over the rows that see a key; more than any misfit if no row does."""
    counted = squares.clamp(max=1.0).masked_fill(~sees, 0.0).sum(-1)
    some = sees.expand(squares.shape).sum(-1)
    return torch.where(some > 0, counted / some.clamp_min(1), torch.ones_like(counted)) + (some == 0)


# -- sinks, and numbers for hidden keys --------------------------------------------------------------------------------


def sinks_of(call: Recorded, formula: Formula) -> Iterator[Formula]:
    """Yield the formula with the sinks that the lengths of the recorded outputs show.

    If all of them are within 0.1 of 0, the formula with sinks of exactly 0 comes first. Nothing is yielded if some head
    shows no sink.

    Args:
        call: the recorded tensors.
        formula: formula that is right but for its sinks.
    """
    some, here = call.tried(replace(formula, sinks=None), every_head=True)
    output, lse = compute_output(some.query, some.key, some.value, here)
    there = some.output.double()
    share = (there * output).sum(-1) / output.square().sum(-1).clamp_min(1e-30)
    known = (share > 0) & (share < 1) & torch.isfinite(lse)
    if not bool(known.any(-1).any(0).all()):
        return
    safe = torch.where(known, share, 0.5)
    sinks = torch.where(known, lse + ((1 - safe) / safe).log(), 0.0)
    # a row that gives the sink more weight determines it better
    weight = torch.where(known, (1 - safe).square() * output.square().sum(-1), 0.0)
    sinks = (sinks * weight).sum((0, 2)) / weight.sum((0, 2)).clamp_min(1e-300)
    if float(sinks.abs().max()) < 0.1:  # softmax "off by one" has sinks of exactly 0
        yield replace(formula, sinks=torch.zeros_like(sinks))
    yield replace(formula, sinks=sinks)


def fills_of(call: Recorded, formula: Formula) -> Iterator[Formula]:
    """Yield the formula with the number for hidden keys that the recorded outputs show.

    The number first replaces hidden logits, then is added to them. Nothing is yielded if the formula hides no key.

    Args:
        call: the recorded tensors.
        formula: formula that is right but for its fill.
    """
    if formula.visible is None or bool(formula.visible.all()):
        return
    some, here = call.tried(formula)
    key, value = (repeat_heads(x, some.query.shape[1]).double() for x in (some.key, some.value))
    z = compute_logits(some.query, key, replace(here, visible=None, logits_dtype=None))
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
            # `masked_fill(mask, -10000)` was typed by hand: a number of few digits that is close enough is preferred.
            chosen = float(f"{fill:.{MOST_FILL_DIGITS}g}")
            near = abs(chosen - fill) <= FILL_ACCURACY * torch.finfo(some.output.dtype).eps ** 0.5 * abs(fill)
            yield replace(formula, fill=chosen if near else fill, fill_by=1.0, fill_added=added)
