"""Which edit gives B's answers, and whether that is proven."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.answers.rows import residue

if TYPE_CHECKING:
    from jaxtyping import Float

BLOCKS = 16  # neighbouring rows are no independent samples: they are drawn in blocks
DRAWS = 500
SURE_SHARE = 0.99  # share of the draws in which an edit has to be ahead
WITHIN = 1.5  # residues up to so many floors are rounding
NEARLY_ALL, WITHIN_THEN = 100.0, 2.0  # times that the unedited model is farther off; the floors that are rounding then
CONSISTENT_WITHIN = 5.0  # a fitted number may leave so many floors, as where B is rounded in a way that is not listed
WELL_ABOVE = 3.0  # the unedited model is as many floors away at least
LEAST, GOOD = 0.4, 0.9  # shares of the difference that an edit has to explain: at least, and where the floor is good
GOOD_FLOOR = 10.0  # a floor is good where the unedited model is so many floors away
TWINS_WITHIN = 1e-5  # nats
LEAST_FLOOR = 2e-5  # nats: what float32 of other kernels makes, and more
PROVEN, CONSISTENT, UNDECIDED, NO_FAULT = "proven", "consistent with", "not decided", "no fault"


@dataclass(frozen=True, slots=True, eq=False)
class Tried:
    """One edit, run.

    Attributes:
        squares: See `sqrtdk.answers.rows.squares`, (N,); NaN for rows that did not run.
        own: Log-probabilities of the tokens that B's rows list, (N, K).
        floor: What rounding alone makes of this edit's answers, in nats.
        whole: Whether all prompts ran, and the floor was measured.
    """

    squares: Float[Tensor, " N"]
    own: Float[Tensor, "N K"]
    floor: float
    whole: bool = False

    @property
    def residue(self) -> float:
        """Root of the mean square, in nats."""
        return residue(self.squares)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the tried edits say.

    Attributes:
        kind: "proven", "consistent with", "not decided", "no fault".
        best: Number of the nearest edit; 0 is the unedited model.
        ties: Numbers of the edits of other groups that can't be told from it.
        alike: Numbers of the edits of its own group that can't be told from it: other numbers of one part.
        twins: Numbers of the edits of other groups that answer as it does: one name for all.
        explained: Share of the squared difference that goes away with it.
    """

    kind: str
    best: int
    ties: tuple[int, ...]
    alike: tuple[int, ...]
    twins: tuple[int, ...]
    explained: float


def ahead(nearer: Float[Tensor, " N"], farther: Float[Tensor, " N"]) -> float:
    """Return the share of block bootstraps in which the mean of `nearer` is the smaller, over rows that both have."""
    apart = (farther - nearer)[(farther - nearer).isfinite()]
    if not len(apart):
        return 0.0
    blocks = torch.stack([block.mean() for block in apart.chunk(min(BLOCKS, len(apart)))])
    drawn = torch.randint(len(blocks), (DRAWS, len(blocks)), generator=torch.Generator().manual_seed(0))
    return float((blocks[drawn].mean(1) > 0).double().mean())


def judge(
    tried: Sequence[Tried],
    groups: Sequence[Hashable] | None = None,
    *,
    candidates: Sequence[int] | None = None,
    fitted: Container[int] = (),
) -> Verdict:
    """Return the verdict on edits, of which the first is none.

    An edit is proven if what it leaves is rounding, the unedited model is well above that, it explains enough of the
    difference, and it is ahead of every edit of another group that answers otherwise. A fitted number that leaves more
    than rounding is "consistent with" B's answers. Where the unedited model is within rounding, there is no fault.

    Args:
        tried: The runs.
        groups: What each changes; edits of one group differ in a number. None makes every edit a group.
        candidates: Edits that all prompts ran with, of which one may be named; None for all.
        fitted: Edits whose number was fitted.
    """
    groups = range(len(tried)) if groups is None else groups
    order = sorted(range(len(tried)) if candidates is None else candidates, key=lambda number: tried[number].residue)
    first = order[0]
    best, unedited = tried[first], tried[0]
    others = [number for number in range(len(tried)) if number != first]
    same = [number for number in others if are_twins(best, tried[number])]
    close = [
        number for number in others if number not in same and ahead(best.squares, tried[number].squares) < SURE_SHARE
    ]
    ties = tuple(number for number in close if groups[number] != groups[first])
    alike = tuple(number for number in close if groups[number] == groups[first])
    twins = tuple(number for number in same if groups[number] != groups[first])
    no_fault = unedited.residue <= WITHIN * unedited.floor
    if first == 0 or 0 in same:
        return Verdict(NO_FAULT if no_fault else UNDECIDED, 0, ties, (), (), 0.0)
    explained = 1 - (best.residue / unedited.residue) ** 2
    # a residue below the estimated floor shows that the floor is lower still
    floor = min(best.floor, max(best.residue, LEAST_FLOOR))
    wanted = GOOD if unedited.residue >= GOOD_FLOOR * floor else LEAST
    clear = unedited.residue >= WELL_ABOVE * floor and explained >= wanted and not ties
    kind = UNDECIDED
    # a floor is one draw of the rounding, and kernels of another CPU draw another
    within = WITHIN_THEN if unedited.residue >= NEARLY_ALL * best.residue else WITHIN
    if clear and best.residue <= within * best.floor:
        kind = PROVEN
    elif no_fault:
        return Verdict(NO_FAULT, 0, ties, (), (), 0.0)
    elif clear and first in fitted and best.residue <= CONSISTENT_WITHIN * best.floor:
        kind = CONSISTENT
    return Verdict(kind, first, ties, alike, twins, explained)


def are_twins(one: Tried, other: Tried) -> bool:
    """Return whether two edits answer alike."""
    return float((one.own - other.own).nan_to_num().abs().max()) < TWINS_WITHIN
