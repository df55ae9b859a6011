"""Puts q, k and v of an attention together that was computed in blocks of rows and of keys, each a product of its own.

for key, value in zip(k.split(256, 2), v.split(256, 2)):      # a running maximum and sum, as flash attention has
    z = q @ key.mT * scale; new = maximum(top, z.amax(-1, keepdim=True)); p = (z - new).exp(); ...
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.tracing.calls.places import ValueOperands, places_of
from sqrtdk.tracing.calls.vectors import vector
from sqrtdk.tracing.readback.blocks import is_attention
from sqrtdk.tracing.readback.reading import Logits, Reading
from sqrtdk.tracing.tensors import Projection, Vector, Waypoint

Vectors = tuple[Vector, Vector, Vector]


def vectors_of_blocks(reading: Reading, used: Sequence[ValueOperands]) -> Vectors | str | None:
    """Return q, k and v of all blocks, along rows and keys.

    Args:
        reading: the attention, with its cells in `blocks`.
        used: the operands of each cell's product of weights and values.

    Returns:
        q (B, Hq, L, E), k (B, H, S, E) and v (B, H, S, Ev); a reason if those of a cell can't be arranged; None if the
        cells leave out rows or keys.
    """
    rows: dict[int, Vector] = {}
    keys: dict[int, tuple[Vector, Vector]] = {}
    for cell, operands in zip(reading.blocks, used, strict=True):
        if operands.weights is None:
            return None
        value = operands.value.mT if operands.values_first else operands.value
        places = places_of(replace(cell.reading, output=operands.weights @ value), operands)
        if isinstance(places, str):
            return places
        at_query, at_key, at_value = places
        if cell.row not in rows:
            rows[cell.row] = vector(at_query)
        if cell.key not in keys:
            keys[cell.key] = vector(at_key), vector(at_value)
    query = _in_a_row(rows, reading.layout.rows)
    key = _in_a_row({first: both[0] for first, both in keys.items()}, reading.layout.columns)
    value_ = _in_a_row({first: both[1] for first, both in keys.items()}, reading.layout.columns)
    return None if query is None or key is None or value_ is None else (query, key, value_)


def output_of_blocks(reading: Reading, value: Tensor) -> Tensor:
    """Return the output (B, Hq, L, Ev) of an attention in blocks: the model's own, or what its logits give.

    Args:
        reading: the attention.
        value: v of all blocks, (B, H, S, Ev).
    """
    layout, logits, output = reading.layout, reading.operands, reading.output
    assert isinstance(logits, Logits)
    value = value.repeat_interleave(layout.heads // value.shape[1], 1)
    whole = output is not None and output.shape[-1] == value.shape[-1]
    if output is not None and whole and is_attention(logits.values, [(0, value)], output):
        return output.reshape(layout.batch, layout.heads, layout.rows, -1)
    return logits.weights.to(value.dtype) @ value


def _in_a_row(parts: dict[int, Vector], count: int) -> Vector | None:
    """Return the vectors along the tokens, by the place of their first one; None unless they are `count` tokens."""
    after = 0
    for first, part in sorted(parts.items()):
        if first != after:
            return None
        after += part.values.shape[2]
    return _joined([part for _, part in sorted(parts.items())]) if after == count else None


def _joined(parts: Sequence[Vector]) -> Vector:
    """Return vectors as one, with what all of them have of the way from their projection."""
    first = parts[0]
    values = torch.cat([part.values for part in parts], 2)
    projected = [part.projected for part in parts if part.projected is not None]
    names = [(part.factor, [(step.name, step.detail, step.gain) for step in part.steps]) for part in parts]
    if len(parts) == 1 or len(projected) < len(parts) or any(_unlike(one, names[0]) for one in names):
        return first if len(parts) == 1 else Vector(values, lines=first.lines)
    steps = tuple(_step([part.steps[at] for part in parts]) for at in range(len(first.steps)))
    projections = [part.projection for part in parts if part.projection is not None]
    projection = _projection(projections) if len(projections) == len(parts) else None
    return Vector(values, first.factor, torch.cat(projected, 2), steps, projection, first.lines)


def _unlike(one: tuple[object, object], other: tuple[object, object]) -> bool:
    factors = one[0], other[0]
    if isinstance(factors[0], Tensor) or isinstance(factors[1], Tensor):
        both = [torch.as_tensor(factor, dtype=torch.float64) for factor in factors]
        return both[0].shape != both[1].shape or not torch.equal(*both) or one[1] != other[1]
    return one != other


def _step(steps: Sequence[Waypoint]) -> Waypoint:
    known = [step.values for step in steps if step.values is not None]
    return replace(steps[0], values=torch.cat(known, 2) if len(known) == len(steps) else None)


def _projection(parts: Sequence[Projection]) -> Projection | None:
    """Return the projection of all tokens, if all parts have the same weights."""
    first = parts[0]
    if any(part.name != first.name or not torch.equal(part.features, first.features) for part in parts):
        return None
    return replace(first, input=torch.cat([part.input for part in parts], 1))
