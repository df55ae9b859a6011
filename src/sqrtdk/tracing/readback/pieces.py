"""Reads sides made of several pieces: concatenated, written slice by slice, stacked, summed, padded or pooled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.messages import Message
from sqrtdk.tracing.readback.side import Follow, ProductSide
from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import numbered, replay, replay_all
from sqrtdk.tracing.tape.node import Node, back

_PROJECTIONS_OF_DATA = ops.PROJECTIONS - {"embedding"}
_POOLS = frozenset(
    {
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "_adaptive_avg_pool2d",
        "_adaptive_avg_pool3d",
        "max_pool2d_with_indices",
        "max_pool3d_with_indices",
    }
)
_ROW_REDUCTIONS = frozenset({"mean", "amax", "max"})  # over rows they commute with a factor: mean(f * x) = f * mean(x)
_GREATEST = frozenset({"amax", "max", "max_pool2d_with_indices", "max_pool3d_with_indices"})


def zero_padded(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    """Return q or k after zero padding; zeros along the features make the head wider.

    Args:
        node: node of the padded tensor.
        main: node of the tensor before.
        where: "q" or "k".
        follow: reads q or k up to a node.
    """
    side = follow(main, where)
    shapes = zip(reversed(main.shape), reversed(node.shape), strict=True)
    grown = [(-1 - i, before, after) for i, (before, after) in enumerate(shapes) if after > before]
    detail = f"{grown[0][1]} to {grown[0][2]}" if len(grown) == 1 and grown[0][0] == -1 else ""
    side = side.then(
        Stage(where, "pad", detail), pads=(*side.pads, *((axis, after - before) for axis, before, after in grown))
    )
    return side if side.basis is None else replace(side, basis=replay(node, side.basis))


def joined_pieces(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    """Return q or k after `torch.cat` or `torch.stack`.

    Each piece is followed, and factors that disagree make the result unknown. Zeros beside a piece are padding.

    Args:
        node: node of the joined tensor.
        main: node of the first piece that is an activation.
        where: "q" or "k".
        follow: reads q or k up to a node.
    """
    pieces = [p for p in node.parents() if p.act]
    constants = [p for p in node.parents() if not p.act]
    dim = int(node.args[1]) if len(node.args) > 1 else 0
    if any(math.prod(p.shape) for p in constants):
        side = follow(pieces[0], where)
        axis = dim % len(node.shape) - len(node.shape)
        if len(pieces) > 1 or axis < -2 or not all("zeros" in p.op for p in constants):
            # cat([k, memory_keys], 1): learned keys beside the projected ones, whose scale is read
            return side.then(Stage(where, "cat", "constant"), basis=None)
        before, after = pieces[0].shape[axis], node.shape[axis]
        basis = None if side.basis is None else functional.pad(side.basis, (0, 0) * (-1 - axis) + (0, after - before))
        stage = Stage(where, "pad", f"{before} to {after}")
        return side.then(stage, pads=(*side.pads, (axis, after - before)), basis=basis)
    sides = [follow(p, where) for p in pieces]
    if len(sides) == 1:
        return sides[0]
    bases = [side.basis for side in sides if side.basis is not None]
    put = torch.cat if node.op == "cat" else torch.stack
    own = pieces[0].shape[-2] if node.op == "cat" and dim % len(node.shape) == len(node.shape) - 2 else 0
    return common_side(sides, basis=put(bases, dim) if len(bases) == len(sides) else None, own_rows=own)


def pads_after(pads: tuple[tuple[int, int], ...], before: Node, view: Node) -> tuple[tuple[int, int], ...]:
    """Return the zero padding that is left after a view of the padded tensor.

    Args:
        pads: (axis, count) of the zeros before the view; axes are negative.
        before: node of the padded tensor.
        view: node of the view.

    Returns:
        The same for the view's axes, without the padding that it cut off.
    """
    return tuple((axis, count) for old, count in pads if (axis := _axis_after(old, before, view)) is not None)


def _axis_after(axis: int, before: Node, view: Node) -> int | None:
    """Return the axis (negative) that holds an axis after the view, or None if it was cut or split."""
    size = before.shape[axis]
    if view.op == "unfold" and int(view.args[1]) % len(before.shape) == axis % len(before.shape):
        return None  # cut into windows
    try:
        line = replay(view, numbered(before.shape, axis % len(before.shape)))
    except (RuntimeError, IndexError):
        return axis
    varying = [d for d, n in enumerate(line.shape) if n > 1 and bool((line != line.narrow(d, 0, 1)).any())]
    if len(varying) == 1 and line.shape[varying[0]] == size:
        return varying[0] - line.dim()
    last = line.shape[-1]  # x.flatten(-2) merges the features with the heads; a later view splits them again
    same = axis == -1 and line.numel() == math.prod(before.shape) and (last % size == 0 or size % last == 0)
    return axis if same else None


def common_side(sides: Sequence[ProductSide], **changes: object) -> ProductSide:
    """Return what several pieces of q, or of k, have in common; factors that disagree make the result unknown.

    Args:
        sides: what was read of each piece.
        changes: attributes of `ProductSide` to set in the result.
    """
    first = sides[0]
    unknown = list(dict.fromkeys(name for side in sides for name in side.unknown))
    if not all(_alike(side, first) for side in sides):
        unknown.append(Message("trace.step.unlike_pieces"))
    whole = replace(
        first,
        root=first.root if all(side.root is first.root for side in sides) else None,
        stages=tuple(dict.fromkeys(stage for side in sides for stage in side.stages)),
        norm_gain=any(side.norm_gain for side in sides),
        rope=any(side.rope for side in sides),
        growth=min(side.growth for side in sides),
        pads=(),
        unknown=tuple(unknown),
        skewed=any(side.skewed for side in sides),
    )
    return whole.then(**changes)


def _alike(side: ProductSide, other: ProductSide) -> bool:
    """Whether two sides have the same product of factors, or the same list of factors if a value is unknown."""
    if side.factors == other.factors:  # the many pieces of a recurrence: their products are not computed
        return True
    if math.isnan(side.factor) or math.isnan(other.factor):
        return [replace(f, where="") for f in side.factors] == [replace(f, where="") for f in other.factors]
    return abs(side.factor - other.factor) <= 1e-3 * abs(other.factor)


def written_pieces(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    """Return q or k after it was written slice by slice: `out[..., :n] = a; out[..., n:] = b`.

    Args:
        node: node of the tensor after the writes.
        main: node of an operand, not used.
        where: "q" or "k".
        follow: reads q or k up to a node.
    """
    places: list[Node] = []
    sources: list[Node] = []
    base = node
    while base.op == "overwrite":
        old, new = base.args
        if new.op != "copy" or not isinstance(new.args[1], Node) or new.args[0].op not in ops.VIEWS:
            return follow(old if old.act else new, where).lost(
                where, Message("trace.step.in_place", name=new.op), basis=None
            )
        places.append(new.args[0])
        sources.append(new.args[1])
        base = old
    pieces = [follow(source, where) for source in sources]
    beneath = [follow(base, where)] if base.act else []
    covered = sum(place.shape[-1] for place in places)
    zeros = not beneath and "zeros" in base.op and covered < node.shape[-1]
    wider = zeros and places[0].shape[:-1] == node.shape[:-1]  # out = zeros(B, L, 64); out[..., :48] = q
    side = common_side(
        [*beneath, *pieces],
        basis=_written(node, places, pieces, beneath),
        root=pieces[0].root if len(pieces) == 1 and not beneath else None,
        pads=((-1, node.shape[-1] - covered),) if wider else (),
    )
    return side.then(Stage(where, "pad", f"{covered} to {node.shape[-1]}")) if wider else side


def _written(
    node: Node, places: Sequence[Node], pieces: Sequence[ProductSide], beneath: Sequence[ProductSide]
) -> Tensor | None:
    """Return the values of pieces written to their places; `places` lists the latest write first."""
    values = [side.basis for side in (*pieces, *beneath) if side.basis is not None]
    if len(values) < len(pieces) + len(beneath):
        return None
    basis = values[-1].clone() if beneath else values[0].new_zeros(node.shape)
    for place, value in zip(reversed(places), reversed(values[: len(pieces)]), strict=True):
        replay(place, basis).copy_(value)
    return basis


def unstacked(node: Node, where: str, follow: Follow) -> ProductSide | None:
    """Return q or k after it was stacked and taken out again: q of `torch.stack([q, k, v]).unbind()`.

    Args:
        node: node of the tensor that was taken out.
        where: "q" or "k".
        follow: reads q or k up to a node.

    Returns:
        The piece's reading; None if `node` is no such tensor, or holds elements of several pieces.
    """
    *passed, stack = back(node)
    views = [view for view in reversed(passed) if view.op in ops.VIEWS]
    if stack.op != "stack" or stack.is_root or not views:
        return None
    pieces, dim = stack.args[0], (int(stack.args[1]) if len(stack.args) > 1 else 0) % len(stack.shape)
    numbers = torch.arange(len(pieces), dtype=torch.int8).view([-1 if d == dim else 1 for d in range(len(stack.shape))])
    try:
        low, high = (int(number) for number in torch.aminmax(replay_all(views, numbers.expand(stack.shape))))
    except RuntimeError:  # empty, or indices without data
        return None
    if low != high or not isinstance(pieces[low], Node):
        return None
    side = follow(pieces[low], where)
    if side.basis is None:
        return side
    return replace(side, basis=replay_all(views, side.basis.unsqueeze(dim).expand(stack.shape)))


# -- sums of branches --------------------------------------------------------------------------------------------------


def summed(node: Node, where: str, follow: Follow) -> ProductSide | None:
    """Return q or k after a sum of branches.

    A factor or a rotation counts for the sum if all branches carry it: `f * w1(x) + f * w2(x)`.

    Args:
        node: node of the sum, with its branches.
        where: "q" or "k".
        follow: reads q or k up to a node.

    Returns:
        The reading; None if no branch has a factor or rotation, so that the sum is a root itself.
    """
    sides = [follow(branch, where) for branch, _ in node.branches]
    if not any(_carries(side) for side in sides) or _adapts(*sides) or _adapts(*sides[::-1]):
        return None
    if any(side.rope != sides[0].rope for side in sides):
        return common_side(sides, root=node, basis=None).lost(where, Message("trace.step.rotation_before_sum"))
    norm = sides[0].norm if all(side.norm == sides[0].norm for side in sides) else None
    values = [side.basis * by for side, (_, by) in zip(sides, node.branches, strict=True) if side.basis is not None]
    try:
        basis = torch.broadcast_to(sum(values[1:], values[0]), node.shape) if len(values) == len(sides) else None
    except RuntimeError:
        basis = None
    return common_side(sides, root=node, basis=basis, norm=norm)


def _carries(side: ProductSide) -> bool:
    """Whether a branch is a projection followed by a factor or a rotation."""
    projected = side.root is None or side.root.op in ops.CONTRACTIONS or side.root.op in _PROJECTIONS_OF_DATA
    return projected and bool(side.factors or side.rope)


def _adapts(whole: ProductSide, other: ProductSide) -> bool:
    """Whether `other` is an adapter of `whole`, W x + s * B A x (Hu et al. 2021): it then has a factor of its own."""
    shared, deeper = whole.start.lineage & other.start.lineage, len(other.start.lineage) > len(whole.start.lineage)
    plain = not (whole.factors or whole.rope or whole.norm)
    return plain and bool(shared) and deeper and other.start.source != whole.start.source


# -- pooled over rows: by a mean or a maximum, or by a convolution of each channel (MViT, Restormer) ------------------


def pooled(node: Node, main: Node, where: str, follow: Follow) -> ProductSide | None:
    """Return q or k after a mean or maximum over rows.

    Args:
        node: node of the result.
        main: node of the tensor before.
        where: "q" or "k".
        follow: reads q or k up to a node.

    Returns:
        The reading; None if it runs over channels, or if a factor that is not positive precedes a maximum.
    """
    if node.op in _ROW_REDUCTIONS and not _over_rows(node, main):
        return None
    side = follow(main, where)
    if node.op in _GREATEST and not all(factor.value is None or factor.value > 0 for factor in side.factors):
        return None
    basis = None if side.basis is None or side.moves else replay(node, side.basis)
    return side.then(Stage(where, "pool", node.op), basis=basis)


def _over_rows(node: Node, main: Node) -> bool:
    dims = node.args[1] if len(node.args) > 1 else None
    dims = [dims] if isinstance(dims, int) else dims
    return bool(dims) and all(d % len(main.shape) != len(main.shape) - 1 for d in dims or ())


def convolved(node: Node, where: str, follow: Follow) -> ProductSide | None:
    """Return q or k after a convolution that follows a projection.

    Args:
        node: node of the convolution, with its input as a branch.
        where: "q" or "k".
        follow: reads q or k up to a node.

    Returns:
        The reading; None if no projection comes before, so that the convolution is the projection itself, or if a
        rotation, a norm or an unknown operation stands between them.
    """
    before = follow(node.branches[0][0], where)
    projected = before.root is not None and before.root.op in {*ops.CONTRACTIONS, *ops.PROJECTIONS}
    if not projected or before.unknown or before.moves or before.norm:
        return None
    shrinks = math.prod(node.shape) < math.prod(node.branches[0][0].shape)
    side = before.then(Stage(where, "pool" if shrinks else "convolution", node.label))
    return replace(side, root=node, basis=node.value if before.factor == 1.0 else None)


PIECE_READERS = {
    "constant_pad_nd": zero_padded,
    **dict.fromkeys(("cat", "stack"), joined_pieces),
    "overwrite": written_pieces,
    **dict.fromkeys(_POOLS | _ROW_REDUCTIONS, pooled),
}
