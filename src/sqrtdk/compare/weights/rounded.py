"""Holds rounded weights against A's: right but for half a step, or with a mistake that is tried on A's numbers.

What is right is nearest to A's number on B's grid, or, with the error feedback of GPTQ, within a step. Mistakes are
made of A's own codes, q = a / s + z, on the grid of the other weights, with s from the largest number of each group:

    zero point   b = s q, or s (q - 8)     scales   b = s' (q - z), with s' of another weight, row or group
    factor       b = c s (q - z)           axis     s along the other axis
    signs        codes wrap                order    codes of a byte exchanged, or as AWQ packs them
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.weights.grids import CODES, PER_ROW, Grid, Sharing
from sqrtdk.compare.weights.recognised import grid_of

_NEAREST_STEPS = 0.34  # steps: the root mean square of rounding to nearest is 0.29
_FEEDBACK = 0.8  # steps: error feedback moves more, but not all of a group one way
_ONE_WAY = 0.5
_UNBIASED = 0.03  # of the slope of B's numbers on A's
_LIKE = 0.25  # of a step, that a mistake which is tried leaves: one code in 16 may be another
_FP8_STEP = 2.0**-3  # of a number, between two of e4m3
_BLIND = 3  # matrices without a grid, after which no other ways of sharing are tried than those that were met
_CODE_ORDERS = {
    "exchanged": (1, 0, 3, 2, 5, 4, 7, 6),
    "awq": (0, 2, 4, 6, 1, 3, 5, 7),
    "awq back": (0, 4, 1, 5, 2, 6, 3, 7),
    "reversed": (7, 6, 5, 4, 3, 2, 1, 0),
}


@dataclass(frozen=True, slots=True, eq=False)
class FoundRounding:
    """What a weight of B is, beside A's.

    Attributes:
        grid: B's grid, or, of a mistake that left none, that of the other weights.
        fault: "" if it is right.
        steps: Root mean square of the difference, in steps; of nf4 and fp8 in steps at the size of the number.
        size: The same as a share of A's numbers.
        factor: c of a factor.
        other: Name of the weight whose scales it has.
    """

    grid: Grid
    fault: str = ""
    steps: float = 0.0
    size: float = 0.0
    factor: float | None = None
    other: str = ""


def found_roundings(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> dict[str, FoundRounding]:
    """Return the weights of B that are A's rounded, with what is wrong with them.

    Args:
        a: A's matrices (out, in), by name.
        b: B's, those that differ from A's.
    """
    grids: dict[str, Grid | None] = {}
    known: list[Sharing] = []  # the latest first
    missed = 0
    for name, matrix in b.items():
        if missed >= _BLIND and not known:
            return {}
        grid = grids[name] = grid_of(matrix, known, alone=missed >= _BLIND)
        if grid is None:
            missed += 1
        else:
            known = [grid.sharing, *(one for one in known if one != grid.sharing)]
    found: dict[str, FoundRounding] = {}
    for name, grid in grids.items():
        if grid is not None and (right := _right(a[name], b[name], grid)) is not None:
            found[name] = right
    usual = _usual([one.grid for one in found.values()] or [grid for grid in grids.values() if grid is not None])
    for name, grid in grids.items():
        if name in found:
            continue
        for kind in dict.fromkeys(filter(None, (grid, *usual))):
            if (wrong := _wrong(name, a, b[name], kind)) is not None:
                found[name] = wrong
                break
    if len(found) < 2 and all(one.fault for one in found.values()):
        return {}
    sizes = {(one.grid.form, one.grid.zero, one.grid.sharing.columns): one.grid for one in found.values()}
    for name, one in found.items():
        # groups of 64 in a row of 64 are those of the other layers, whose rows are longer
        grouped = sizes.get((one.grid.form, one.grid.zero, a[name].shape[1]))
        if one.grid.sharing == PER_ROW and grouped is not None:
            found[name] = replace(one, grid=grouped)
    return found


def _usual(grids: list[Grid]) -> list[Grid]:
    return sorted(dict.fromkeys(grids), key=grids.count, reverse=True)


# -- right -------------------------------------------------------------------------------------------------------------


def _right(a: Tensor, b: Tensor, grid: Grid) -> FoundRounding | None:
    a, b = a.double(), b.double()
    off = b - a
    steps = _steps(a, b, grid)
    each = grid.sharing.groups(off / steps).square().mean(1).sqrt()
    all_of_it = float((off / steps).square().mean().sqrt())
    slope = float((a * b).sum() / a.square().sum().clamp(min=1e-300))
    few = math.sqrt(1 + 4 / max(1, grid.sharing.groups(off).shape[1]))  # a group of 16 scatters
    most = _NEAREST_STEPS if all_of_it <= _NEAREST_STEPS else _FEEDBACK
    one_way = float(grid.sharing.groups(off / steps).mean(1).abs().max())
    if (
        all_of_it > most
        or one_way > _ONE_WAY
        or abs(slope - 1) > _UNBIASED + _slope_lost(grid)
        or float(each.max()) > 2 * most * few
    ):
        return None
    return FoundRounding(grid, "", all_of_it, float(off.norm() / a.norm().clamp(min=1e-300)))


def _slope_lost(grid: Grid) -> float:
    """Codes of 2 and 3 bits shrink numbers near 0."""
    return 0.15 if grid.bits in (2, 3) else 0.0


def _steps(a: Tensor, b: Tensor, grid: Grid) -> Tensor:
    """Return the step at each entry of the matrix: of integers that of its group, of codes the gap around it."""
    if grid.form in CODES:
        table = torch.tensor(CODES[grid.form], dtype=torch.float64)
        most = grid.sharing.spread(grid.sharing.groups(b).abs().amax(1, keepdim=True), b)
        place = torch.searchsorted(table, (a / most.clamp(min=1e-300)).clamp(-1, 1).contiguous())
        place = place.clamp(1, len(table) - 1)
        return ((table[place] - table[place - 1]) * most).clamp(min=1e-300)
    if not grid.bits:
        most = grid.sharing.spread(grid.sharing.groups(b).abs().amax(1, keepdim=True), b)
        whole = torch.exp2(torch.floor(torch.log2(torch.maximum(a.abs(), b.abs()).clamp(min=1e-300))))
        return (whole * _FP8_STEP).clamp(min=2.0**-18 * most.clamp(min=1e-300))
    groups = grid.sharing.groups(a)
    return grid.sharing.spread(grid.scales(groups)[0].abs(), a).clamp(min=1e-300)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def _wrong(name: str, every: Mapping[str, Tensor], b: Tensor, grid: Grid) -> FoundRounding | None:
    a, b = every[name].double(), b.double()
    try:
        groups = grid.sharing.groups(a)
    except RuntimeError:  # sizes that are no multiples of the group
        return None
    off = float((b - a).norm() / a.norm().clamp(min=1e-300))
    if groups.shape[1] < 2:
        return None
    for fault, tried, factor, other in _tries(name, every, a, b, grid, groups):
        if _fits(tried, a, b, grid):
            return FoundRounding(grid, fault, 0.0, off, factor, other)
    return None


Tried = tuple[str, Tensor, float | None, str]


def _tries(name: str, every: Mapping[str, Tensor], a: Tensor, b: Tensor, grid: Grid, groups: Tensor) -> Iterator[Tried]:
    """Yield what B would be by each mistake, by A's own codes and scales."""
    for scales in grid.scales(groups):
        codes, zero = grid.codes(groups, scales)
        spread: Callable[[Tensor], Tensor] = lambda numbers: grid.sharing.spread(numbers, a)  # noqa: E731
        shares = grid.sharing.matrix(codes - zero, a)
        right = shares * spread(scales)
        c = float((right * b).sum() / right.square().sum().clamp(min=1e-300))
        if abs(c - 1) > _UNBIASED and abs(c) > _UNBIASED:
            yield "factor", c * right, c, ""
        half = 2.0 ** (grid.bits - 1)
        if grid.zero in ("zero points", "offsets"):
            for middle in (0.0, half):
                yield "zero_point", grid.sharing.matrix((codes - middle) * scales, a), None, ""
        elif grid.bits:
            yield "signs", torch.where(shares < 0, shares + half, shares - half) * spread(scales), None, ""
        for other, matrix in every.items():
            if other != name and matrix.shape == a.shape:
                its = grid.scales(grid.sharing.groups(matrix.double()))[0]
                yield "scales", shares * spread(its), None, other
        if len(scales) > 1 and grid.sharing.rows == 1:
            yield from _moved_scales(name, shares, scales, a, grid)
        for permutation in _CODE_ORDERS.values():
            if a.shape[1] % 8 == 0:
                turned = right.view(a.shape[0], -1, 8)[..., list(permutation)].reshape(a.shape)
                yield "order", turned, None, ""


