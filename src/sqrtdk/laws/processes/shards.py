"""Where the parts that ranks hold of a tensor lie in the whole tensor.

A part is a whole copy, or it is cut along one or more axes. Which rank holds which piece of an axis is not written on
a tensor, so every way that fits the shapes is tried, and the numbers decide:

    tokens      (B, n, D) of (B, L, D)      the places of each rank's tokens, known from the inputs, or an order
    features    (B, L, D / N) of (B, L, D)  pieces in the order of the ranks: tensor parallel
    both        (B, n, D / 2) of (B, L, D)  on a mesh of two axes, the first or the second of which cuts the tokens
    a sum       (B, L, D) on every rank     parts whose sum is the whole, in front of an all-reduce

In N = 2 ranks with L = 8 tokens the orders of tokens are: whole 0123 4567, zigzag 0167 2345, striped 0246 1357.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from sqrtdk.laws.moved import moved_entries

PAD = -1  # place of a row that fills up a shard
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """Where the tokens of each rank stand in the whole sequence.

    Attributes:
        order: A key of `SHARD_ORDERS`.
        of_ranks: Of each rank, (n,): the place of each of its tokens, `PAD` for padding.
        total: Number L of tokens.
    """

    order: str
    of_ranks: tuple[Tensor, ...]
    total: int

    def owner(self) -> tuple[Tensor, Tensor]:
        """Return of each token the piece of the sequence that has it, and its row there; (L,) each."""
        pieces = self.pieces()
        piece, row = torch.zeros(self.total, dtype=torch.long), torch.zeros(self.total, dtype=torch.long)
        for number, places in enumerate(pieces):
            real = places != PAD
            piece[places[real]], row[places[real]] = number, torch.arange(len(places))[real]
        return piece, row

    def pieces(self) -> list[Tensor]:
        """Return the places of each piece once, in the order of the ranks; several ranks may hold one piece."""
        found: list[Tensor] = []
        for places in self.of_ranks:
            if not any(torch.equal(places, other) for other in found):
                found.append(places)
        return found


def _whole_order(total: int, sizes: Sequence[int]) -> list[Tensor]:
    return list(torch.arange(total).split(list(sizes)))  # type: ignore[no-untyped-call]


def _zigzag_order(total: int, sizes: Sequence[int]) -> list[Tensor]:
    count = len(sizes)
    chunks = torch.arange(total).tensor_split(2 * count)
    return [torch.cat((chunks[piece], chunks[2 * count - 1 - piece])) for piece in range(count)]


def _striped_order(total: int, sizes: Sequence[int]) -> list[Tensor]:
    return [torch.arange(total)[piece :: len(sizes)] for piece in range(len(sizes))]


SHARD_ORDERS: dict[str, Callable[[int, Sequence[int]], list[Tensor]]] = {
    "whole": _whole_order,
    "zigzag": _zigzag_order,
    "striped": _striped_order,
}


def token_orders(total: int, sizes: Sequence[int]) -> Iterator[TokenPlaces]:
    """Yield the places of tokens in every order in which pieces of these sizes make up `total` tokens.

    If the pieces hold more, the last places are padding.

    Args:
        total: Number of tokens L.
        sizes: Number of tokens of each piece; their sum is L or more.
    """
    for order, cut in SHARD_ORDERS.items():
        pieces = cut(sum(sizes), sizes)
        if [len(piece) for piece in pieces] == list(sizes):
            yield TokenPlaces(order, tuple(torch.where(piece < total, piece, PAD) for piece in pieces), total)


def on_ranks(places: TokenPlaces, piece_of_rank: Sequence[int]) -> TokenPlaces:
    """Return the places by rank, where `places` has them by piece and `piece_of_rank` the piece of each rank."""
    return TokenPlaces(places.order, tuple(places.of_ranks[piece] for piece in piece_of_rank), places.total)


def filled_up(places: TokenPlaces) -> TokenPlaces | None:
    """Return the places where the padding of shards is taken for tokens at the end; None if there is no padding."""
    pieces = places.pieces()
    sizes = [len(piece) for piece in pieces]
    if sum(sizes) == places.total:
        return None
    whole = TokenPlaces(places.order, tuple(SHARD_ORDERS[places.order](sum(sizes), sizes)), sum(sizes))
    return on_ranks(
        whole, [next(n for n, one in enumerate(pieces) if torch.equal(one, mine)) for mine in places.of_ranks]
    )


@dataclass(frozen=True, slots=True, eq=False)
class ShardLayout:
    """Where the parts of one tensor lie.

    Attributes:
        cuts: Of each rank, the indices (axis: (n,)) of its part in the whole; None if the rank has no part.
        places: The places of tokens, if the layout cuts them.
        summed: Whether the sum of the parts is the whole.
    """

    cuts: tuple[dict[int, Tensor] | None, ...]
    places: TokenPlaces | None = None
    summed: bool = False

    def part(self, whole: Tensor, rank: int) -> Tensor | None:
        """Return the part of a whole tensor that a rank holds, with zeros at padding; None if it has none."""
        cut = self.cuts[rank]
        if cut is None:
            return None
        for axis, places in cut.items():
            whole = whole.index_select(axis, places.clamp(min=0).to(whole.device))
            if bool((places == PAD).any()):
                shape = [1] * whole.dim()
                shape[axis] = -1
                whole = whole * (places != PAD).view(shape).to(whole.dtype)
        return whole

    def agrees(self, parts: Sequence[Tensor | None]) -> bool:
        """Return whether ranks that hold one piece have the same numbers."""
        first: dict[tuple[tuple[int, ...], ...], Tensor] = {}
        for part, cut in zip(parts, self.cuts, strict=True):
            if part is None or cut is None:
                continue
            other = first.setdefault(tuple(tuple(places.tolist()) for places in cut.values()), part)
            if not torch.equal(part, other):
                return False
        return True

    def whole(self, parts: Sequence[Tensor | None], shape: Shape) -> Tensor:
        """Put the parts together; NaN (0 for integers) where no rank has an entry."""
        held = [(part, cut) for part, cut in zip(parts, self.cuts, strict=True) if part is not None and cut is not None]
        if self.summed:
            return torch.stack([part for part, _ in held]).sum(0)
        first = held[0][0]
        made = torch.full(shape, math.nan if first.is_floating_point() else 0, dtype=first.dtype)
        for part, cut in reversed(held):
            index = [torch.arange(size) for size in part.shape]
            for axis, places in cut.items():
                real = places != PAD
                part, index[axis] = part[(slice(None),) * axis + (real,)], places[real]
            made[torch.meshgrid(*index, indexing="ij") if index else ()] = part
        return made


def shard_layouts(
    shapes: Sequence[Shape | None], whole: Shape, places: TokenPlaces | None, tokens: int
) -> Iterator[ShardLayout]:
    """Yield every way in which parts of these shapes may lie in the whole, the likeliest first.

    Args:
        shapes: Of each rank; None if it has no part.
        whole: Shape of the whole tensor.
        places: The places of tokens, or None if the ranks have the same inputs, so that the model cuts by itself.
        tokens: Number of tokens L; 0 if unknown.
    """
    held = [rank for rank, shape in enumerate(shapes) if shape is not None]
    if not held or any(len(shapes[rank] or ()) != len(whole) for rank in held):
        return
    sizes = {rank: shape for rank in held if (shape := shapes[rank]) is not None}
    cut = [axis for axis, size in enumerate(whole) if any(sizes[rank][axis] != size for rank in held)]
    nothing: dict[int, Tensor] = {}
    if not cut:
        yield ShardLayout(tuple(nothing if rank in sizes else None for rank in range(len(shapes))))
        return
    by_places = [
        axis for axis in cut
        if places is not None and whole[axis] == places.total and axis < max(len(whole) - 1, 1)
        and all(sizes[rank][axis] == len(places.of_ranks[rank]) for rank in held)
    ][:1]  # fmt: skip
    plain = [axis for axis in cut if axis not in by_places]
    groups = _groups(places, held) if by_places else [held]
    for plan in _plain_cuts(plain, groups, sizes, whole, tokens if places is None else 0):
        cuts = {rank: dict(plan.cuts.get(rank, {})) for rank in held}
        if by_places and places is not None:
            for rank in held:
                cuts[rank][by_places[0]] = places.of_ranks[rank]
        found = plan.places if plan.places is not None else places if by_places else None
        yield ShardLayout(tuple(cuts.get(rank) for rank in range(len(shapes))), found)


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """Indices by rank and axis, and the places of tokens if one of the axes is that of tokens."""

    cuts: dict[int, dict[int, Tensor]]
    places: TokenPlaces | None = None


def _groups(places: TokenPlaces | None, held: Sequence[int]) -> list[list[int]]:
    """Return the ranks by the tokens that they hold."""
    groups: list[list[int]] = []
    assert places is not None
    for rank in held:
        mine = places.of_ranks[rank]
        group = next((one for one in groups if torch.equal(places.of_ranks[one[0]], mine)), None)
        if group is None:
            groups.append([rank])
        else:
            group.append(rank)
    return groups


def _plain_cuts(
    axes: Sequence[int], groups: Sequence[Sequence[int]], sizes: dict[int, Shape], whole: Shape, tokens: int
) -> Iterator[_Plan]:
    """Yield the ways to cut axes over the ranks of each group alike."""
    if not axes:
        yield _Plan({})
        return
    count = len(groups[0])
    if any(len(group) != count for group in groups):
        return
    first = sizes[groups[0][0]]
    if len(axes) == 1 and any(sizes[rank][axes[0]] != first[axes[0]] for group in groups for rank in group):
        yield from _uneven(axes[0], groups, sizes, whole, tokens)
        return
    factors = [whole[axis] // first[axis] for axis in axes]
    if any(whole[axis] != factor * first[axis] for axis, factor in zip(axes, factors, strict=True)):
        return
    if math.prod(factors) > count or count % math.prod(factors):
        return
    dims = [(axis, factor) for axis, factor in zip(axes, factors, strict=True)]
    rest = count // math.prod(factors)
    dims += [(-1, rest)] if rest > 1 else []
    for arranged in permutations(dims):
        pieces = _coordinates([factor for _, factor in arranged], count)
        of_tokens = next((at for at, (axis, _) in enumerate(arranged) if _holds_tokens(axis, whole, tokens)), None)
        orders: list[TokenPlaces | None] = [None]
        if of_tokens is not None:
            axis, factor = arranged[of_tokens]
            orders = [*token_orders(tokens, [first[axis]] * factor)]
        for order in orders:
            yield _plan(groups, arranged, pieces, first, order, of_tokens)


def _plan(
    groups: Sequence[Sequence[int]], arranged: Sequence[tuple[int, int]], pieces: Sequence[Shape], first: Shape,
    order: TokenPlaces | None, of_tokens: int | None,
) -> _Plan:  # fmt: skip
    cuts: dict[int, dict[int, Tensor]] = {}
    piece_of_rank: dict[int, int] = {}
    for group in groups:
        for rank, coordinate in zip(group, pieces, strict=True):
            cuts[rank] = {}
            for at, (axis, _) in enumerate(arranged):
                if axis < 0:
                    continue
                if at == of_tokens and order is not None:
                    cuts[rank][axis], piece_of_rank[rank] = order.of_ranks[coordinate[at]], coordinate[at]
                else:
                    cuts[rank][axis] = torch.arange(first[axis]) + coordinate[at] * first[axis]
    ranked = None if order is None else on_ranks(order, [piece_of_rank.get(rank, 0) for rank in sorted(cuts)])
    return _Plan(cuts, ranked)


def _uneven(
    axis: int, groups: Sequence[Sequence[int]], sizes: dict[int, Shape], whole: Shape, tokens: int
) -> Iterator[_Plan]:
    """Yield the pieces of different sizes, in the order of the ranks; each rank has one."""
    lengths = [sizes[rank][axis] for rank in groups[0]]
    if sum(lengths) != whole[axis] or any([sizes[rank][axis] for rank in group] != lengths for group in groups):
        return
    pieces = _whole_order(whole[axis], lengths)
    cuts = {rank: {axis: piece} for group in groups for rank, piece in zip(group, pieces, strict=True)}
    places = None
    if _holds_tokens(axis, whole, tokens):
        places = TokenPlaces("whole", tuple(cuts[rank][axis] for rank in sorted(cuts)), tokens)
    yield _Plan(cuts, places)


def _holds_tokens(axis: int, whole: Shape, tokens: int) -> bool:
    return axis >= 0 and tokens > 0 and whole[axis] == tokens and axis < max(len(whole) - 1, 1)


def _coordinates(factors: Sequence[int], count: int) -> list[Shape]:
    """Return the coordinates of `count` ranks on a mesh, the last axis the fastest."""
    return [tuple(place.tolist()) for place in torch.cartesian_prod(*map(torch.arange, factors)).view(count, -1)]


def same_within_rounding(expected: Tensor, part: Tensor) -> bool:
    """Return whether a part has the numbers that it should, within the rounding of sums in another order."""
    if expected.shape != part.shape:
        return False
    if not (expected.is_floating_point() and part.is_floating_point()):
        return torch.equal(expected, part)
    return not bool(moved_entries(expected.to(part.dtype), part).any())


def fitting(
    parts: Sequence[Tensor | None], whole: Tensor, places: TokenPlaces | None, tokens: int, *, sums: bool = False
) -> ShardLayout | None:
    """Return the layout in which all parts have the numbers of the whole; None if there is none.

    Args:
        parts: Of each rank; None if it has none.
        whole: The tensor of one process.
        places: The places of tokens, or None.
        tokens: Number of tokens L.
        sums: Whether parts whose sum is the whole fit as well.
    """
    shapes = [None if part is None else tuple(part.shape) for part in parts]
    for layout in shard_layouts(shapes, tuple(whole.shape), places, tokens):
        if all(
            part is None
            or same_within_rounding(_at_real(layout, rank, whole, True), _at_real(layout, rank, part, False))
            for rank, part in enumerate(parts)
        ):
            return layout
    held = [part for part in parts if part is not None]
    summands = sums and len(held) > 1 and all(part.shape == whole.shape for part in held)
    if summands and whole.is_floating_point() and same_within_rounding(whole, torch.stack(held).sum(0)):
        return ShardLayout(tuple(None if part is None else {} for part in parts), summed=True)
    return None


def _at_real(layout: ShardLayout, rank: int, tensor: Tensor, is_whole: bool) -> Tensor:
    """Return the entries of a rank that are no padding, from the whole tensor or from the rank's part."""
    for axis, places in (layout.cuts[rank] or {}).items():
        real = places != PAD
        index = places[real] if is_whole else torch.arange(len(places))[real]
        tensor = tensor.index_select(axis, index)
    return tensor
