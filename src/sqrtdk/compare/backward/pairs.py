"""Gradients of two models in pairs: those of q, k and v, and those of parameters.

Two gradients agree if they differ by no more than rounding does. That is measured, not assumed: the distance of a
side's gradient from that of its float64 copy, with all sums over rows, keys and heads that stand in between.

A side may hold k and v once for each group of query heads, or repeat them:

    k = k.repeat_interleave(4, dim=1)          # eager attention of transformers
    sdpa(q, k, v, enable_gqa=True)             # no copies

The gradient of a value that is read several times is the sum of those of its copies, so these are summed first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress

import torch
from torch import Tensor

from sqrtdk.compare.backward.records import GradientDiff
from sqrtdk.compare.backward.run import VECTOR_NAMES, Gradient, RunGradients, SideGradients
from sqrtdk.compare.records import DiffReport

_SLACK = 4.0  # times the measured rounding, which differs from one order of sums to another
_SAME_VALUES = 1e-2  # of values of q, k and v that a difference of the forward passes leaves the same
Pick = Callable[[RunGradients], Gradient]
Turn = Callable[[Tensor], Tensor]


def compare_gradients(
    a: SideGradients, b: SideGradients, pick_a: Pick, pick_b: Pick
) -> tuple[bool | None, float | None, float | None]:
    """Compare two gradients.

    Args:
        a: Side A.
        b: Side B.
        pick_a: Returns A's gradient from the gradients of a run.
        pick_b: Returns B's, in A's layout.

    Returns:
        Whether they agree, None if that can't be judged; the difference and the allowed one, both as a share of A's.
    """
    one, other = pick_a(a.own), pick_b(b.own)
    if one is None or other is None:
        size = math.inf if one is None else 1.0
        return (True, 0.0, 0.0) if one is other else (False, size, 0.0)
    difference = _share(one, other)
    rounding = [
        _share(exact, own)
        for side, pick, own in ((a, pick_a, one), (b, pick_b, other))
        if side.exact is not None and (exact := _picked(pick, side.exact)) is not None
    ]
    if not rounding:
        return (True if not difference else None), difference, None
    unit = torch.finfo(a.dtype).eps + torch.finfo(b.dtype).eps
    # Of two sides of one dtype the smaller rounding counts: a backward pass that rounds on its way is no measure.
    measured = 2 * min(rounding) if a.dtype == b.dtype else sum(rounding)
    allowed = _SLACK * (measured + unit)
    return difference <= allowed, difference, allowed


def _picked(pick: Pick, of: RunGradients) -> Gradient:
    with suppress(KeyError, IndexError):
        return pick(of)
    return None


def _share(one: Tensor, other: Tensor) -> float:
    """Return the root mean square of the difference, as a share of that of `one`."""
    x, y = one.detach().to(torch.float64), other.detach().to(torch.float64)
    size = float(x.norm())
    far = float((x - y).norm())
    return far / size if size else (0.0 if not far else math.inf)


# -- q, k and v --------------------------------------------------------------------------------------------------------


def attention_gradients(a: SideGradients, b: SideGradients, report: DiffReport) -> Iterator[GradientDiff]:
    """Yield the comparison of q, k and v of each pair of attentions."""
    for pair in report.pairs:
        key_a, key_b = (pair.site_a, pair.index_a), (pair.site_b, pair.index_b)
        one, other = a.own.attentions.get(key_a, {}), b.own.attentions.get(key_b, {})
        for name in VECTOR_NAMES:
            if name not in one or name not in other:
                continue
            found: tuple[bool | None, float | None, float | None] = None, None, None
            for turn_a, turn_b in _turns_to_fewer(one[name][1].shape[1], other[name][1].shape[1]):
                if _same_values(a, b, _value(key_a, name, turn_a), _value(key_b, name, turn_b)):
                    found = compare_gradients(a, b, _operand(key_a, name, turn_a), _operand(key_b, name, turn_b))
                    break
            yield GradientDiff(name, pair.site_a, pair.site_b, *found)


def _same_values(a: SideGradients, b: SideGradients, pick_a: Pick, pick_b: Pick) -> bool:
    """Return whether values of q, k or v are the same up to the rounding of the forward passes.

    They are not if the features of a rotation lie in another order, or if other heads are summed.
    """
    one, other = pick_a(a.own), pick_b(b.own)
    if one is None or other is None or one.shape != other.shape:
        return False
    same, difference, _ = compare_gradients(a, b, pick_a, pick_b)
    return same is True or (difference is not None and difference < _SAME_VALUES)


def _turns_to_fewer(heads_a: int, heads_b: int) -> list[tuple[Turn, Turn]]:
    """Return the ways to bring tensors of A and B to the same heads; one of them may repeat the heads of the other."""
    fewer = min(heads_a, heads_b)
    return [(turn_a, turn_b) for turn_a in _turns(heads_a, fewer) for turn_b in _turns(heads_b, fewer)]


def _turns(heads: int, fewer: int) -> list[Turn]:
    """Return the sums over copies of heads: copies side by side, or all heads again; of as many heads, nothing."""
    if heads == fewer:
        return [lambda x: x]
    if heads % fewer:
        return []
    return [lambda x: x.unflatten(1, (fewer, -1)).sum(2), lambda x: x.unflatten(1, (-1, fewer)).sum(1)]


def _operand(key: tuple[str, int], name: str, turn: Turn) -> Pick:
    def pick(gradients: RunGradients) -> Gradient:
        gradient = gradients.attentions[key][name][0]
        return None if gradient is None else turn(gradient)

    return pick


def _value(key: tuple[str, int], name: str, turn: Turn) -> Pick:
    def pick(gradients: RunGradients) -> Gradient:
        values = gradients.attentions[key][name][1]
        turned = turn(values)
        return turned * (turned.shape[1] / values.shape[1])  # the mean of equal copies is the value

    return pick


# -- parameters --------------------------------------------------------------------------------------------------------


def parameter_gradients(a: SideGradients, b: SideGradients, report: DiffReport) -> Iterator[GradientDiff]:
    """Yield the comparison of each pair of parameters that both backward passes reach."""
    for name_a, name_b, turn in _paired(a, b, report):
        one, other = a.own.parameters[name_a], b.own.parameters[name_b]
        if one is not None and other is not None and one.shape == turn(other).shape:
            found = compare_gradients(a, b, _parameter(name_a), _parameter(name_b, turn))
            yield GradientDiff("parameter", name_a, name_b, *found)


def reached_alone(a: SideGradients, b: SideGradients, report: DiffReport) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the parameters that only A's backward pass reaches, by A's names, and those that only B's does, by B's."""
    pairs = [(x, y) for x, y, _ in _paired(a, b, report)]
    reached = [{name for name, g in side.own.parameters.items() if g is not None} for side in (a, b)]
    return (
        tuple(x for x, y in pairs if x in reached[0] and y not in reached[1]),
        tuple(y for x, y in pairs if y in reached[1] and x not in reached[0]),
    )


def _paired(a: SideGradients, b: SideGradients, report: DiffReport) -> Iterator[tuple[str, str, Turn]]:
    """Yield the names of parameters that belong together, and what lays B's out as A's."""
    known = {pair.a: pair for pair in report.weights.pairs} if report.weights is not None else {}
    for name in a.own.parameters:
        pair = known.get(name)
        if pair is None and name in b.own.parameters:
            yield name, name, lambda x: x
        elif pair is not None and pair.b in b.own.parameters and not (pair.rows_a or pair.rows_b):
            if pair.layout == "same":
                yield name, pair.b, lambda x: x
            elif pair.layout == "transposed":
                yield name, pair.b, lambda x: x.mT


def _parameter(name: str, turn: Turn = lambda x: x) -> Pick:
    def pick(gradients: RunGradients) -> Gradient:
        gradient = gradients.parameters[name]
        return None if gradient is None else turn(gradient)

    return pick
