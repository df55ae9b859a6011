"""Which blocks of pairs mask_mods show whole, in part or not at all, from their operations.

A block has `SIDE` rows and `SIDE` keys. What depends on the row alone, or the key alone, has a least and a greatest
value in it, and so has the difference of two such values; a comparison of them holds for all pairs of a block, for
some, or for none:

    documents[q_idx] == documents[kv_idx]      none, if the greatest of the rows is below the least of the keys
    q_idx - kv_idx < 128                       all, if the greatest row is less than 128 above the least key

This is a proof and not a trial of some pairs. The masks themselves run only in blocks that it leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.impl.program import PairProgram, PairStep, Slot

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

SIDE = 64
LARGEST_BOUND = 2**40  # of integers whose sums and differences can't overflow
_MOST_OPEN_SHARE = 0.5  # part of the open blocks above which all pairs are computed at once
ROW, KEY = 2, 3  # places of q_idx and kv_idx among the arguments
aten = torch.ops.aten


@dataclass(frozen=True, eq=False)
class Bounds:
    """Least and greatest value in each block of a function of row and key, whose values are integers or bools.

    False is less than True.

    Attributes:
        low: Least values, (M, N) or with sizes of 1.
        high: Greatest values, likewise.
    """

    low: Tensor
    high: Tensor


@dataclass(frozen=True, eq=False)
class BlockMask:
    """Masks that are the same in all samples and heads.

    Attributes:
        programs: of the masks; a row must pass all.
        length, keys: L and S.
        some: blocks with pairs that may be seen, (L / SIDE, S / SIDE), rounded up.
        all: blocks whose pairs are all seen.
    """

    programs: tuple[PairProgram, ...]
    length: int
    keys: int
    some: Bool[Tensor, "M N"]
    all: Bool[Tensor, "M N"]

    def reach(self, start: int, stop: int) -> tuple[int, int]:
        """Return which keys the rows start..stop - 1 may see.

        Returns:
            The first of these keys, and the one after the last; (0, 0) if there is none.
        """
        columns = self.some[start // SIDE : -(-stop // SIDE)].any(0).nonzero()
        if not len(columns):
            return 0, 0
        return int(columns[0]) * SIDE, min(self.keys, (int(columns[-1]) + 1) * SIDE)

    def of(self, start: int, stop: int, first: int, last: int) -> Bool[Tensor, "R S"] | None:
        """Return which of the keys first..last - 1 the rows start..stop - 1 see.

        Returns:
            A bool mask, (stop - start, last - first), that is True at visible keys; None if all are visible.
        """
        top, left = start // SIDE, first // SIDE
        at = slice(top, -(-stop // SIDE)), slice(left, -(-last // SIDE))
        some, whole = self.some[at], self.all[at]
        if whole.all():
            return None
        unsure = some & ~whole
        if float(unsure.float().mean()) > _MOST_OPEN_SHARE:
            rows, columns = torch.arange(start, stop).unsqueeze(-1), torch.arange(first, last)
            return self._shown(rows, columns).expand(stop - start, last - first)
        down, across = whole.shape
        mask = whole[:, None, :, None].repeat(1, SIDE, 1, SIDE)
        i, j = unsure.nonzero(as_tuple=True)
        own = torch.arange(SIDE)
        rows = ((top + i) * SIDE).view(-1, 1, 1) + own.view(-1, 1)
        columns = ((left + j) * SIDE).view(-1, 1, 1) + own
        shown = self._shown(rows.clamp(max=self.length - 1), columns.clamp(max=self.keys - 1))
        mask[i, :, j, :] = shown.expand(len(i), SIDE, SIDE)
        rest = slice(start - top * SIDE, stop - top * SIDE), slice(first - left * SIDE, last - left * SIDE)
        return mask.view(down * SIDE, across * SIDE)[rest]

    def _shown(self, rows: Int[Tensor, "..."], columns: Int[Tensor, "..."]) -> Bool[Tensor, "..."]:
        zero = torch.zeros((1,) * rows.ndim, dtype=torch.int64)
        shown = self.programs[0](zero, zero, rows, columns)
        for program in self.programs[1:]:
            shown = shown & program(zero, zero, rows, columns)
        return shown


def block_mask(programs: Sequence[PairProgram], length: int, keys: int) -> BlockMask:
    """Return which blocks of pairs are seen by masks that depend on row and key alone, and not on sample and head.

    Args:
        programs: The masks; a row sees a key that all of them show.
        length: Number of rows, L.
        keys: Number of keys, S.
    """
    found = [_last_bounds(program, length, keys) for program in programs]
    some, whole = found[0].high, found[0].low
    for bounds in found[1:]:
        some, whole = some & bounds.high, whole & bounds.low
    shape = -(-length // SIDE), -(-keys // SIDE)
    return BlockMask(tuple(programs), length, keys, some.expand(shape), whole.expand(shape))


def _last_bounds(program: PairProgram, length: int, keys: int) -> Bounds:
    """Return the bounds of the program's result, a bool."""
    zero = torch.zeros(1, 1, dtype=torch.int64)
    # rows down, keys across; a last block that is not full repeats the last
    values: list[Any] = [zero, zero, _places(length).unsqueeze(-1), _places(keys).unsqueeze(0)]
    sides: list[frozenset[int]] = [frozenset(), frozenset(), frozenset((ROW,)), frozenset((KEY,))]
    bounds: list[Bounds | None] = [_bounds_of_one_side(value) for value in values]
    for step in program.steps:
        side = frozenset().union(*(sides[place] for place in step.read))
        alone = len(side) < 2
        values.append(step.run(values) if alone else None)
        bounds.append(_bounds_of_one_side(values[-1]) if alone else _bounds_of_step(step, bounds))
        sides.append(side)
    found = bounds[-1]
    return _UNSURE if found is None or found.low.dtype != torch.bool else found


