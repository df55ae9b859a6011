"""Which change of A makes it answer as B does: alignment, BOS, rounding, edits, fitted numbers, pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from sqrtdk.answers.choose import choose_rounding, kinds_alike
from sqrtdk.answers.edit import Edit
from sqrtdk.answers.edited import copy_of, watch_attentions
from sqrtdk.answers.edits import edits_of
from sqrtdk.answers.fit import families, fit
from sqrtdk.answers.judge import (
    CONSISTENT,
    LEAST_FLOOR,
    NO_FAULT,
    PROVEN,
    SURE_SHARE,
    UNDECIDED,
    WELL_ABOVE,
    WITHIN,
    Tried,
    Verdict,
    ahead,
    are_twins,
    judge,
)
from sqrtdk.answers.lab import Edits, Lab, RowAlignment
from sqrtdk.answers.rounding import EXACT, Rounding
from sqrtdk.answers.rows import Answers, Prompt

BEAM = 6  # edits that a second one is tried with
FEW, MANY = 4, 16  # edits that run on all prompts: at least, at most
NEAR = 2.0  # times the nearest residue, up to which an edit runs on all prompts
SHIFTS_OF_ROWS = (0, 1, -1)  # places that a row may be off
MOST_BOS = 2  # tokens of the beginning of a sequence that B may add
CLEARLY_NEARER = 0.5  # of another residue: then alignment is decided
EXPLAINED = 0.1  # of the unedited residue: an edit that leaves less under A's own way of counting decides for it
MOST_WAYS = 3  # of alignments with which every edit is tried
HOPEFUL = 2.0  # times the nearest residue, up to which the number of a part is searched
REFITTED, PROMISING = 2, 0.7  # pairs whose numbers are fitted again; of the residue of the best single edit


@dataclass(frozen=True, slots=True, eq=False)
class Diagnosis:
    """What B's answers say of it.

    Attributes:
        verdict: What was decided.
        tried: Every set of edits that ran, the unedited model first.
        runs: Their runs, parallel to `tried`.
        hidden: Edits that these prompts could not have shown: their answers are within rounding of the unedited ones.
        rounding: How A was rounded, as B seems to be.
        alike: The kinds of rounding that B's answers fit alike, `rounding` first.
        alignment: How rows and prompts belong together.
        forwards: How many prompts A ran.
        watched: How many attentions edits could change.
    """

    verdict: Verdict
    tried: tuple[Edits, ...]
    runs: tuple[Tried, ...]
    hidden: Edits
    rounding: Rounding
    alike: tuple[Rounding, ...]
    alignment: RowAlignment
    forwards: int
    watched: int

    @property
    def best(self) -> Edits:
        """The edits that are proven, or that B's answers are consistent with; none of an undecided diagnosis."""
        return self.tried[self.verdict.best] if self.verdict.kind not in (UNDECIDED, NO_FAULT) else ()


