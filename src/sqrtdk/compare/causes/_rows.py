"""Rows of the projections of both sides: which are the same, and where those of A stand in B.

Two rows are the same where one is the other rounded: a weight of bfloat16 beside its float32. Rows that moved are found
by a sketch of each, a few products with random vectors, and then compared whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.compare.causes._parts import QK, QKV, rotation, way
from sqrtdk.compare.program import Affine, Program, Rotation
from sqrtdk.compare.suspect import Sides

FINE = 2.0**-21  # of the largest number of a row: two roundings of float32, of a weight that was folded or rescaled
COARSE = (torch.bfloat16, torch.float16)
SKETCH = 8  # products a row
CHUNK = 2**10
SUMS = 0.05  # sketches of the same rows have the same sum, but for their rounding


def same(a: Tensor, b: Tensor) -> Tensor:
    """(rows,): which rows of a and b, (rows, D), are one row, but for their rounding.

    Example:
        >>> third = torch.tensor([[1 / 3]], dtype=torch.float64)
        >>> same(third, third.bfloat16().double()).item(), same(third, third + 1e-3).item()
        (True, False)
    """
    equal = (a - b).abs() <= FINE * torch.maximum(a.abs().amax(-1, keepdim=True), b.abs().amax(-1, keepdim=True))
    alike = equal.all(-1)
    if bool(alike.all()):
        return alike
    for dtype in COARSE:
        for one, other in ((a, b), (b, a)):
            rounded = one[~alike].to(dtype).double() == other[~alike]
            alike = alike.masked_scatter(~alike, rounded.all(-1))
            if bool(alike.all()):
                return alike
    return alike


def flat(affine: Affine) -> Tensor:
    """(H * E, D): its rows."""
    return affine.weight.flatten(0, 1).double()


def bias_of(affine: Affine) -> Tensor:
    """(H, E): its bias, 0 where there is none."""
    return torch.zeros(affine.weight.shape[:2], dtype=torch.float64) if affine.bias is None else affine.bias.double()


def pool(program: Program, part: str, self_attention: bool) -> list[Affine]:
    """Projections among whose rows those of one part may be: of all parts that have the same input."""
    affines = [way(program, name).affine for name in (QKV if self_attention else (part,))]
    own = way(program, part).affine
    return [x for x in affines if x is not None and own is not None and x.weight.shape[-1] == own.weight.shape[-1]]


def moved(sides: Sides) -> dict[str, Tensor]:
    """Of each part whose rows are A's in another order: the row of A's `pool` that is at each place.

    A part whose rows are in place, or are no rows of A's, is not in it.
    """
    orders = {part: order for part in QKV if (order := _order(sides, part)) is not None}
    every = list(orders)
    lost = sum(_sum(sides.a, part) - _sum(sides.b, part) for part in every) if every else torch.zeros(1)
    size = sum(_size(sides.a, part) for part in every) if every else 1.0
    if isinstance(lost, Tensor) and float(lost.abs().max()) > SUMS * float(size):  # some rows twice, others gone
        return {}
    return orders


def _order(sides: Sides, part: str) -> Tensor | None:
    a, b = way(sides.a, part).affine, way(sides.b, part).affine
    if a is None or b is None or a.weight.shape != b.weight.shape:
        return None
    mine, wanted = flat(a), flat(b)
    there = same(mine, wanted)
    if bool(there.all()):
        return None
    affines = pool(sides.a, part, sides.self_attention)
    rows = torch.cat([flat(x) for x in affines])
    first = sum(len(flat(x)) for x in affines[: next(i for i, x in enumerate(affines) if x is a)])
    order = torch.arange(first, first + len(mine))
    found = _nearest(sketch(wanted[~there]), sketch(rows))
    if not bool(same(rows[found], wanted[~there]).all()):
        return None
    order[~there] = found
    return order


def sketch(rows: Tensor) -> Tensor:
    """(rows, SKETCH): products with random vectors, always the same."""
    generator = torch.Generator().manual_seed(rows.shape[-1])
    return rows @ torch.randn(rows.shape[-1], SKETCH, dtype=torch.float64, generator=generator)


def _nearest(wanted: Tensor, rows: Tensor) -> Tensor:
    return torch.cat([torch.cdist(some, rows).argmin(-1) for some in torch.split(wanted, CHUNK)])


def _sum(program: Program, part: str) -> Tensor:
    affine = way(program, part).affine
    return torch.zeros(SKETCH) if affine is None else sketch(flat(affine)).sum(0)


def _size(program: Program, part: str) -> float:
    affine = way(program, part).affine
    return 0.0 if affine is None else float(sketch(flat(affine)).abs().amax(1).mean())


def head_map(a: Affine, b: Affine) -> Tensor | None:
    """(heads of B,): the head of A with the same rows; None where some head has none."""
    if a.weight.shape[1:] != b.weight.shape[1:]:
        return None
    mine, other = a.weight.flatten(1).double(), b.weight.flatten(1).double()
    found = _nearest(sketch(other), sketch(mine))
    return found if bool(same(mine[found], other).all()) else None


def relabelled(sides: Sides, part: str) -> bool:
    """Rows of q and k are in the order of the other rotary layout, and so is the rotation: nothing differs.

    Checkpoints are converted so: the channels of a pair stay a pair.
    """
    if part not in QK:
        return False
    turns = [(rotation(way(sides.a, name)), rotation(way(sides.b, name))) for name in QK]
    if any(a is None or b is None or a.layout == b.layout or a.width != b.width for a, b in turns):
        return False
    orders = moved(sides)
    return all(
        name in orders and a is not None and torch.equal(orders[name], _relabelling(sides, name, a))
        for name, (a, _) in zip(QK, turns, strict=True)
    )


def _relabelling(sides: Sides, part: str, turned: Rotation) -> Tensor:
    """The order of rows that goes with the other layout than `turned`'s."""
    affines = pool(sides.a, part, sides.self_attention)
    own = way(sides.a, part).affine
    first = sum(len(flat(x)) for x in affines[: next(i for i, x in enumerate(affines) if x is own)])
    if own is None:
        return torch.empty(0)
    numbers = torch.arange(first, first + len(flat(own))).view(own.weight.shape[:2]).clone()
    return layout_order(numbers, turned).flatten()


def layout_order(channels: Tensor, turned: Rotation) -> Tensor:
    """Channels (..., E) laid out for a rotation as `turned`, in the order that the other layout has."""
    part, width = channels[..., turned.first : turned.first + turned.width], turned.width
    if turned.layout == "half":
        part = torch.stack([part[..., : width // 2], part[..., width // 2 :]], -1).flatten(-2)
    else:
        part = torch.cat([part[..., ::2], part[..., 1::2]], -1)
    return torch.cat([channels[..., : turned.first], part, channels[..., turned.first + width :]], -1)