def _places(count: int) -> Int[Tensor, " N"]:
    return torch.arange(-(-count // SIDE) * SIDE).clamp(max=count - 1)


def _bounds_of_one_side(values: Tensor) -> Bounds | None:
    """Return the bounds of values of rows, (L, 1), or of keys, (1, S); None of floating numbers, which may be NaN."""
    if values.dtype.is_floating_point or values.dtype.is_complex:
        return None
    values = values if values.dtype == torch.bool else values.long()
    if values.dtype != torch.bool and not -LARGEST_BOUND < int(values.min()) <= int(values.max()) < LARGEST_BOUND:
        return None
    values = values.reshape((1,) * (2 - values.ndim) + tuple(values.shape))
    if values.shape[0] > 1:
        blocks, dim = values.reshape(-1, SIDE, 1), 1
    elif values.shape[1] > 1:
        blocks, dim = values.reshape(1, -1, SIDE), 2
    else:
        return Bounds(values, values)
    return Bounds(blocks.amin(dim), blocks.amax(dim))


def _bounds_of_step(step: PairStep, bounds: Sequence[Bounds | None]) -> Bounds | None:
    rule = _BOUNDS_OF.get(step.function)
    given = [] if rule is None or step.kwargs else [_bounds_of(value, bounds) for value in step.args]
    found = rule(*given) if rule is not None and given and step.dtype in (torch.bool, torch.int64) else None
    return _UNSURE if found is None and step.dtype == torch.bool else found


def _bounds_of(value: Any, bounds: Sequence[Bounds | None]) -> Bounds | None:
    if isinstance(value, Slot):
        return bounds[value.place]
    if isinstance(value, Tensor):
        return _bounds_of_one_side(value) if value.numel() == 1 else None
    return Bounds(torch.full((1, 1), value), torch.full((1, 1), value)) if isinstance(value, bool | int) else None


def _of_integers(result: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Bounds | None]:
    def rule(*given: Bounds | None) -> Bounds | None:
        known = [bounds for bounds in given if bounds is not None and bounds.low.dtype == torch.int64]
        return Bounds(*result(*known)) if len(known) == len(given) else None

    return rule


def _of_bools(result: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Bounds | None]:
    def rule(*given: Bounds | None) -> Bounds | None:
        return Bounds(*result(*(_UNSURE if b is None or b.low.dtype != torch.bool else b for b in given)))

    return rule


_UNSURE = Bounds(torch.zeros(1, 1, dtype=torch.bool), torch.ones(1, 1, dtype=torch.bool))
_EQUAL = _of_integers(lambda a, b: ((a.low == b.high) & (a.high == b.low), (a.low <= b.high) & (b.low <= a.high)))
_NOT_EQUAL = _of_integers(lambda a, b: ((a.low > b.high) | (b.low > a.high), (a.low != b.high) | (a.high != b.low)))
_ABOVE = _of_integers(lambda a, b: (a.low > b.high, a.high > b.low))
_NOT_BELOW = _of_integers(lambda a, b: (a.low >= b.high, a.high >= b.low))
_BELOW = _of_integers(lambda a, b: (a.high < b.low, a.low < b.high))
_NOT_ABOVE = _of_integers(lambda a, b: (a.high <= b.low, a.low <= b.high))
_BOTH = _of_bools(lambda a, b: (a.low & b.low, a.high & b.high))
_EITHER = _of_bools(lambda a, b: (a.low | b.low, a.high | b.high))
_NOT = _of_bools(lambda a: (~a.high, ~a.low))
_SIZE = _of_integers(lambda a: (torch.maximum(a.low, -a.high).clamp(min=0), torch.maximum(a.high, -a.low)))
_BOUNDS_OF: dict[Any, Callable[..., Bounds | None]] = {
    aten.eq.Tensor: _EQUAL,
    aten.eq.Scalar: _EQUAL,
    aten.ne.Tensor: _NOT_EQUAL,
    aten.ne.Scalar: _NOT_EQUAL,
    aten.gt.Tensor: _ABOVE,
    aten.gt.Scalar: _ABOVE,
    aten.ge.Tensor: _NOT_BELOW,
    aten.ge.Scalar: _NOT_BELOW,
    aten.lt.Tensor: _BELOW,
    aten.lt.Scalar: _BELOW,
    aten.le.Tensor: _NOT_ABOVE,
    aten.le.Scalar: _NOT_ABOVE,
    aten.bitwise_and.Tensor: _BOTH,
    aten.logical_and.default: _BOTH,
    aten.bitwise_or.Tensor: _EITHER,
    aten.logical_or.default: _EITHER,
    aten.bitwise_not.default: _NOT,
    aten.logical_not.default: _NOT,
    aten.add.Tensor: _of_integers(lambda a, b: (a.low + b.low, a.high + b.high)),
    aten.sub.Tensor: _of_integers(lambda a, b: (a.low - b.high, a.high - b.low)),
    aten.rsub.Scalar: _of_integers(lambda a, b: (b.low - a.high, b.high - a.low)),
    aten.neg.default: _of_integers(lambda a: (-a.high, -a.low)),
    aten.abs.default: _SIZE,
}