def diagnose(model: nn.Module, prompts: Sequence[Prompt], answers: Answers, *, bos: int | None = None) -> Diagnosis:
    """Find the edit of A whose answers are B's.

    Args:
        model: A, a causal language model: of transformers, or a module that takes ids (B, L) and returns logits.
        prompts: Token ids that B was asked.
        answers: What B said.
        bos: A's token for the beginning of a sequence, if B may add it.
    """
    facts = watch_attentions(model, max(prompts, key=len))
    edits = edits_of(copy_of(model, facts), max(map(len, prompts)))
    lab = Lab(model, tuple(prompts), answers, facts, bos)
    sets: list[Edits] = [(), *((edit,) for edit in edits)]
    lab.alignment = _aligned(lab, sets)
    choose_rounding(lab, sets)
    verdict, runs = _judged(lab, sets)
    parts: list[list[Edit]] = []
    if verdict.kind == PROVEN and sets[verdict.best][0].number is not None:
        # another number of the same part may come nearer still
        parts = [[edit for edit in edits if edit.number is not None and _part((edit,)) == _part(sets[verdict.best])]]
    elif verdict.kind == UNDECIDED:
        parts = families(edits)
    fitted = _fitted(lab, parts)
    before = lab.rounding
    if verdict.kind == UNDECIDED or (fitted and before is not EXACT):
        choose_rounding(lab, [*sets, *fitted])
    if lab.rounding is not before:  # the number was fitted to answers that were rounded in another way
        fitted = _fitted(lab, parts)
    if fitted:
        sets = [*sets, *fitted]
        verdict, runs = _judged(lab, sets)
    if verdict.kind in (UNDECIDED, CONSISTENT) and runs[0].residue > WITHIN * runs[0].floor:
        sets, runs, verdict = _pairs(lab, sets, runs, verdict)
    elif verdict.kind == PROVEN and lab.rounding is not EXACT and _hides_another(lab, edits, sets[verdict.best]):
        taken, lab.rounding = lab.rounding, EXACT if lab.rounding.of_results else lab.rounding
        sets, runs, verdict = _pairs(lab, sets, runs, replace(verdict, kind=UNDECIDED))
        if verdict.kind == UNDECIDED:
            lab.rounding = taken
    hidden = _hidden(lab, edits)
    nearest = sets[verdict.best] if verdict.kind != NO_FAULT else ()
    alike = kinds_alike(lab, [nearest])
    return Diagnosis(
        verdict, tuple(sets), tuple(runs), hidden, lab.rounding, alike, lab.alignment, lab.forwards, len(facts)
    )


def _part(edits: Edits) -> tuple[tuple[str, str], ...]:
    """Return what edits change, whatever their numbers."""
    return tuple(sorted((edit.cause, edit.what) for edit in edits))


def _aligned(lab: Lab, sets: Sequence[Edits]) -> RowAlignment:
    """Return the shift and the number of BOS under which some edit comes nearest.

    A large fault may bring the unedited model nearer under a wrong shift, so it alone decides only where that is clear.
    """
    extras = range(MOST_BOS + 1) if lab.bos is not None else (0,)
    ways = [RowAlignment(shift, extra) for extra in extras for shift in SHIFTS_OF_ROWS]

    def nearest(way: RowAlignment, tried: Sequence[Edits]) -> float:
        lab.alignment = way
        return min(lab.run(edits).residue for edits in tried)

    unedited = [nearest(way, [()]) for way in ways]
    order = sorted(range(len(ways)), key=unedited.__getitem__)
    if unedited[order[0]] < CLEARLY_NEARER * unedited[order[1]]:
        return ways[order[0]]
    if nearest(ways[0], sets) < EXPLAINED * unedited[order[0]]:
        return ways[0]
    # the first is A's own way of counting: it stays unless another comes nearer with some edit
    close = list(dict.fromkeys([0, *order[:MOST_WAYS]]))
    return ways[min(close, key=lambda number: nearest(ways[number], sets))]


def _judged(lab: Lab, sets: Sequence[Edits]) -> tuple[Verdict, list[Tried]]:
    """Run the nearest sets of edits on all prompts with their floors, the others on the first, and judge."""
    order = lab.ranked(sets)
    reach = NEAR * lab.run(order[0]).residue + LEAST_FLOOR
    near = {edits for edits in order[:MANY] if lab.run(edits).residue <= reach} | {*order[:FEW], ()}
    runs = [lab.run(edits, whole=True, floor=True) if edits in near else lab.run(edits) for edits in sets]
    numbers = [number for number, edits in enumerate(sets) if edits in near]
    fitted = [number for number, edits in enumerate(sets) if any(edit.fitted for edit in edits)]
    return judge(runs, [_part(edits) for edits in sets], candidates=numbers, fitted=fitted), runs


def _fitted(lab: Lab, parts: Sequence[Sequence[Edit]]) -> tuple[Edits, ...]:
    """Return one set of edits for each part whose number comes nearer."""
    nearest = min((lab.run((edit,)).residue for part in parts for edit in part), default=0.0)
    found = (fit(lab, part, most=HOPEFUL * nearest) for part in parts)
    return tuple((edit,) for edit in found if edit is not None)


