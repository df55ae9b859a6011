"""Recognises rounded weights by their values alone: the format, and what shares a scale.

A rounded weight is s c + o, with a code c of few values and a scale s that a tensor, a row, a group or a block shares.
Of integers the codes are evenly spaced, so all differences within a group are multiples of one step; nf4 and fp4 have
16 codes of their own; fp8 has those of its dtype. Each format is tried for each way of sharing, the largest first. A
group of m numbers fits by chance with a probability below the product of their tolerances in steps; that must be tiny.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from sqrtdk.compare.rounding.precision import rounding_unit, stored_in
from sqrtdk.compare.weights.grids import (
    CODES,
    FLOATS,
    PER_COLUMN,
    PER_ROW,
    PER_TENSOR,
    Grid,
    Sharing,
    nearest_codes,
    sharing_by,
)

_GROUPS = (256, 128, 64, 32, 16)  # entries of a row that share a scale
_DOWN = (128, 64, 32)  # entries of a column
_BLOCK = 128
_LEAST_IN_GROUP = 8
_MOST_GROUPS, _MOST_ENTRIES = 2**6, 2**7  # that are looked at
_ROUNDINGS_OFF = 4.0  # roundings of a number over the largest
_FINE = 2.0**-11  # coarser numbers show no offsets
_TOLERANCE = 2.0**-8  # of a step, beside the rounding of the values
_BY_CHANCE, _BY_CHANCE_OF_MANY = 1e-6, 1e-3  # a format that fits a group by chance with more probability is none
_MANY = 16  # groups, which all must fit
_GROUPS_AT_FIRST = 4  # groups that are looked at first
_FITTING = 0.995  # share of the groups; the rest may have few values
_MOST_LEVELS = 255


def sharings(matrix: Tensor) -> Iterator[Sharing]:
    """Yield the ways in which entries of a matrix may share a scale, the largest groups first."""
    rows, columns = matrix.shape
    yield PER_TENSOR
    if rows % _BLOCK == 0 and columns % _BLOCK == 0 and rows * columns > _BLOCK**2:
        yield Sharing(f"blocks of {_BLOCK}", _BLOCK, _BLOCK)
    yield PER_ROW
    yield PER_COLUMN
    for size in _GROUPS:
        if matrix.numel() % size == 0 and size != columns:
            yield sharing_by(size)
    for size in _DOWN:
        if rows % size == 0 and size != rows:
            yield sharing_by(size, down=True)
            yield sharing_by(size, apart=True)


def grid_of(matrix: Tensor, first: Sequence[Sharing] = (), *, alone: bool = False) -> Grid | None:
    """Return the grid of a rounded matrix, or None.

    Args:
        matrix: (out, in), as dequantised.
        first: Ways of sharing that are tried before the others, such as those of other layers.
        alone: Whether no others are tried.

    Example:
        >>> x = torch.randn(8, 64)
        >>> step = x.abs().amax(-1, keepdim=True) / 127
        >>> grid_of((x / step).round() * step).name, grid_of(x)
        ('int8, a scale a row', None)
    """
    matrix = matrix.detach().float()
    if matrix.dim() != 2 or matrix.numel() < _MOST_LEVELS or not bool(matrix.isfinite().all()):
        return None
    unit = rounding_unit(stored_in(matrix, torch.float32) or torch.float32)
    every = list(sharings(matrix))
    for sharing in dict.fromkeys([*(one for one in first if one in every), *([] if alone else every)]):
        groups = _some(sharing.groups(matrix))
        if groups.shape[1] < _LEAST_IN_GROUP:
            continue
        for form, codes in CODES.items():
            if _is_coded(groups, codes, unit):
                return Grid(form, sharing)
        if (found := _integers(groups, unit)) is not None:
            return Grid(found[0], sharing, found[1])
        for form, dtype in FLOATS.items():
            if _is_float(groups, dtype, unit):
                return Grid(form, sharing)
    return None


def _some(groups: Tensor) -> Tensor:
    groups = groups[:: max(1, groups.shape[0] // _MOST_GROUPS)]
    if groups.shape[1] <= _MOST_ENTRIES:
        return groups
    # the extremes set the scale
    ends = torch.stack([groups.amax(1), groups.amin(1)], 1)
    return torch.cat([ends, groups[:, :: groups.shape[1] // _MOST_ENTRIES | 1]], 1)


def _is_coded(groups: Tensor, codes: tuple[float, ...], unit: float) -> bool:
    most = groups.abs().amax(1, keepdim=True)
    shares = (groups / most.clamp(min=1e-30)).double()
    nearest, places = nearest_codes(shares, codes)
    tolerance = 2.0**-12 + 2 * unit
    fits = ((shares - nearest).abs() <= tolerance).all(1)
    # numbers of 2 bits are among the codes of 4
    return _most_fit(fits) and len(torch.unique(places)) > len(codes) // 2 and len(codes) * 2 * tolerance < 0.5


def _integers(groups: Tensor, unit: float) -> tuple[str, str] | None:
    most = groups.abs().amax(1).double()
    levels = _levels_of_all(groups.double(), most, unit)
    if levels is not None:
        step, good = most / levels, levels > 0
        return _named(groups[good].double() / step[good][:, None])
    # the float zero of HQQ, the minimum of Q4_1: no code is 0
    low = groups.amin(1).double()
    shifted = groups.double() - low[:, None]
    if unit > _FINE:
        return None
    larger = float((most / shifted.amax(1).clamp(min=1e-30)).amax())
    levels = _levels_of_all(shifted, shifted.amax(1), unit * larger)
    if levels is None:
        return None
    return f"int{_bits(int(levels.amax()))}", "offsets"


def _named(codes: Tensor) -> tuple[str, str]:
    """Return format and kind of zero by the codes of all groups, of which 0 is one."""
    low, high = codes.amin(1).round(), codes.amax(1).round()
    bits = _bits(int((high - low).amax()))
    half = 2 ** (bits - 1)
    largest = torch.maximum(-low, high)
    if bool((largest > half).any()):
        return f"int{bits}", "zero points"
    # the scale of Q4_0 may be negative: its codes reach 8 or -8, whichever is the largest number
    if not bool((high == half).any()):
        return f"int{bits}", ""
    return f"int{bits}", "signed scales" if _most_fit(largest == half) and len(high) > 1 else "zero points"


def _bits(span: int) -> int:
    return next((known for known in (2, 3, 4, 5, 6, 8) if span < 2**known), 8)


def _levels_of_all(groups: Tensor, most: Tensor, unit: float) -> Tensor | None:
    """Return the levels of all groups, some 0; None if too many have none. A few groups turn most matrices away."""
    some = len(groups) if len(groups) < 2 * _GROUPS_AT_FIRST else _GROUPS_AT_FIRST
    levels = levels_of(groups[:some], most[:some], unit, len(groups))
    if some < len(groups) and bool((levels > 0).any()):
        levels = levels_of(groups, most, unit, len(groups))
    return levels if len(levels) == len(groups) and _most_fit(levels > 0) else None


def levels_of(groups: Tensor, most: Tensor, unit: float, count: int) -> Tensor:
    """Return the smallest number of steps up to the largest number of each group that puts all of it on a grid.

    Args:
        groups: (groups, entries), float64.
        most: (groups,), the largest size of each.
        unit: Relative rounding of the numbers.
        count: Number of groups that must fit.

    Returns:
        (groups,): 1 to 255; 0 where none does, or where one would by chance.
    """
    shares = groups / most.clamp(min=1e-300)[:, None]
    distinct = (shares.sort(1)[0].diff(dim=1) > 0).sum(1, keepdim=True)
    # each value counts once, however often it occurs
    weight = (distinct / groups.shape[1]).clamp(max=1.0)
    found = torch.zeros(len(groups), dtype=torch.long)
    most_chance = math.log(_BY_CHANCE_OF_MANY if count >= _MANY else _BY_CHANCE)
    for steps in range(1, _MOST_LEVELS + 1):
        whole = shares * steps
        tolerance = _TOLERANCE + _ROUNDINGS_OFF * unit * whole.abs()
        fits = ((whole - whole.round()).abs() <= tolerance).all(1)
        if not bool(fits.any()):
            continue
        by_chance = ((2 * tolerance).clamp(max=1.0).log() * weight).sum(1) + math.log(steps)
        found = torch.where((found == 0) & fits & (by_chance < most_chance), steps, found)
    return found


def _is_float(groups: Tensor, dtype: torch.dtype, unit: float) -> bool:
    most = groups.abs().amax(1, keepdim=True)
    largest = torch.finfo(dtype).max
    mantissa = 3 if dtype == torch.float8_e4m3fn else 2
    distinct = min(len(torch.unique(group)) for group in groups)
    if distinct < _LEAST_IN_GROUP:
        return False
    for code in range(2**mantissa, 2 ** (mantissa + 1)):
        top = code / 2**mantissa * 2 ** math.floor(math.log2(largest))
        if top > largest:
            continue
        shares = (groups / most.clamp(min=1e-30) * top).double()
        off = (shares.float().to(dtype).double() - shares).abs()
        if _most_fit((off <= (2.0**-12 + 4 * unit) * shares.abs() + 1e-9).all(1)):
            return True
    return False


def _most_fit(fits: Tensor) -> bool:
    return bool(fits.float().mean() >= _FITTING)
