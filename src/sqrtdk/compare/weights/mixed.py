"""An adapter and a rounding at once: QLoRA, whose base is quantised, and an adapter that was merged and then quantised.

With W the base's weight, D = s B A the update and B's weight V = W + c D + e, where e is the rounding, the share is

    c = <V - W, D> / <D, D>,    with a standard error of |e| / (|D| sqrt(n))

over the n entries, since rounding to nearest does not know D. Where four errors of all weights together leave 1, 0 and
the other known shares apart, c is decided, and V is held against the rounding of W + c D. Where they do not, V is held
against W + D, and whether the adapter is in it is not decided: an update far below a step of the grid leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import Tensor

from sqrtdk.compare.weights.rounded import FoundRounding, found_roundings
from sqrtdk.models.adapters import Adapter

_ERRORS_APART = 4.0
_SHRUNK = 0.2  # codes of 2 and 3 bits shrink an update by less
_MOST_ERROR = 0.5  # of c, above which 0 and 1 are not told apart
_SHARES = (1.0, 0.0, 2.0, -1.0)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedUpdates:
    """What weights of B have of an adapter and of a rounding.

    Attributes:
        roundings: The weights that are rounded, by name.
        share: c of those with an update; None if it is not decided.
        finer: The weights of B are the finer ones: A's are theirs rounded.
    """

    roundings: Mapping[str, FoundRounding]
    share: float | None
    finer: bool = False


def rounded_updates(
    adapter: Adapter, base: Mapping[str, Tensor], got: Mapping[str, Tensor], names: Collection[str]
) -> RoundedUpdates | None:
    """Return how weights are those of a base with an adapter, rounded; None if they are not.

    Args:
        adapter: The adapter.
        base: The base's weights, without it.
        got: The weights of the adapted side.
        names: Weights to look at, matrices alone: those that nothing else explains.

    Example:
        >>> import torch
        >>> from sqrtdk.models.adapters import Update
        >>> update = Update("LoRA", torch.randn(4, 64), torch.randn(64, 4), scale=0.1)
        >>> base = {name: torch.randn(64, 64) for name in "qk"}
        >>> moved = {name: base[name] + update.scale * update.product() for name in "qk"}
        >>> step = {name: x.abs().amax(-1, keepdim=True) / 127 for name, x in moved.items()}
        >>> got = {name: (x / step[name]).round() * step[name] for name, x in moved.items()}
        >>> found = rounded_updates(Adapter("a", dict.fromkeys("qk", update)), base, got, "qk")
        >>> found.roundings["q"].grid.name, found.share
        ('int8, a scale a row', 1.0)
    """
    ground = {name: base[name].float().cpu() for name in names if base[name].dim() == 2}
    moves = {
        name: adapter.updates[name].applied(ground[name]).cpu() - ground[name]
        for name in ground
        if name in adapter.updates
    }
    if not moves:
        return None
    share = _share(ground, got, moves)
    taken = 1.0 if share is None else share
    parts = {name: taken * moves[name] if name in moves else 0.0 for name in ground}
    its = {name: got[name].float().cpu() for name in ground}
    with_update = {name: ground[name] + parts[name] for name in ground}
    bare = {name: its[name] - parts[name] for name in ground}
    tries = ((with_update, its, False), (ground, bare, False), (bare, ground, True))
    best: RoundedUpdates | None = None
    for fine, coarse, finer in tries:  # merged, then rounded; rounded, then merged; A's base is rounded
        found = found_roundings(fine, coarse)
        if found and (best is None or len(found) > len(best.roundings)):
            best = RoundedUpdates(found, share, finer)
        if len(found) == len(ground):
            break
    return best


def _share(base: Mapping[str, Tensor], got: Mapping[str, Tensor], moves: Mapping[str, Tensor]) -> float | None:
    """Return the share of the update that all weights have together; None if it is none of the known ones for sure."""
    both = size = left = 0.0
    for name, move in moves.items():
        off = got[name].double().cpu() - base[name].double()
        both += float((off * move).sum())
        size += float(move.double().square().sum())
    if not size:
        return None
    c = both / size
    for name, move in moves.items():
        left += float((got[name].double().cpu() - base[name].double() - c * move).square().sum())
    count = sum(move.numel() for move in moves.values())
    error = _ERRORS_APART * math.sqrt(left / count / size)
    near = [share for share in _SHARES if abs(c - share) <= error + _SHRUNK * abs(share)]
    return near[0] if len(near) == 1 and error < _MOST_ERROR else None
