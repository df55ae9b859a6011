"""Compares calls of modules of both sides: which tensors belong together, how far they are apart, what cancels.

Both models have run in float64 (`measured.exact_of`), so that rounding hides nothing relevant.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from sqrtdk.compare.inside.pair import JudgedPair, cancelled_within
from sqrtdk.compare.outside.modules import KeptTensor, ModuleStep
from sqrtdk.compare.rounding.precision import rounding_unit
from sqrtdk.compare.rounding.tensors import (
    UNMEASURED_ROUNDINGS,
    BlindRows,
    Entering,
    TensorOfBoth,
    exact_of,
    seeing_entries,
)
from sqrtdk.compare.sides import FinerRun, ModelSide
from sqrtdk.errors import MODEL_ERRORS
from sqrtdk.modules.calls import CallPlace
from sqrtdk.tracing.tape.stance import Disturbed
from sqrtdk.tracing.tensors import CallTensors

_LOWEST_TERM = -1e4  # a float mask adds this or less to hide a key; -1e4 and finfo.min have the same effect
_ENTRY_SHARE = 8.0  # a difference counts as entering if it is at least 1/8 of the difference at the end


def level_of(exact: Sequence[FinerRun | None], share: float) -> tuple[float, float]:
    """Return the relative rounding error of one module call, and the largest relative difference that is ignored.

    The first is 16 times the unit roundoff of the runs, at least that of float32: models cast on their way even when
    run in float64 (`x.float()` in a norm).

    Args:
        exact: float64 runs of the sides; at least one is not None.
        share: difference of the final outputs, relative to their size. The second number is an eighth of it, or
            infinite if it is 0.
    """
    units = [max(rounding_unit(one.dtype), rounding_unit(torch.float32)) for one in exact if one is not None]
    return UNMEASURED_ROUNDINGS * max(units), share / _ENTRY_SHARE if share else math.inf


def matched(one: Sequence[KeptTensor], other: Sequence[KeptTensor]) -> list[tuple[KeptTensor, KeptTensor]]:
    """Return pairs of tensors with equal shapes that are both floating or both not, in the order of `one`.

    Each tensor is used once; those without a partner are left out.
    """
    left = list(other)
    pairs = []
    for x in one:
        kind = x.values.is_floating_point()
        y = next((y for y in left if y.shape == x.shape and y.values.is_floating_point() == kind), None)
        if y is not None:
            left.remove(y)
            pairs.append((x, y))
    return pairs


def gap_of(x: KeptTensor, y: KeptTensor, blind: BlindRows) -> float:
    """Return the root mean square of x - y, relative to that of x.

    It is 0 for equal tensors, and infinite for unequal integers or if x is 0. Numbers below -1e4 count as -1e4, as in
    masks.

    Args:
        x: tensor of A; possibly only every n-th entry was kept.
        y: tensor of B, of the same shape.
        blind: rows that are left out, as `rows_left_out` returns them.
    """
    # Long tensors keep every stride-th number; both are thinned to the numbers that they share.
    stride = math.lcm(x.stride, y.stride)
    one, other = x.values[:: stride // x.stride], y.values[:: stride // y.stride]
    if torch.equal(one, other):
        return 0.0
    if not one.is_floating_point():
        return math.inf
    rows = seeing_entries(x.shape, blind)
    counted = None if rows is None else rows.reshape(-1)[::stride]
    # -1e4 in one float mask and finfo.min in the other hide the same keys
    one, other = (values.double().clamp_min(_LOWEST_TERM) for values in (one, other))
    both = TensorOfBoth("", "", one, other, counted, (0.0, 0.0))
    gap, size = both.gap[0], both.size(one)[0]
    return gap / size if size else gap and math.inf


# -- what cancels ------------------------------------------------------------------------------------------------------


def leaves_alike(
    a: ModelSide, b: ModelSide, pairs: Sequence[tuple[CallPlace, CallPlace]], blind: BlindRows
) -> list[bool]:
    """Return for each pair of modules whether equal inputs give equal outputs, whatever their attentions do inside.

    `(weights @ v) * sigmoid(lse - sink)` is attention with a sink: other weights, the same output. Three kinds of
    modules prove nothing and give False: one that gives only zeros, one that gives fewer rows than it gets (it returns
    the last token), and one whose output does not depend on its attention (`x + proj(heads)` where `proj` starts as
    zero).

    Args:
        a: side A; it runs again in float64.
        b: side B; it runs again in float64. If either side can't, all results are False.
        pairs: module path and number of the call, in A and in B.
        blind: rows that are left out, as `rows_left_out` returns them.
    """
    exact = [exact_of(side, listen=True) for side in (a, b)]
    if exact[0] is None or exact[1] is None:
        return [False] * len(pairs)
    steps = [{step.place: step for step in one.steps} for one in exact if one is not None]
    allowed = level_of(exact, 0.0)[0]
    alike = []
    for place_a, place_b in pairs:
        one, other = steps[0].get(place_a), steps[1].get(place_b)
        if one is None or other is None or not one.gives or _rows(one.gives[0]) < sum(map(_rows, one.takes[:1])):
            alike.append(False)
            continue
        takes, gives = matched(one.takes, other.takes), matched(one.gives[:1], other.gives)
        same = [bool(pairs) and all(gap_of(x, y, blind) <= allowed for x, y in pairs) for pairs in (takes, gives)]
        alike.append(all(same) and bool(one.gives[0].values.any()) and _reacts(a, one, blind, allowed))
    return alike


def _reacts(a: ModelSide, step: ModuleStep, blind: BlindRows, allowed: float) -> bool:
    """Return whether the output of a module changes if its attention gives something else."""
    call = next((call for call in a.calls if (call.site, call.index) == step.place), None)
    if call is None or call.output is None or a.again is None:
        return False
    a.forwards += 1
    by = torch.linspace(-0.5, 0.5, call.output.numel()).to(call.output).view_as(call.output)
    other = Disturbed(call.output, call.output * by)
    try:
        with other:
            run = a.again(True, None)
    except MODEL_ERRORS:
        return False
    gives = [own.gives[:1] for own in run.steps if own.place == step.place]
    return other.done and any(gap_of(x, y, blind) > allowed for own in gives for x, y in matched(step.gives[:1], own))


def _rows(kept: KeptTensor) -> int:
    """Return the number of rows of a tensor; each id of an integer tensor is a row."""
    return math.prod(kept.shape[:-1] if kept.values.is_floating_point() else kept.shape)


def judged_as_they_leave(
    a: ModelSide,
    b: ModelSide,
    calls: Sequence[tuple[CallTensors, CallTensors]],
    judged: Sequence[JudgedPair],
    entering: Sequence[Entering],
    blind: BlindRows,
) -> list[JudgedPair]:
    """Return the judgements, with a difference marked as cancelled if the module around the attention gives the same.

    Only pairs that differ though their inputs don't are tried, by `leaves_alike`.

    Args:
        a: side A.
        b: side B.
        calls: the pairs of calls.
        judged: judgement of each pair.
        entering: comparison of the inputs of each pair.
        blind: rows that are left out, as `rows_left_out` returns them.
    """
    both = enumerate(zip(judged, entering, strict=True))
    doubtful = [place for place, (own, comes) in both if own.same is False and comes.stage.same is not False]
    if not doubtful or a.again is None or b.again is None:
        return list(judged)
    places = [((one.site, one.index), (other.site, other.index)) for one, other in (calls[i] for i in doubtful)]
    alike = dict(zip(doubtful, leaves_alike(a, b, places, blind), strict=True))
    return [cancelled_within(own) if alike.get(place) else own for place, own in enumerate(judged)]
