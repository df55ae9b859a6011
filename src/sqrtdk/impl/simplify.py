"""Functions of one pair as what kernels run over a whole call: bias, scale, softcap, a table of distances, a band.

A `score_mod` that multiplies the score by a number of the head and row is part of the scale; one that adds
bias[h, q_idx, kv_idx] is that bias; one that adds a function of the distance i - j (ALiBi, a relative bias) becomes a
table of L + S - 1 numbers per head; 30 tanh(score / 30) is a softcap before either. A `mask_mod` of the distance
(causal, a window) becomes the bounds of a band. `dependence.py` proves that they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk.impl.call import Call, has_values
from sqrtdk.impl.dependence import BATCH, DISTANCE, HEAD, KEY, ROW, Added, read_mask, read_score
from sqrtdk.impl.extremes import holds_nonfinite
from sqrtdk.impl.mods import map_one, map_pairs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from sqrtdk._shapes import Bias, Factor
    from sqrtdk.impl.mods import ScoreMod

SMALLEST_READ = 2**17  # pairs of a call below which reading its functions, 0.2 ms each, gains nothing


@dataclass(frozen=True)
class _Table:
    """The bias values[h, d - first] of a distance d = i - j."""

    values: Float[Tensor, "#Hq distances"]
    first: int
    content: bool = False

    def term(
        self,
        query: Float[Tensor, "*#BHq R E"],
        key: Float[Tensor, "*#BHq S E"],
        rows: Int[Tensor, " R"],
        columns: Int[Tensor, " S"],
    ) -> Float[Tensor, "#Hq R S"]:
        return self.of_distance(rows[:, None] - columns[None, :], query)

    def of_distance(
        self, distance: Int[Tensor, "*distances"], query: Float[Tensor, "*#BHq R E"]
    ) -> Float[Tensor, "#Hq *distances"]:
        return self.values[:, distance - self.first]


def simplified(call: Call) -> Call:
    """Return the call with a bias and a band in place of its functions, or with those that are neither.

    The functions of a small call, and of one on another device than a CPU, stay as they are.
    """
    if not call.has_mods or call.elements < SMALLEST_READ or call.query.device.type != "cpu":
        return call
    if not has_values(call.query, call.key, call.value) or call.places is not None:
        return call
    return _score_read(_masks_read(call))


def _masks_read(call: Call) -> Call:
    call = replace(call, mask_mods=tuple(read_mask(mod) for mod in call.mask_mods))
    masks = tuple(mod for mod in call.mask_mods if _of_distance(call, read_mask(mod).places))
    if not masks:
        return call
    rows, columns = _first_pairs(call)
    seen = torch.ones_like(rows, dtype=torch.bool)
    with _disable_current_modes():  # a trace reads the band, and not how it was found
        for mod in masks:
            seen &= map_pairs(mod, 1, 1, rows, columns)[0, 0]
    return _banded(replace(call, mask_mods=tuple(mod for mod in call.mask_mods if mod not in masks)), seen) or call


def _score_read(call: Call) -> Call:
    if call.score_mod is None or call.term is not None:
        return call
    score = read_score(call.score_mod, call.dtype)
    call, added = replace(call, score_mod=score), score.added
    if score.factor is not None and call.softcap is None:
        factor = _rows_factor(call, score)
        finite = has_values(factor) and not holds_nonfinite(factor)
        return replace(call, score_mod=None, scale=call.scale * factor) if finite else call
    if added is None or (added.cap is not None and call.softcap is not None):
        return call
    read = replace(call, score_mod=None, softcap=call.softcap or added.cap)
    bias = _whole(call, added) if call.bias is None else None
    if bias is not None:
        return replace(read, bias=bias)
    if not _of_distance(call, added.places, HEAD):
        return call
    rows, columns = _first_pairs(call)
    values = map_one(score, 0.0, call.dtype, 1, call.heads, rows, columns, together=True)[0]
    values = values.expand(-1, len(rows))
    hidden = values.detach() == -math.inf
    values = values.masked_fill(hidden, 0.0)
    if not torch.isfinite(values.detach()).all() or (hidden != hidden[0]).any():
        return call
    if values.requires_grad or values.any():
        read = replace(read, term=_Table(values, 1 - call.keys + call.shift))
    return _banded(read, ~hidden[0]) or call


def _rows_factor(call: Call, score: ScoreMod) -> Factor:
    """Return what a score_mod multiplies the scores by, broadcastable to (..., Hq, L, 1)."""
    rows, key = call.positions(0, call.length), torch.zeros(1, dtype=torch.int64)
    batch = math.prod(call.lead[:-1])
    return call.in_lead(map_one(score, 1.0, call.dtype, batch, call.heads, rows, key))


def _first_pairs(call: Call) -> tuple[Int[Tensor, " distances"], Int[Tensor, " distances"]]:
    """Return first row and key of each distance i - j, from 1 - S to L - 1."""
    distances = torch.arange(1 - call.keys, call.length, device=call.query.device)
    return distances.clamp(min=0), (-distances).clamp(min=0)


def _of_distance(call: Call, places: frozenset[str] | None, *more: str) -> bool:
    """Return whether these are the distance and what is the same in all samples and heads, or one of `more`."""
    same = {BATCH} if math.prod(call.lead[:-1]) == 1 else set()
    same |= {HEAD} if not call.lead or call.lead[-1] == 1 else set()
    return places is not None and places <= {DISTANCE, *more} | same


def _whole(call: Call, added: Added) -> Bias | None:
    """Return the tensor that a score_mod adds, broadcastable to (..., Hq, L, S); None if it adds none as it is."""
    lead, table = call.lead, added.table
    sizes = dict(zip((BATCH, HEAD, ROW, KEY), (math.prod(lead[:-1]), call.heads, call.length, call.keys), strict=True))
    used = [sizes[axis] for axis in added.axes]
    if table is None or table.device != call.query.device or (len(lead) > 2 and BATCH in added.axes):
        return None
    if any(size < needed for size, needed in zip(table.shape, used, strict=True)):
        return None  # the functions as they are raise the error
    bias = table[tuple(slice(needed) for needed in used)]
    if not has_values(bias) or holds_nonfinite(bias):  # -inf hides keys
        return None
    bias = bias.reshape([size if axis in added.axes else 1 for axis, size in sizes.items()])
    return bias[(0,) * max(0, 2 - len(lead))]


def _banded(call: Call, seen: Bool[Tensor, " distances"]) -> Call | None:
    """Return the call with diagonal and window that hide all but the seen distances; None if these are no band."""
    places = seen.nonzero()
    if not len(places) or int(places[-1] - places[0]) + 1 != len(places):
        return None
    low, high = int(places[0]), int(places[-1])
    diagonal, (left, right) = call.diagonal, call.window
    if low > 0:  # the distances start at 1 - S: row i sees keys j <= i - d of the least distance d
        above = call.keys - 1 - low
        diagonal = above if diagonal is None else min(diagonal, above)
    if high < len(seen) - 1:
        side = high - (call.keys - 1) + call.shift
        if side < 0:  # no row sees its own key, which windows show
            return None
        left = side if left is None else min(left, side)
    return replace(call, diagonal=diagonal, window=(left, right))
