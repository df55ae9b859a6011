"""Finds the steps of a side that tells its vectors only before and after them, guided by the other side's steps.

A trace file of another engine, or a graph, has q as projected and q at the product, and nothing between. If both sides
have the same input, the other side's steps are tried first, then variants that drop or reorder steps, then variants in
which one step is fitted. After each, a factor, an offset or another order of heads may follow. The first variant that
gives the values at the product within rounding is taken.

If a norm and a rotation are both unknown, lengths separate them. A rotation keeps the length of a pair, so the gains of
its two channels can be found without the angles. Let x be the values before, with mean square 1, and y the values
after. If the norm comes first, |y|^2 of a pair is g1^2 x1^2 + g2^2 x2^2. If it comes second, |x|^2 is
(y1 / g1)^2 + (y2 / g2)^2. Both are linear in the squares. The signs of gains stay unknown and are taken as positive; an
amplitude counts as part of the gain. Norms that subtract a mean can't be found this way.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.infer.evidence import STEPS, SearchWork
from sqrtdk.compare.infer.fit.norm import fit_norm
from sqrtdk.compare.inside.call_numbers import ObservedVector
from sqrtdk.compare.inside.compute import apply_step, centred, dtype_by_name, follow_path
from sqrtdk.compare.inside.program import (
    NormStep,
    PathStep,
    Rotation,
    RoundingStep,
    VectorPath,
    layout_order,
    steps_in_other_layout,
)
from sqrtdk.compare.rounding.precision import rounding_unit, stored_in
from sqrtdk.compare.rounding.vectors import PROJECTION_ROUNDINGS, Steps, agrees, allowed, inverse
from sqrtdk.tracing.probe.rotation import fit_rotation

NORM_KINDS = ("rms", "layer", "l2")
MOST_KNOWN_STEPS = 4  # steps of the other side; more have too many orders to try
USUAL_EPS = (1e-6, 1e-5)  # usual eps of norms; if eps shows in the values at all, the two give different ones
PASSES = 16  # passes over all numbers that one candidate takes
LEAST_LENGTHS = 3  # lengths needed to fit the two gains of a pair


def infer_path(
    projected: Tensor,
    used: Tensor,
    other: VectorPath,
    *,
    dtype: torch.dtype | None = None,
    rows: bool = True,
    work: SearchWork | None = None,
) -> VectorPath | None:
    """Return the path of a side of which two tensors are known.

    Args:
        projected: (B, H, L, E), output of the projection; the other side's if both have the same input.
        used: (B, H or Hq, L, E), at the product.
        other: the path of the other side, whose steps are tried first.
        dtype: dtype in which this side computed; None: that of `used`.
        rows: whether to try the rows of the projection in the order of the other rotary layout.
        work: what may be computed; None bounds nothing.

    Returns:
        `other` with the steps, factor, order of heads or bias that give `used`; None if no variant does.

    Example:
        >>> x = torch.randn(1, 4, 6, 8)
        >>> path = infer_path(x, torch.nn.functional.rms_norm(x, (8,), eps=1e-6), VectorPath())
        >>> [step.kind for step in path.steps]
        ['rms']
    """
    if projected.shape[::2] != used.shape[::2] or projected.shape[-1] != used.shape[-1]:
        return None
    dtype = dtype or used.dtype
    entered, wanted = projected.double(), used.double()
    if not bool(torch.isfinite(entered).all()) or not bool(torch.isfinite(wanted).all()):
        return None
    lesser = stored_in(wanted, dtype)
    if lesser is not None and stored_in(entered, dtype) is None:  # the last step is a cast that no code tells
        rounding = RoundingStep(str(lesser).removeprefix("torch."), by_values=True)
        uncast = replace(other, steps=tuple(step for step in other.steps if step != rounding))
        path = infer_path(projected, used, uncast, dtype=lesser, rows=rows)
        return None if path is None else replace(path, steps=(*path.steps, rounding))
    known = list(dict.fromkeys((*_shapes(other.steps), *_varied(other.steps, entered, wanted))))
    # The simplest explanation first: no fitted factor, offset or order of heads.
    if entered.shape == wanted.shape:
        exact = next((steps for steps in known if agrees(steps, entered, wanted, dtype)), None)
        if exact is not None:
            return replace(other, steps=exact, scaled=1.0)
    relaid, order = _relaid(other, entered.shape[-1])
    there = relaid is not None and entered.shape == wanted.shape
    if there and relaid is not None and agrees(relaid.steps, entered[..., order], wanted, dtype):
        return relaid
    every, work = itertools.chain(known, _fitted(entered, wanted, dtype, other.steps)), work or SearchWork()
    # each head of one side is held against every head of the other
    cost = entered.numel() * (PASSES + wanted.shape[1])
    bounded = itertools.takewhile(lambda _: work.takes(cost, STEPS), every)
    paths = (_finished(steps, entered, wanted, dtype, other) for steps in bounded)
    found = next((path for path in paths if path is not None), None)
    if found is not None or relaid is None or not rows:
        return found
    return infer_path(entered[..., order], used, relaid, dtype=dtype, rows=False, work=work)


def _relaid(other: VectorPath, features: int) -> tuple[VectorPath | None, Tensor]:
    """Return the path with rows and rotation in the other rotary layout, and that order of the channels, (E,).

    A converted checkpoint has both. Returns None for the path if it has no rotation or its projection is unknown.
    """
    turned = next((step for step in other.steps if isinstance(step, Rotation)), None)
    affine, order = other.affine, torch.arange(features)
    if turned is None or affine is None or turned.spread or turned.width == 2:
        return None, order
    order = layout_order(order, turned)
    bias = None if affine.bias is None else affine.bias[:, order]
    moved = replace(affine, weight=affine.weight[:, order], bias=bias, features=affine.features[:, order])
    return replace(other, affine=moved, steps=steps_in_other_layout(other.steps, order), scaled=1.0), order


def _varied(steps: Steps, entered: Tensor, wanted: Tensor) -> Iterator[Steps]:
    """Yield the steps with one norm of another kind, over other features or with another eps."""
    for i, step in enumerate(steps):
        if not isinstance(step, NormStep):
            continue
        for kind, over in itertools.product(NORM_KINDS, ("head", "heads")):
            if (kind, over) != (step.kind, step.over):
                yield (*steps[:i], replace(step, kind=kind, over=over), *steps[i + 1 :])
        if entered.shape == wanted.shape and step.kind != "l2" and step.shift is None:
            yield (*steps[:i], replace(step, eps=_eps(steps, i, step, entered, wanted)), *steps[i + 1 :])


def _fitted(entered: Tensor, wanted: Tensor, dtype: torch.dtype, others: Steps) -> Iterator[Steps]:
    """Yield steps of which one or two are fitted."""
    if entered.shape != wanted.shape:
        return
    solved = (_solved(*shape, entered, wanted, dtype) for shape in _unknown_shapes(others))
    for steps in itertools.chain(solved, _both_unknown(entered, wanted, dtype)):
        if steps is not None:
            yield _simplest(steps, others, entered, wanted, dtype)


def _shapes(steps: Steps) -> list[Steps]:
    """Return the steps, then subsets of them, then other orders."""
    steps = steps[:MOST_KNOWN_STEPS]
    kept = [some for count in range(len(steps), -1, -1) for some in itertools.combinations(steps, count)]
    return [*kept, *(order for some in kept for order in itertools.permutations(some) if order != some)]


def _unknown_shapes(steps: Steps) -> Iterator[tuple[Steps, type, Steps]]:
    """Yield the steps with one of them unknown, then with an unknown one added.

    Each is (steps before it, its type, steps after it).
    """
    every = _shapes(steps)
    for some in every:
        for i, step in enumerate(some):
            yield some[:i], Rotation if isinstance(step, Rotation) else NormStep, some[i + 1 :]
    for some in every:
        for kind in (Rotation, NormStep):
            if not any(isinstance(step, kind) for step in some):
                yield from ((some[:i], kind, some[i:]) for i in range(len(some), -1, -1))


def _solved(first: Steps, kind: type, last: Steps, entered: Tensor, wanted: Tensor, dtype: torch.dtype) -> Steps | None:
    """Return the steps with the unknown one fitted: the first run forwards, the last run backwards to it."""
    before, after = follow_path(VectorPath(steps=first), entered)[-1], wanted
    for step in reversed(last):
        if isinstance(step, Rotation):
            after = apply_step(inverse(step), after)
        elif isinstance(step, NormStep) and kind is Rotation and step.kind != "layer" and step.shift is None:
            # A rotation keeps lengths, so the divisor of the norm is known without the rotation.
            after = after / step.gain.double()[:, None]
            before = apply_step(replace(step, gain=torch.ones_like(step.gain)), before)
        else:
            return None
    if kind is NormStep:
        norm = fit_norm(before, after, dtype=dtype)
        return None if norm is None else (*first, norm.norm, *last)
    turn = fit_rotation(before, after, dtype=dtype)
    return None if turn is None else (*first, turn.rotation, *last)


def _simplest(steps: Steps, others: Steps, entered: Tensor, wanted: Tensor, dtype: torch.dtype) -> Steps:
    """Return the fitted steps with fields of the other side's steps wherever the values allow that."""
    for i, step in enumerate(steps):
        for other in others:
            for tried in _nearer(step, other):
                now = (*steps[:i], tried, *steps[i + 1 :])
                if agrees(now, entered, wanted, dtype):
                    steps, step = now, tried
                    break
    return steps


