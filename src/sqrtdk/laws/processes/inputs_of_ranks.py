"""The whole weights and inputs of a model whose ranks hold parts of them, and parts of other inputs for the same ranks.

The whole inputs are those that the factory gives alone, if the ranks' inputs are pieces of them. If it gives none, the
pieces are put together: equal inputs are whole already, and others are pieces of the sequence or of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_buffers, named_parameters
from sqrtdk.laws.processes.shards import (
    PAD,
    ShardLayout,
    TokenPlaces,
    on_ranks,
    same_within_rounding,
    shard_layouts,
    token_orders,
)
from sqrtdk.laws.subject import NotAsked
from sqrtdk.messages import Message

NamedInputs = dict[str, Any]
POSITION_NAMES = ("position_ids", "positions", "pos", "input_pos")


@dataclass(frozen=True, slots=True, eq=False)
class WholeInputs:
    """The inputs of one process beside those of the ranks.

    Attributes:
        inputs: By the names of forward's arguments, or "0", "1" and so on for those by position.
        places: Where each rank's tokens stand; None if every rank has the whole inputs or other samples.
        tokens: Number of tokens L; 0 if unknown.
        axes: Of each input that is cut along the tokens, the axis.
        strange: Names of the inputs of which the ranks hold other values than those of the whole.
        batch: Whether the ranks hold samples of the batch.
    """

    inputs: NamedInputs
    places: TokenPlaces | None = None
    tokens: int = 0
    axes: Mapping[str, int] = field(default_factory=dict)
    strange: tuple[str, ...] = ()
    batch: bool = False

    def of_rank(self, whole: Mapping[str, Any], rank: int) -> NamedInputs:
        """Return a rank's part of other whole inputs of the same length."""
        return {name: self.cut(name, value, rank) for name, value in whole.items()}

    def cut(self, name: str, value: Any, rank: int) -> Any:
        """Return a rank's part of one input."""
        if self.places is None or not isinstance(value, Tensor):
            return value
        axis = self.axes.get(name, token_axis(value, self.tokens))
        if axis is None:
            return value
        return ShardLayout(({axis: self.places.of_ranks[rank]},)).part(value, 0)


def put_weights(module: nn.Module, states: Sequence[Mapping[str, Tensor]]) -> str:
    """Give a module the weights of all ranks; return the name of a parameter whose copies differ, or "".

    Raises:
        NotAsked: No rank has one of its parameters, or its parts don't fit.
    """
    parameters, buffers = dict(named_parameters(module)), dict(named_buffers(module))
    other = ""
    with torch.no_grad():
        for name, tensor in {**buffers, **parameters}.items():
            parts = [state.get(name) for state in states]
            held = [part for part in parts if part is not None]
            if not held:
                if name in parameters:
                    raise NotAsked(Message("laws.ranks.no_weight", name=name))
                continue
            shapes = [None if part is None else tuple(part.shape) for part in parts]
            fit = [*shard_layouts(shapes, tuple(tensor.shape), None, 0)]
            # On a mesh, ranks that hold one piece have equal values; in another arrangement they have not.
            layout = next((one for one in fit if one.agrees(parts)), next(iter(fit), None))
            if layout is None:
                if name not in parameters:
                    continue
                raise NotAsked(
                    Message(
                        "laws.ranks.odd_weight",
                        name=name,
                        shape=str(tuple(held[0].shape)),
                        whole=str(tuple(tensor.shape)),
                    )
                )
            if name in parameters and not other and all(part.shape == tensor.shape for part in held):
                other = name if any(not torch.equal(part, held[0]) for part in held) else ""
            tensor.copy_(layout.whole(parts, tuple(tensor.shape)).to(tensor.dtype))
    return other


def token_axis(value: Tensor, tokens: int) -> int | None:
    """Return the axis of an input that has a place for each token: 1, or 0 of a vector; None if there is none."""
    if not tokens:
        return None
    return next((axis for axis in (1, 0) if axis < value.dim() and value.shape[axis] == tokens), None)


