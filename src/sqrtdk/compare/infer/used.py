"""Finds the paths of two sides whose vectors are known only at the product.

B's vectors are then a change of A's: rotated by other angles, permuted, multiplied by a factor, shifted by an offset.
To name a changed rotation, the values before it are needed, and A's rotation is unknown. So usual rotations are
assumed and undone: positions from 0, a base of a released model, either layout. An assumption holds if the rotation
that then leads to B's values is equally usual: frequencies by a law of the same bases, or the same frequencies at other
positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.infer.evidence import STEPS, SearchWork
from sqrtdk.compare.infer.fit.norm import fit_norm
from sqrtdk.compare.infer.vectors import infer_path
from sqrtdk.compare.inside.compute import apply_step
from sqrtdk.compare.inside.program import Affine, NormStep, Rotation, RoundingStep, VectorPath
from sqrtdk.compare.rounding.precision import stored_in
from sqrtdk.compare.rounding.vectors import Steps, agrees, allowed, inverse
from sqrtdk.tracing.probe.rotation import fit_rotation
from sqrtdk.tracing.probe.tables import Law, Turn, take_apart

# bases of released models, most common first: the first match wins
USUAL_BASES = (1e4, 5e5, 1e6, 1e5, 1e3, 5e6, 1e7, 2e5, 4e4, 1.6e5, 3e5, 8e6, 1.5e5, 1e8, 1e2)
WIDTH_DIVISORS = (1, 2, 4)  # a head's channels divided by those that rotate
USUAL_BASE_DISTANCE = 1e-2  # relative distance up to which a fitted base counts as one of the list
WHOLE_POSITION_DISTANCE = 0.05  # distance of a position from a whole number
LEAST_ROWS_EXPLAINED = 3  # a fitted rotation explains fewer rows than this by chance
MOST_DISTANCES = 2**22  # distances of features that are computed at once
PRODUCTS_A_NUMBER = 16  # a multiplication in a product of matrices costs less than a number made by itself
PASSES_OF_A_TURN = 8  # passes over all numbers that one assumed rotation takes


@dataclass(frozen=True, slots=True, eq=False)
class UsedPair:
    """Ways of A and B from a common input to their vectors at the product.

    Attributes:
        input: (B, L, H * E): A's vectors before the assumed rotation.
        a: A's path; its projection is the identity.
        b: B's path.
    """

    input: Tensor
    a: VectorPath
    b: VectorPath


def compare_used(
    a_used: Tensor, b_used: Tensor, *, dtype: torch.dtype | None = None, work: SearchWork | None = None
) -> UsedPair | None:
    """Return the simplest paths found that give both sides' vectors; None if none fits.

    Args:
        a_used: (B, H, L, E), q, k or v of A at the product.
        b_used: (B, H, L, E), the same of B.
        dtype: dtype in which the sides computed, the coarser of the two; None: the coarser dtype of the tensors.
        work: what may be computed; None bounds nothing.

    Example:
        >>> x = torch.randn(1, 4, 6, 8)
        >>> compare_used(x, x[:, [1, 0, 2, 3]]).b.affine.features[0].tolist()
        [8, 9, 10, 11, 12, 13, 14, 15]
    """
    if a_used.shape != b_used.shape or not all(bool(torch.isfinite(x).all()) for x in (a_used, b_used)):
        return None
    coarser = max((a_used.dtype, b_used.dtype), key=lambda each: torch.finfo(each).eps)
    dtype = coarser if dtype is None else dtype
    work, a, b = work or SearchWork(), a_used.double(), b_used.double()
    cast = [stored_in(x, dtype) for x in (a, b)]
    if cast[1] is None and cast[0] is not None:
        swapped = compare_used(b_used, a_used, dtype=dtype, work=work)
        return None if swapped is None else UsedPair(swapped.input, swapped.b, swapped.a)
    if cast[0] is None and cast[1] is not None:  # B holds A's values, rotated or as they are, in a smaller dtype
        pair, rounding = compare_used(a, b, dtype=cast[1], work=work), str(cast[1]).removeprefix("torch.")
        if pair is None:
            return None
        return replace(pair, b=replace(pair.b, steps=(*pair.b.steps, RoundingStep(rounding, by_values=True))))
    if not work.takes((a.shape[1] * a.shape[3]) ** 2 / 2, STEPS):  # the projections of a pair take so much memory
        return None
    path = infer_path(a, b, VectorPath(_identity(a)), dtype=dtype, work=work)
    if path is not None and not path.steps:  # equal, or a factor, an offset, another order of heads
        return _pair(a, (), path)
    # A permutation has no fitted numbers, so it comes before the rotation, which has.
    found = _permuted(a, b, dtype, work) or _turned(a, b, dtype, work)
    if found is not None or (path is not None and all(isinstance(step, NormStep) for step in path.steps)):
        return found or (None if path is None else _pair(a, (), path))
    norm = fit_norm(b, a, dtype=dtype)  # a norm that only A has
    return None if norm is None else _pair(b, (norm.norm,), VectorPath())


def _identity(values: Tensor) -> Affine:
    heads, features = values.shape[1], values.shape[3]
    size = heads * features
    weight = torch.eye(size, dtype=torch.float64).view(heads, features, size)
    return Affine("", weight, None, torch.arange(size).view(heads, features))


def _pair(before: Tensor, a: Steps, b: VectorPath) -> UsedPair:
    affine = _identity(before)
    return UsedPair(
        before.transpose(1, 2).flatten(2), VectorPath(affine, a), b if b.affine else replace(b, affine=affine)
    )


def _permuted(a: Tensor, b: Tensor, dtype: torch.dtype, work: SearchWork) -> UsedPair | None:
    """Return paths with permuted channels: each feature of B is the feature of A that is nearest over all rows."""
    if a.shape[0] * a.shape[2] < LEAST_ROWS_EXPLAINED:
        return None
    mine, other = (x.transpose(1, 2).flatten(2).flatten(0, 1).T for x in (a, b))
    if not work.takes(mine.numel() * len(other) / PRODUCTS_A_NUMBER, STEPS):
        return None
    # The distances of all features at once take more memory than the file: 2 GiB for 1024 heads of 16.
    step = max(1, MOST_DISTANCES // len(mine))
    order = torch.cat(
        [torch.cdist(some, mine.contiguous()).argmin(-1) for some in torch.split(other.contiguous(), step)]
    )
    mixed = mine[order].T.view(a.shape[0], a.shape[2], a.shape[1], a.shape[3]).transpose(1, 2)
    if len(set(order.tolist())) < len(order) or not agrees((), mixed, b, dtype):
        return None
    order = order.view(a.shape[1], a.shape[3])
    weight = torch.eye(order.numel(), dtype=torch.float64)[order.flatten()].view(*order.shape, -1)
    return _pair(a, (), VectorPath(Affine("", weight, None, order)))


def _turned(a: Tensor, b: Tensor, dtype: torch.dtype, work: SearchWork) -> UsedPair | None:
    """Return paths in which B rotates differently from A, or one side does not rotate."""
    if a.shape[2] < LEAST_ROWS_EXPLAINED:
        return None
    best: UsedPair | None = None
    for own, before, bound in _supposed(a, dtype):
        if not work.takes(PASSES_OF_A_TURN * a.numel(), STEPS):
            return best
        mine = () if own is None else (own,)
        known = None if own is None else take_apart(own.table)
        for steps in ((), *(() if own is None or known is None else _other_rotations(own, known, a.shape[3]))):
            if agrees(steps, before, b, dtype, bound):
                return _pair(before, mine, VectorPath(steps=steps))
        fit = fit_rotation(before, b, dtype=dtype)
        if fit is None or not agrees((fit.rotation,), before, b, dtype, bound):
            continue
        # The fit is replaced by the usual base and whole positions, and must still agree: only then it is a cause.
        found = _usual(fit.rotation, known)
        if found is None or not agrees((found[1],), before, b, dtype, bound):
            continue  # slowly rotating pairs disagree: the assumption about A is wrong
        if found[0] == 0:
            return _pair(before, mine, VectorPath(steps=found[1:]))
        best = best or _pair(before, mine, VectorPath(steps=found[1:]))
    return best


def _supposed(a: Tensor, dtype: torch.dtype) -> Iterator[tuple[Rotation | None, Tensor, Tensor | None]]:
    """Yield rotations that A may have, A's values before them, and the error of these values."""
    rows, features = a.shape[2:]
    positions = torch.arange(rows, dtype=torch.float64)[None]
    for width in _widths(features):
        for base in USUAL_BASES:
            table = _table(positions, Law(base, 1.0).frequencies(width // 2))
            for layout in ("half", "interleaved"):
                back = inverse(turn := Rotation(table, layout))
                yield turn, apply_step(back, a), allowed((back,), a, dtype)
    yield None, a, None


def _widths(features: int) -> list[int]:
    return [width for width in (features // by for by in WIDTH_DIVISORS) if width and width % 2 == 0]


def _table(positions: Tensor, frequencies: Tensor) -> Tensor:
    return Turn(positions, frequencies, torch.ones(1, 1, 1, dtype=torch.float64)).table()


def _other_rotations(own: Rotation, known: Turn, features: int) -> Iterator[Steps]:
    """Yield A's rotation in the other layout, then over fewer or more channels."""
    yield (replace(own, layout="interleaved" if own.layout == "half" else "half"),)
    law = known.law
    for width in _widths(features) if law is not None else ():
        if law is not None and width != own.width:
            yield (replace(own, table=_table(known.positions, law.frequencies(width // 2))),)


def _usual(rotation: Rotation, known: Turn | None) -> tuple[int, Rotation] | None:
    """Return how usual B's rotation is, and the rotation with the nearest usual base and whole positions.

    0: A's rotation except for positions or layout. 1: another usual base. Returns None if it is not usual at all.
    """
    turn = take_apart(rotation.table)
    law, same = (None if each is None else each.law for each in (turn, known))
    if turn is None or law is None or (known is not None and same is None):
        return None
    base = next((base for base in USUAL_BASES if abs(law.base - base) < USUAL_BASE_DISTANCE * base), None)
    alike = same is not None and law.factor == 1.0 and abs(law.base - same.base) < USUAL_BASE_DISTANCE * same.base
    if not alike and (base is None or (known is None and law.factor != 1.0)):
        return None
    positions = turn.positions.round()
    if bool(((positions - turn.positions).abs() > WHOLE_POSITION_DISTANCE).any()):
        positions = turn.positions
    frequencies = turn.frequencies.sign() * replace(law, base=base or law.base).frequencies(rotation.width // 2)
    return int(not alike), replace(rotation, table=turn.amplitude.median() * _table(positions, frequencies))