def _nearer(step: PathStep, other: PathStep) -> Iterator[PathStep]:
    """Yield the step with fields copied from the other side's step, most fields first."""
    if isinstance(step, Rotation) and isinstance(other, Rotation):
        if step.table.shape == other.table.shape:
            yield replace(step, table=other.table)
        if step.layout == other.layout == "interleaved" and step.first == other.first:  # pairs too slow to show
            shown, hidden = step.table[..., : other.width // 2], other.table[..., step.width // 2 :]
            if hidden.shape[1] == shown.shape[1]:
                count = max(len(shown), len(hidden))
                parts = [part.expand(count, *part.shape[1:]) for part in (shown, hidden)]
                yield replace(step, table=torch.cat(parts, -1))
    elif isinstance(step, NormStep) and isinstance(other, NormStep):
        whole = replace(step, kind=other.kind, gain=other.gain, shift=other.shift, eps=other.eps)
        yield whole
        if (step.kind == "l2") == (other.kind == "l2"):
            yield replace(step, gain=other.gain, shift=other.shift)
            yield replace(step, gain=other.gain, shift=other.shift, eps=other.eps)
            yield replace(step, eps=other.eps)


def _finished(
    steps: Steps, entered: Tensor, wanted: Tensor, dtype: torch.dtype, other: VectorPath
) -> VectorPath | None:
    """Return a path of these steps: unchanged, or with a factor, permuted heads, or an offset of the projection."""
    got = follow_path(VectorPath(steps=steps), entered)[-1]
    near = allowed(steps, entered, dtype)
    if got.shape == wanted.shape:
        if _within(got, wanted, near):
            return replace(other, steps=steps, scaled=1.0)
        factor = _factor(got, wanted)
        if _within(got * factor, wanted, near * factor.abs()):
            whole = float(factor.flatten()[0])
            one = _within(got * whole, wanted, near * abs(whole))
            return replace(other, steps=steps, scaled=whole if one else factor)
        offset = _offset(steps, entered, wanted, dtype)
        if offset is not None and other.affine is not None:
            moved = offset if other.affine.bias is None else other.affine.bias + offset
            return replace(other, affine=replace(other.affine, bias=moved), steps=steps, scaled=1.0)
    heads = _heads(got, wanted, near)
    if heads is None:
        return None
    if wanted.shape[1] == got.shape[1] and other.affine is not None:
        own, bias = other.affine, None if other.affine.bias is None else other.affine.bias[heads]
        own = replace(own, weight=own.weight[heads], bias=bias, features=own.features[heads])
        return replace(other, affine=own, steps=steps, scaled=1.0)
    return replace(other, steps=steps, heads=heads, scaled=1.0) if other.heads is not None else None


def _within(got: Tensor, wanted: Tensor, near: Tensor) -> bool:
    return bool(((got - wanted).abs() <= near).all())


def _factor(got: Tensor, wanted: Tensor) -> Tensor:
    """Return the least-squares factor of each head, (H, 1, 1)."""
    return (got * wanted).sum((0, 2, 3)).div((got * got).sum((0, 2, 3)).clamp_min(1e-300))[:, None, None]


def _offset(steps: Steps, entered: Tensor, wanted: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return the constant offset of the projection, (H, E); None if it varies or a step can't be run backwards."""
    before = wanted
    for step in reversed(steps):
        if not isinstance(step, Rotation):
            return None
        before = apply_step(inverse(step), before)
    offset = (before - entered).mean((0, 2))
    shifted = entered + offset[:, None]
    rows = entered.shape[0] * entered.shape[2]
    bound = PROJECTION_ROUNDINGS * rounding_unit(dtype) * (entered.abs() + offset.abs()[:, None])
    if rows < 2 or not agrees(steps, shifted, wanted, dtype, bound):
        return None
    return offset


def _heads(got: Tensor, wanted: Tensor, near: Tensor) -> Tensor | None:
    """Return for each head of `wanted` the index of the equal head of `got`; None if a head has no equal."""
    found = []
    for head in range(wanted.shape[1]):
        fits = ((got - wanted[:, head : head + 1]).abs() <= near).all(-1).all(-1).all(0)
        if not bool(fits.any()):
            return None
        found.append(int(fits.nonzero()[0]))
    return torch.tensor(found)


def with_known_step(path: VectorPath, seen: ObservedVector, known: Iterable[PathStep]) -> VectorPath:
    """Return the path with numbers of known steps in its own steps, if a cast followed these.

    A step and its cast are recorded as one, so the step's output is known only to the precision of the cast. The
    numbers are taken only if they give the recorded values. Known are the other side's steps, and those of this side's
    q for its k.
    """
    rounding = path.steps[-1] if path.steps else None
    if seen.projected is None or not isinstance(rounding, RoundingStep) or rounding.dtype == "int8":
        return path
    if len(path.steps) != len(seen.steps) + 1 and not rounding.by_values:
        return path
    if not isinstance(path.steps[-2:][0], NormStep | Rotation):  # `q.half().float()` has no step before the cast
        return path
    steps, others = path.steps[:-1], tuple(step for step in known if isinstance(step, NormStep | Rotation))
    found = _simplest(steps, others, seen.projected.double(), seen.used.double(), dtype_by_name(rounding.dtype))
    return path if found == steps else replace(path, steps=(*found, rounding))


# -- a norm and a rotation, both unknown -------------------------------------------------------------------------------


def _both_unknown(before: Tensor, after: Tensor, dtype: torch.dtype) -> Iterator[Steps]:
    """Yield steps that may lead from `before` to `after`, (B, H, L, E): norm first, then rotation first."""
    features = before.shape[-1]
    if features % 2 or before[..., 0].numel() < LEAST_LENGTHS:
        return
    channels = torch.arange(features)
    for eps in USUAL_EPS:
        for order in (channels.view(2, -1).T, channels.view(-1, 2)):  # (E / 2, 2), the channels of each pair
            norm = NormStep("rms", torch.ones(1, features, dtype=torch.float64), eps=eps)
            unit = apply_step(norm, before)
            for first in (True, False):
                gain = _gain(unit, after, order) if first else _gain(after, unit, order)
                if gain is None:
                    continue
                norm = NormStep("rms", gain if first else 1 / gain, eps=eps)
                turned = (unit * gain, after) if first else (unit, after * gain)
                fit = fit_rotation(*turned, dtype=dtype)
                if fit is not None:
                    yield (norm, fit.rotation) if first else (fit.rotation, norm)


def _gain(x: Tensor, y: Tensor, order: Tensor) -> Tensor | None:
    """Return gains of x, (1, E), that give its pairs the lengths of y's; None if a solved square is not positive."""
    squares = x[..., order].square().flatten(0, 2).transpose(0, 1)
    lengths = y[..., order].square().sum(-1).flatten(0, 2).T[..., None]
    # errors are relative to the length: each equation is divided by it
    size = lengths.clamp_min(1e-12 * float(lengths.mean()) + torch.finfo(torch.float64).tiny)
    solved = torch.linalg.lstsq(squares / size, lengths / size).solution[..., 0]
    if not bool((solved > 0).all()):
        return None
    gain = torch.empty(1, x.shape[-1], dtype=torch.float64)
    gain[0, order.flatten()] = solved.flatten().sqrt()
    return gain


def _eps(steps: Steps, place: int, norm: NormStep, before: Tensor, after: Tensor) -> float:
    """Return the eps of the norm at `place`; all other steps are known.

    Each token is sqrt(m / (m + eps)) times its value without eps, where m is its mean square at the norm. Rotations
    after the norm keep that factor.
    """
    without, axes = replace(norm, eps=0.0), (1, 3) if norm.over == "heads" else (3,)
    bare = follow_path(VectorPath(steps=(*steps[:place], without, *steps[place + 1 :])), before)[-1]
    m = centred(without, follow_path(VectorPath(steps=steps[:place]), before)[-1])[1].square()
    tiny = torch.finfo(torch.float64).tiny
    ratio = (after * bare).sum(axes, keepdim=True) / bare.square().sum(axes, keepdim=True).clamp_min(tiny)
    # the error of a token's estimate of eps grows with its m
    weight = m.clamp_min(1e-12 * float(m.mean()) + tiny) ** -2
    return max(0.0, float((weight * m * (ratio.clamp_min(1e-3) ** -2 - 1)).sum() / weight.sum()))