def _pairs(
    lab: Lab, sets: list[Edits], runs: list[Tried], verdict: Verdict
) -> tuple[list[Edits], list[Tried], Verdict]:
    """Try two edits at once, the nearest six parts with every edit; each has to be needed.

    Returns the pairs too only if one of them is proven, else what was given.
    """
    first: dict[object, Edits] = {}
    for edits in lab.ranked(sets[1:]):
        first.setdefault(_part(edits), edits)
    pairs: dict[frozenset[object], Edits] = {}
    for near in [*first.values()][:BEAM]:
        for edits in sets[1:]:
            if near[0].cause != edits[0].cause:
                pairs.setdefault(frozenset((near[0].key, edits[0].key)), (*near, *edits))
    order, before = lab.ranked(pairs.values()), lab.rounding
    again = _promising(lab, sets, order)
    choose_rounding(lab, [*order[:MANY], *again])  # two mistakes hide the rounding from every single edit
    if lab.rounding is not before:
        # pairs that were far are far whatever the rounding
        order = lab.ranked(order[: 2 * MANY])
        pairs = {frozenset(edit.key for edit in pair): pair for pair in order}
        again = [*again, *_promising(lab, sets, order)]
    every = [*sets, *pairs.values(), *again]
    decided, all_runs = _judged(lab, every)
    best = every[decided.best]
    if decided.kind != PROVEN or len(best) < 2:
        lab.rounding = before
        return sets, runs, verdict
    for edit in best:  # each left out in turn
        alone = lab.run(tuple(other for other in best if other is not edit), whole=True, floor=True)
        needed = (
            ahead(all_runs[decided.best].squares, alone.squares) >= SURE_SHARE and alone.residue > WITHIN * alone.floor
        )
        if not needed or are_twins(all_runs[decided.best], alone):
            lab.rounding = before
            return sets, runs, verdict
    return every, all_runs, decided


def _hides_another(lab: Lab, edits: Sequence[Edit], best: Edits) -> bool:
    """Return whether a second edit takes away what a rounding was blamed for."""
    taken, lab.rounding = lab.rounding, EXACT if lab.rounding.of_results else lab.rounding
    causes = {edit.cause for edit in best}
    beside = [lab.run((*best, edit)).residue for edit in edits if edit.cause not in causes]
    hides = min(beside, default=math.inf) < PROMISING * lab.run(best).residue
    lab.rounding = taken
    return hides


def _promising(lab: Lab, sets: Sequence[Edits], order: Sequence[Edits]) -> list[Edits]:
    """Return the nearest pairs with their numbers fitted again, if they come much nearer than every single edit."""
    reach = PROMISING * min(lab.run(edits).residue for edits in sets)
    promising = [pair for pair in order[:REFITTED] if lab.run(pair).residue < reach]
    return [refitted for pair in promising for refitted in _refitted(lab, pair)]


def _refitted(lab: Lab, pair: Edits) -> list[Edits]:
    """Return a pair with the numbers fitted in each other's presence; nothing if neither has one."""
    edits = list(pair)
    for _ in range(2):
        for place, edit in enumerate(edits):
            beside = tuple(other for other in edits if other is not edit)
            if edit.number is not None and isinstance(edit.b, float | int):
                edits[place] = fit(lab, [edit], beside, start=float(edit.b)) or edit
    return [tuple(edits)] if any(edit.fitted for edit in edits) else []


def _hidden(lab: Lab, edits: Sequence[Edit]) -> Edits:
    """Return the edits whose answers are within rounding of the unedited ones."""
    unedited = lab.run((), floor=True)
    shown = max(WELL_ABOVE * unedited.floor, LEAST_FLOOR)
    return tuple(edit for edit in edits if lab.effect(lab.run((edit,)), unedited) < shown)
