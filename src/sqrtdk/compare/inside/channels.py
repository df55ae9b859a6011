"""Whether q and k of two sides have their channels in one order, where a file tells no weight of its projections.

A checkpoint converted for the other rotary layout has the rows of the q and k projections in another order: both
channels of a pair stay a pair, and no logit changes (llama.cpp's converter does this to Llama). Written to a trace file
without weights, such q and k look as if the wrong channels were paired. Only the values before the rotation tell the
two apart: made from one input, they are A's in another order, or A's.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.compare.causes.projections import relabelled
from sqrtdk.compare.infer.missing import KnownSide, coarser, near
from sqrtdk.compare.inside.build import ONE_INPUT_ROUNDINGS
from sqrtdk.compare.inside.program import QK, Affine, Rotation, layout_order, steps_in_other_layout
from sqrtdk.compare.inside.suspect import Sides, path_of, rotation_of, with_path

LEAST_ROWS = 3  # rows: the values of a channel in fewer may be another channel's by chance


def with_known_rows(sides: list[KnownSide]) -> list[KnownSide]:
    """Return the sides with rows of the q and k projections as far as the projected values show them.

    A side that tells projected values and no weight gets the rows of the other side's weight, in the order in which
    the other side's values are its own.
    """
    for name in QK:
        for this in (0, 1):
            own, other = sides[this], sides[1 - this]
            if path_of(own.program, name).affine is not None or own.seen[name].borrowed:
                continue
            order = _order(other.seen[name].projected, own.seen[name].projected, coarser(sides))
            if order is not None:
                known = _with_identity(other, name)
                affine, entering = path_of(known.program, name).affine, known.seen[name].input
                assert affine is not None
                sides = list(sides)
                sides[1 - this] = known
                sides[this] = _with_affine(own, name, _reordered(affine, order), entering)
    return sides


def _order(other: Tensor | None, own: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the other side's feature that is each feature of one's own, (H, E); None unless all of them are there."""
    if other is None or own is None or other.shape != own.shape or own.shape[0] * own.shape[2] < LEAST_ROWS:
        return None
    theirs, mine = (x.double().transpose(1, 2).flatten(2).flatten(0, 1).T.contiguous() for x in (other, own))
    if not bool(torch.isfinite(theirs).all() and torch.isfinite(mine).all()):
        return None
    order = torch.arange(len(mine)) if near(theirs, mine, dtype, ONE_INPUT_ROUNDINGS) else None
    if order is None:
        order = torch.cdist(mine, theirs).argmin(-1)
    if len(set(order.tolist())) < len(order) or not near(theirs[order], mine, dtype, ONE_INPUT_ROUNDINGS):
        return None
    return order.view(own.shape[1], own.shape[3])


def _with_identity(side: KnownSide, name: str) -> KnownSide:
    """Return a side whose projection is known; one that tells none gets an identity on its projected values."""
    path, projected = path_of(side.program, name), side.seen[name].projected
    if path.affine is not None and side.seen[name].input is not None:
        return side
    assert projected is not None
    heads, features = projected.shape[1], projected.shape[3]
    size = heads * features
    weight = torch.eye(size, dtype=torch.float64).view(heads, features, size)
    affine = Affine("", weight, None, torch.arange(size).view(heads, features))
    return _with_affine(side, name, affine, projected.transpose(1, 2).flatten(2))


def _with_affine(side: KnownSide, name: str, affine: Affine, entering: Tensor | None) -> KnownSide:
    path = replace(path_of(side.program, name), affine=affine)
    seen = replace(side.seen[name], input=entering)
    return replace(side, seen=side.seen | {name: seen}, program=with_path(side.program, name, path))


def _reordered(affine: Affine, order: Tensor) -> Affine:
    rows, shape = affine.weight.flatten(0, 1)[order.flatten()], affine.weight.shape
    bias = None if affine.bias is None else affine.bias.flatten()[order]
    return replace(affine, weight=rows.view(shape), bias=bias, features=affine.features.flatten()[order])


def in_one_layout(sides: list[KnownSide], earlier: Sides | None) -> tuple[list[KnownSide], bool]:
    """Return the sides with B's q and k in A's rotary layout where nothing tells a wrong layout from other rows.

    Both read the same then. What the earlier pair showed, holds: rows in another order, or the wrong layout.

    Returns:
        The sides, and whether it is open which of the two B has.
    """
    turned = [{name: rotation_of(path_of(side.program, name)) for name in QK} for side in sides]
    known = all(path_of(side.program, name).affine is not None for side in sides for name in QK)
    if known or not all(_other_layout(turned[0][name], turned[1][name]) for name in QK):
        return sides, False
    shown = None if earlier is None else _shown_by(earlier)
    if shown is False:
        return sides, False
    own = sides[1]
    for name in QK:
        rotation, vector, path = turned[1][name], own.seen[name], path_of(own.program, name)
        assert rotation is not None
        order = layout_order(torch.arange(vector.used.shape[-1]), rotation)
        projected = None if vector.projected is None else vector.projected[..., order]
        seen = replace(vector, used=vector.used[..., order], projected=projected)
        path = replace(path, steps=steps_in_other_layout(path.steps, order))
        own = replace(own, seen=own.seen | {name: seen}, program=with_path(own.program, name, path))
    return [sides[0], own], shown is None


def _other_layout(a: Rotation | None, b: Rotation | None) -> bool:
    if a is None or b is None or a.spread or b.spread or max(a.width, b.width) == 2:
        return False
    return a.layout != b.layout


def _shown_by(earlier: Sides) -> bool | None:
    """Return whether the rows of an earlier pair are in the other layout's order; None if that pair can't tell."""
    programs = (earlier.a, earlier.b)
    if any(path_of(program, name).affine is None for program in programs for name in QK):
        return None
    pairs = [[rotation_of(path_of(program, name)) for program in programs] for name in QK]
    return relabelled(earlier) if all(_other_layout(*pair) for pair in pairs) else None
