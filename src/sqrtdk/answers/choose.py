"""How B is rounded: which kinds its answers fit, and by which of them A is rounded.

A kind fits if three things hold of an edit that comes near:

1. What is left is rounding of this kind: at most 3 of its floors.
2. No other kind comes nearer in 99% of block bootstraps over rows.
3. Its floor is not far above what is left, at most 3 times as large, for B would then leave more: a float16 side that
   leaves 0.0003 nats is not rounded to bfloat16, whose floor is 0.006. A kind that comes nearer by its rounded weights
   alone needs no such thing, since B may compute more exactly than the kind does.

Of the kinds that fit, A is rounded by the one of the smallest floor that holds on all prompts: a larger floor would
hide small mistakes. Where none fits, B may still round more than one kind and less than another; A is then rounded by
the least kind that covers what is left, and both are named.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from sqrtdk.answers.judge import LEAST_FLOOR, SURE_SHARE, WELL_ABOVE, WITHIN, Tried, ahead
from sqrtdk.answers.lab import Edits, Lab
from sqrtdk.answers.rounding import EXACT, ROUNDINGS, Rounding

CLOSE_TO_NEAREST = 6.0  # times the nearest residue, up to which A unchanged takes part in the choice of a rounding
CLEARLY_NEARER = 0.5  # of float32's residue: such a kind is taken although it leaves more than its floor


def choose_rounding(lab: Lab, sets: Sequence[Edits]) -> None:
    """Round A as B is: the kind under which one of the nearest edits fits; float32 unless another kind does."""
    lab.rounding = EXACT
    order = lab.ranked(sets)
    nearest = lab.run(order[0], floor=True)
    if nearest.residue <= WITHIN * nearest.floor:
        return
    close = order[:2]
    if () not in close and lab.run(()).residue < CLOSE_TO_NEAREST * nearest.residue:
        close.append(())
    runs = _nearest_runs(lab, close)
    found = sorted(_fitting(runs), key=lambda number: runs[number].floor)
    for number in found:
        lab.rounding = ROUNDINGS[number]
        whole = min((lab.run(edits, whole=True, floor=True) for edits in close), key=lambda run: run.residue)
        if whole.residue <= WITHIN * whole.floor:
            return
    if found:
        lab.rounding = ROUNDINGS[min(found, key=lambda number: _off(runs[number]))]
        return
    least = min(range(len(runs)), key=lambda number: runs[number].residue)
    between = _between(runs)
    if runs[least].residue < CLEARLY_NEARER * runs[0].residue:
        lab.rounding = ROUNDINGS[least]
    else:
        lab.rounding = ROUNDINGS[between[0]] if between else EXACT


def kinds_alike(lab: Lab, edits: Sequence[Edits]) -> tuple[Rounding, ...]:
    """Return the kinds of rounding that B's answers fit, the one that A is rounded by first.

    Args:
        lab: Runs A; its rounding is the one that was chosen.
        edits: Those that come nearest.
    """
    chosen = lab.rounding
    if chosen is EXACT:
        return (EXACT,)
    runs = _nearest_runs(lab, edits)
    found = [ROUNDINGS[number] for number in _fitting(runs) or _between(runs)]
    lab.rounding = chosen
    return (chosen, *(kind for kind in found if kind is not chosen and kind is not EXACT))


def _nearest_runs(lab: Lab, close: Sequence[Edits]) -> list[Tried]:
    """Return for each kind of rounding the run of the edits that come nearest, on the first prompt."""
    runs = []
    for rounding in ROUNDINGS:
        lab.rounding = rounding
        runs.append(min((lab.run(edits, floor=True) for edits in close), key=lambda run: run.residue))
    return runs


def _fitting(runs: Sequence[Tried]) -> list[int]:
    """Return the numbers of the kinds that fit; see the head of this file."""
    nearest, exact = min(runs, key=lambda run: run.residue), runs[0]
    found = []
    for number, run in enumerate(runs):
        if run.residue > WELL_ABOVE * run.floor or ahead(nearest.squares, run.squares) >= SURE_SHARE:
            continue
        by_weights = not ROUNDINGS[number].of_results and ahead(run.squares, exact.squares) >= SURE_SHARE
        if by_weights or run.floor <= WELL_ABOVE * max(run.residue, LEAST_FLOOR):
            found.append(number)
    return found


def _between(runs: Sequence[Tried]) -> list[int]:
    """Return the kind of the least floor that covers what is left, and the one of results that falls least short of it.

    Nothing is returned if no kind covers it without another one coming nearer.
    """
    nearest = min(runs, key=lambda run: run.residue)
    numbers = [number for number, run in enumerate(runs) if ahead(nearest.squares, run.squares) < SURE_SHARE]
    above = [number for number in numbers if runs[number].residue <= WITHIN * runs[number].floor]
    if not above:
        return []
    below = [number for number in numbers if number not in above and ROUNDINGS[number].of_results]
    by_floor = lambda number: runs[number].floor  # noqa: E731
    return [min(above, key=by_floor), *([max(below, key=by_floor)] if below else [])]


def _off(run: Tried) -> float:
    """Return how far what is left is from the floor, as a logarithm of their ratio."""
    return abs(math.log(max(run.residue, LEAST_FLOOR) / run.floor))