def whole_inputs(own: NamedInputs | None, parts: Sequence[NamedInputs]) -> Iterator[WholeInputs]:
    """Yield the ways to take the ranks' inputs for parts of whole inputs, the likeliest first.

    Args:
        own: The inputs that the factory gives alone, or None.
        parts: The inputs of each rank.

    Raises:
        NotAsked: The ranks' inputs have other names, or they are no parts of the inputs that the factory gives.
    """
    names = list(parts[0])
    if any(list(part) != names for part in parts):
        raise NotAsked(Message("laws.ranks.other_inputs"))
    tensors = [name for name in names if all(isinstance(part[name], Tensor) for part in parts)]
    equal = all(_equal(part[name], parts[0][name]) for part in parts for name in tensors)
    if own is not None and [*own] == names:
        found = [*_beside_own(own, parts, tensors)]
        if found:
            yield found[0]
            return
        if not equal:
            raise NotAsked(Message("laws.ranks.inputs_no_parts", name=_first_unlike(own, parts, tensors)))
    if equal:
        yield WholeInputs(dict(parts[0]), None, _tokens(parts[0], tensors))
        return
    yield from _joined(parts, tensors)


def _beside_own(own: NamedInputs, parts: Sequence[NamedInputs], tensors: Sequence[str]) -> Iterator[WholeInputs]:
    """Yield the ways in which some input of the ranks is a part of the whole one; others may have strange values."""
    same = [name for name in tensors if all(_equal(part[name], own[name]) for part in parts)]
    cut = [name for name in tensors if any(part[name].shape != own[name].shape for part in parts)]
    tokens = _tokens(own, cut or tensors)
    if not cut:
        strange = tuple(name for name in tensors if name not in same)
        # Ranks with other tokens have other samples: those of this process are the first rank's alone.
        if (same or not tensors) and set(strange) <= set(POSITION_NAMES):
            yield WholeInputs(own, None, tokens, strange=strange)
        return
    if all(part[name].shape[1:] == own[name].shape[1:] for part in parts for name in cut):
        layout = next(_value_layouts(own, parts, cut, 0), None)
        if layout is not None and tokens != own[cut[0]].shape[0]:
            yield WholeInputs(own, None, tokens, batch=True)
    best: WholeInputs | None = None
    for places in _places(own, parts, cut, tokens):
        axes = {name: axis for name in cut if (axis := token_axis(own[name], tokens)) is not None}
        whole = WholeInputs(own, places, tokens, axes)
        fits = [
            name for name in tensors if all(_fits(whole, name, part[name], rank) for rank, part in enumerate(parts))
        ]
        if not any(name in axes for name in fits):
            continue
        whole = WholeInputs(own, places, tokens, axes, tuple(name for name in tensors if name not in fits))
        if best is None or len(whole.strange) < len(best.strange):
            best = whole
    if best is not None:
        yield best


def _fits(whole: WholeInputs, name: str, part: Tensor, rank: int) -> bool:
    value = whole.inputs[name]
    if _equal(part, value):
        return True
    expected = whole.cut(name, value, rank)
    if not isinstance(expected, Tensor) or expected.shape != part.shape or whole.places is None:
        return False
    axis = whole.axes.get(name)
    if axis is None:
        return False
    real = torch.nonzero(whole.places.of_ranks[rank] != PAD).flatten()
    return same_within_rounding(expected.index_select(axis, real), part.index_select(axis, real))


def _value_layouts(own: NamedInputs, parts: Sequence[NamedInputs], cut: Sequence[str], axis: int) -> Iterator[bool]:
    """Yield True if the parts are pieces of an axis of the inputs in the order of the ranks."""
    pieces = _distinct([part[cut[0]] for part in parts])
    joined = torch.cat(pieces, axis)
    if joined.shape == own[cut[0]].shape and same_within_rounding(own[cut[0]], joined):
        yield True