def _moved_scales(name: str, shares: Tensor, scales: Tensor, a: Tensor, grid: Grid) -> Iterator[Tried]:
    if scales.numel() % a.shape[0]:
        return
    rows = scales.view(a.shape[0], -1)
    for order in (rows.flip(0), rows.flip(1), rows.roll(1, 0), rows.roll(-1, 0)):
        if not torch.equal(order, rows):
            yield "scales", shares * grid.sharing.spread(order.reshape(-1, 1), a), None, name
    # stored (in / g, out) and read as (out, in / g)
    yield "axis", shares * grid.sharing.spread(rows.mT.reshape(-1, 1), a), None, ""
    if a.shape[0] == a.shape[1]:
        yield "axis", shares * grid.sharing.spread(scales, a).mT, None, ""


def _fits(tried: Tensor, a: Tensor, b: Tensor, grid: Grid) -> bool:
    """Return whether a mistake gives B's numbers but for a code here and there, and A's right ones do not."""
    left, without = float((b - tried).norm()), float((b - a).norm())
    return left < without / 3 and left < _LIKE * _rms_step(tried, grid) * float(b.norm())


def _rms_step(tried: Tensor, grid: Grid) -> float:
    """Return the root mean square of a step, as a share of the numbers."""
    if not grid.bits:
        return 0.35 if grid.form in CODES else _FP8_STEP
    steps = grid.sharing.spread(grid.scales(grid.sharing.groups(tried))[0], tried)
    return float(steps.norm() / tried.norm().clamp(min=1e-300))
