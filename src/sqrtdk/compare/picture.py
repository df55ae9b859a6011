"""For a reader's eyes: logits of both sides beside one another, and the keys that one mask alone shows."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.compare.compute import logits, parts_of, spread
from sqrtdk.compare.pair import Judged
from sqrtdk.compare.program import Formula
from sqrtdk.compare.records import MaskPicture, Scatter

HEADS = 4
POINTS = 200  # a head
SIDE = 48  # rows and keys of a picture


def scatter_of(judged: Judged) -> tuple[Scatter, ...]:
    """Logits of the first heads, both formulas on B's q and k, at visible keys."""
    sides, seen = judged.sides, judged.seen
    if sides is None or seen is None or sides.a.formula is None or sides.b.formula is None:
        return ()
    query = seen["query"].used[:1, :, :SIDE]
    count = query.shape[1]
    found = []
    z = []
    for program in (sides.a, sides.b):
        key = spread(seen["key"].used[:1], count, program.key.heads)[:, :, :SIDE]
        assert program.formula is not None
        z.append(logits(query, key, _cut(program.formula, query.shape[2], key.shape[2])))
    for head in range(min(HEADS, count)):
        a, b = z[0][0, head], z[1][0, head]
        rows, keys = torch.nonzero((a > -1e4) & (b > -1e4), as_tuple=True)
        if not len(rows):
            continue
        pick = torch.linspace(0, len(rows) - 1, min(POINTS, len(rows))).long()
        rows, keys = rows[pick], keys[pick]
        points = [_short(x[rows, keys]) for x in (a, b)]
        found.append(Scatter(head, tuple(rows.tolist()), tuple(keys.tolist()), points[0], points[1]))
    return tuple(found)


def _short(values: Tensor) -> tuple[float, ...]:
    return tuple(float(f"{value:.6g}") for value in values.tolist())


def _cut(formula: Formula, rows: int, keys: int) -> Formula:
    """The formula of the first rows and keys of the first sequence."""
    return parts_of(formula, lambda value: _part(value, rows, keys))


def _part(value: Tensor, rows: int, keys: int) -> Tensor:
    value = value[(None,) * (4 - value.dim())][:1]
    return value[:, :, : rows if value.shape[2] > 1 else 1, : keys if value.shape[3] > 1 else 1]


def picture_of(judged: Judged) -> MaskPicture | None:
    """Where the masks of the first sequence and head that differ do; None where they are the same."""
    sides, seen = judged.sides, judged.seen
    if sides is None or seen is None or sides.a.formula is None or sides.b.formula is None:
        return None
    shape = (*seen["query"].used.shape[:3], seen["key"].used.shape[2])
    a, b = (_visible(formula, shape) for formula in (sides.a.formula, sides.b.formula))
    unlike = (a != b).nonzero()
    if not len(unlike):
        return None
    batch, head, row, key = (int(at) for at in unlike[0])
    first_row, first_key = max(0, min(row - 2, shape[2] - SIDE)), max(0, min(key - 2, shape[3] - SIDE))
    rows = []
    for i in range(first_row, min(shape[2], first_row + SIDE)):
        line = zip(
            a[batch, head, i, first_key : first_key + SIDE].tolist(),
            b[batch, head, i, first_key : first_key + SIDE].tolist(),
            strict=True,
        )
        rows.append("".join({(True, True): "+", (True, False): "a", (False, True): "b"}.get(x, ".") for x in line))
    return MaskPicture(first_row, first_key, tuple(rows))


def _visible(formula: Formula, shape: tuple[int, ...]) -> Tensor:
    if formula.visible is None:
        return torch.ones(1, 1, 1, 1, dtype=torch.bool).expand(shape)
    return formula.visible[(None,) * (4 - formula.visible.dim())].expand(shape)
