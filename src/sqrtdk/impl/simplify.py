"""Functions of one pair that depend on the distance i - j alone, as what kernels run over a whole call.

A `score_mod` that adds a function of the distance (ALiBi, a relative bias) becomes a table of L + S - 1 numbers a head,
and a `mask_mod` of the distance (causal, a window) becomes the bounds of a band. `dependence.py` proves that they are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk.impl.call import Call, has_values
from sqrtdk.impl.dependence import BATCH, DISTANCE, HEAD, added_by, shown_by
from sqrtdk.impl.mods import map_added, map_pairs

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

SMALLEST_READ = 2**16  # pairs of a call from which its functions are read, which takes 0.2 ms each


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
    """Return the call with a table and a band in place of its functions, or the same call if they do not allow it.

    The functions of a small call, and of one on another device than a CPU, stay as they are.
    """
    if not call.has_mods or call.elements < SMALLEST_READ or call.query.device.type != "cpu":
        return call
    if not has_values(call.query, call.key, call.value) or call.places is not None:
        return call
    masks = tuple(mod for mod in call.mask_mods if _of_distance(call, shown_by(mod)))
    added = None
    if call.score_mod is not None and call.term is None:
        added = call.score_mod if _of_distance(call, added_by(call.score_mod, call.dtype), HEAD) else None
    if not masks and added is None:
        return call
    distances = torch.arange(1 - call.keys, call.length, device=call.query.device)
    pairs = distances.clamp(min=0), (-distances).clamp(min=0)  # the first row and key of each distance
    seen = torch.ones_like(distances, dtype=torch.bool)
    with _disable_current_modes():  # a trace reads the band, and not how it was found
        for mod in masks:
            seen &= map_pairs(mod, 1, 1, *pairs)[0, 0]
    changed = replace(call, mask_mods=tuple(mod for mod in call.mask_mods if mod not in masks))
    if added is not None:
        values = map_added(added, call.dtype, 1, call.heads, *pairs, together=True)[0]
        hidden = (values.detach() == -math.inf).expand(-1, len(distances))
        values = values.masked_fill(values.detach() == -math.inf, 0.0).expand(-1, len(distances))
        if not torch.isfinite(values.detach()).all() or (hidden != hidden[0]).any():
            return call
        seen &= ~hidden[0]
        changed = replace(changed, score_mod=None, term=_Table(values, 1 - call.keys + call.shift))
    bounds = _bounds(call, seen)
    if bounds is None:
        return call
    return replace(changed, diagonal=bounds[0], window=(bounds[1], call.window[1]))


def _of_distance(call: Call, places: frozenset[str] | None, *more: str) -> bool:
    if places is None:
        return False
    one = {BATCH} if math.prod(call.lead[:-1]) == 1 else set()
    return places <= {DISTANCE, *more} | one | ({HEAD} if len(call.lead) == 0 or call.lead[-1] == 1 else set())


def _bounds(call: Call, seen: Bool[Tensor, " distances"]) -> tuple[int | None, int | None] | None:
    """Return diagonal and left side of the window that show the seen distances alone; None: they are no band."""
    places = seen.nonzero()
    if not len(places):
        return None
    low, high = int(places[0]), int(places[-1])
    if high - low + 1 != len(places):
        return None
    diagonal, left = call.diagonal, call.window[0]
    if low > 0:  # the distances start at 1 - S: row i sees keys j <= i - d of the least distance d
        above = call.keys - 1 - low
        diagonal = above if diagonal is None else min(diagonal, above)
    if high < len(seen) - 1:
        side = high - (call.keys - 1) + call.shift
        if side < 0:  # no row sees its own key, which windows do
            return None
        left = side if left is None else min(left, side)
    return diagonal, left