def _places(own: NamedInputs, parts: Sequence[NamedInputs], cut: Sequence[str], tokens: int) -> Iterator[TokenPlaces]:
    """Yield the places of tokens over the ranks: in each order, with each arrangement of ranks that share a piece."""
    name = next((name for name in cut if token_axis(own[name], tokens) is not None), None)
    if name is None:
        return
    axis = token_axis(own[name], tokens)
    assert axis is not None
    sizes = [int(part[name].shape[axis]) for part in parts]
    for piece_of_rank in _arrangements([part[name] for part in parts]):
        count = max(piece_of_rank) + 1
        lengths = [sizes[piece_of_rank.index(piece)] for piece in range(count)]
        if sum(lengths) >= tokens:
            for order in token_orders(tokens, lengths):
                if all(bool((piece != PAD).any()) for piece in order.of_ranks):  # else a rank has other tokens
                    yield on_ranks(order, piece_of_rank)


def _arrangements(values: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the piece of each rank: ranks with equal values share one, or their tokens are alike."""
    pieces = _distinct(values)
    yield [next(n for n, piece in enumerate(pieces) if _equal(piece, value)) for value in values]
    if len(pieces) < len(values):
        yield [*range(len(values))]


def _distinct(values: Sequence[Tensor]) -> list[Tensor]:
    found: list[Tensor] = []
    for value in values:
        if not any(_equal(value, other) for other in found):
            found.append(value)
    return found


def _joined(parts: Sequence[NamedInputs], tensors: Sequence[str]) -> Iterator[WholeInputs]:
    """Yield whole inputs that are put together of the ranks' parts: along the sequence in each order, and the batch."""
    cut = [name for name in tensors if not all(_equal(part[name], parts[0][name]) for part in parts)]
    lead = parts[0][cut[0]]
    axis = 1 if lead.dim() > 1 else 0
    piece_of_rank = next(_arrangements([part[cut[0]] for part in parts]))
    first_ranks = [piece_of_rank.index(piece) for piece in range(max(piece_of_rank) + 1)]
    sizes = [int(parts[rank][cut[0]].shape[axis]) for rank in first_ranks]
    tokens = sum(sizes)
    local = [name for name in POSITION_NAMES if name in tensors and _counts_from_zero([part[name] for part in parts])]
    for order in token_orders(tokens, sizes):
        places = on_ranks(order, piece_of_rank)
        whole, axes = dict(parts[0]), {}
        for name in tensors:
            values = [parts[rank][name] for rank in first_ranks]
            at = token_axis(values[0], sizes[0])
            if at is not None and (name in cut or name in local):
                shape = list(values[0].shape)
                shape[at] = tokens
                layout = ShardLayout(tuple({at: piece} for piece in order.of_ranks))
                whole[name], axes[name] = layout.whole(values, tuple(shape)), at
        for name in local:
            whole[name] = torch.arange(tokens).expand_as(whole[name]).clone()
        yield WholeInputs(whole, places, tokens, axes, tuple(local))
    if lead.dim() > 1:
        joined = {name: torch.cat([parts[rank][name] for rank in first_ranks]) for name in cut}
        yield WholeInputs(dict(parts[0]) | joined, None, int(lead.shape[1]), batch=True)


def _counts_from_zero(values: Sequence[Tensor]) -> bool:
    """Return whether every rank has the positions 0, 1, 2 and so on."""
    return all(value.dim() and bool((value == torch.arange(value.shape[-1])).all()) for value in values)


def _equal(one: Any, other: Any) -> bool:
    return (
        isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)
    )


def _first_unlike(own: NamedInputs, parts: Sequence[NamedInputs], tensors: Sequence[str]) -> str:
    return next((name for name in tensors if not all(_equal(part[name], own[name]) for part in parts)), "")


def _tokens(inputs: Mapping[str, Any], tensors: Sequence[str]) -> int:
    """Return the number of tokens: of ids, or of the first input of two axes or more."""
    for name in ("input_ids", "ids", "tokens", *tensors):
        value = inputs.get(name)
        if isinstance(value, Tensor) and value.dim() > 1:
            return int(value.shape[1])
    return 0
