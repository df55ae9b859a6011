"""Whether what two attentions do otherwise cancels before it leaves their modules."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sqrtdk.compare.entering import Blind, exact_of
from sqrtdk.compare.first_module import gap_of, level_of, matched
from sqrtdk.compare.modules import Kept, ModuleStep, Place
from sqrtdk.compare.sides import Side
from sqrtdk.errors import SqrtdkError
from sqrtdk.tracing.tape.stance import Disturbed


def leaves_alike(a: Side, b: Side, pairs: Sequence[tuple[Place, Place]], blind: Blind) -> list[bool]:
    """Whether modules get the same and give the same, whatever their attentions do on the way.

    `(weights @ v) * sigmoid(lse - sink)` is attention with a sink: other weights, and the same output. A module that
    gives nothing but zeros, or fewer rows than it gets, as one that returns the last token, tells nothing. Nor does one
    whose output does not change with its attention, as `x + proj(heads)` where `proj` begins as zero.

    Args:
        a: A.
        b: B.
        pairs: places of modules of A and of B.
        blind: rows that see no key on one side.
    """
    exact = [exact_of(side, listen=True) for side in (a, b)]
    if exact[0] is None or exact[1] is None:
        return [False] * len(pairs)
    steps = [{step.place: step for step in one.steps} for one in exact if one is not None]
    allowed = level_of(exact, 0.0)[0]
    alike = []
    for place_a, place_b in pairs:
        one, other = steps[0].get(place_a), steps[1].get(place_b)
        if one is None or other is None or not one.gives or not _rows(one.gives[0]) >= _rows_taken(one):
            alike.append(False)
            continue
        takes, gives = matched(one.takes, other.takes), matched(one.gives[:1], other.gives)
        same = [bool(pairs) and all(gap_of(x, y, blind) <= allowed for x, y in pairs) for pairs in (takes, gives)]
        alike.append(all(same) and bool(one.gives[0].values.any()) and _reacts(a, one, blind, allowed))
    return alike


def _reacts(a: Side, step: ModuleStep, blind: Blind, allowed: float) -> bool:
    """Whether what a module gives changes where its attention gives something else."""
    call = next((call for call in a.calls if (call.site, call.index) == step.place), None)
    if call is None or call.output is None or a.again is None:
        return False
    a.forwards += 1
    by = torch.linspace(-0.5, 0.5, call.output.numel()).to(call.output).view_as(call.output)
    other = Disturbed(call.output, call.output * by)
    try:
        with other:
            run = a.again(True, None)
    except (SqrtdkError, RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    gives = [own.gives[:1] for own in run.steps if own.place == step.place]
    return other.done and any(gap_of(x, y, blind) > allowed for own in gives for x, y in matched(step.gives[:1], own))


def _rows(kept: Kept) -> int:
    return math.prod(kept.shape[:-1])


def _rows_taken(step: ModuleStep) -> int:
    """Rows of its main argument; of ids, one each."""
    main = step.takes[0] if step.takes else None
    return 0 if main is None else _rows(main) if main.values.is_floating_point() else math.prod(main.shape)
