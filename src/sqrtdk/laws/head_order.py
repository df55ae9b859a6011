"""Other places for the heads of an attention: which rows of its weights change places, and where heads go then.

Heads are numbered by their rows in the weight, whatever order the code has them in. With 4 query heads and 2 heads of
keys and values, rows of q 0 1 2 3 become 3 2 0 1, and rows of k and v 0 1 become 1 0: the groups change places, and the
heads of the first group move on by one. Moving groups alone would let some tiled groups pass: with 6 query heads,
0 1 0 1 0 1 becomes 1 0 1 0 1 0 all over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sqrtdk.audit.configs import module_at
from sqrtdk.laws.subject import NotAsked, Subject
from sqrtdk.laws.traced import upwards
from sqrtdk.messages import Message
from sqrtdk.tracing.tensors import CallTensors, Projection, Vector

_NO_PROJECTION = "laws.heads.no_projection"


@dataclass(frozen=True, slots=True, eq=False)
class HeadMove:
    """Heads of one attention in other places.

    Attributes:
        call: The attention as it ran.
        path: Path of the innermost module around the attention that holds all weights below.
        parameters: New tensors for parameters, by name.
        query_order: (Hq,), the head of `call.query` that each head becomes.
        key_order: (H,), of `call.key`.
        value_order: (H,), of `call.value`.
        key_heads: The head of keys that each query head reads, both numbered by their rows in the weights.
        value_heads: The head of values that each query head reads.
        groups: The heads that they would read in groups side by side: 0 0 1 1.
    """

    call: CallTensors
    path: str
    parameters: dict[str, Tensor]
    query_order: Tensor
    key_order: Tensor
    value_order: Tensor
    key_heads: tuple[int, ...]
    value_heads: tuple[int, ...]
    groups: tuple[int, ...]

    @property
    def tiled(self) -> bool:
        """Whether query heads read 0 1 0 1, as `k.repeat(1, 2, 1, 1)` has it."""
        count = max(self.groups) + 1
        return 1 < count < len(self.groups) and self.key_heads == tuple(i % count for i in range(len(self.groups)))


def new_places(heads: int, groups: int) -> tuple[list[int], list[int]]:
    """Return a permutation of query heads and of key heads that keeps each query head with its key head.

    Args:
        heads: Number of query heads, a multiple of `groups`.
        groups: Number of key heads.

    Returns:
        For each query head the index that it gets, and the same for the heads of keys and values.

    Example:
        >>> new_places(4, 2), new_places(3, 1), new_places(2, 2)
        (([3, 2, 0, 1], [1, 0]), ([1, 2, 0], [0]), ([1, 0], [1, 0]))
    """
    size = heads // groups
    query = [(group + 1) % groups * size + place for group in range(groups) for place in range(size)]
    query[:size] = query[1:size] + query[:1]
    return query, [(group + 1) % groups for group in range(groups)]


def move_heads(subject: Subject, call: CallTensors) -> HeadMove:
    """Return a permutation of an attention's heads, with the weights that carry it out.

    Args:
        subject: The model.
        call: The attention with its q, k and v, which must be rows of projection weights.

    Raises:
        NotAsked: q, k or v of a head is not known rows of a weight, or the heads make no groups.
    """
    query, key, value = (_rows_of_heads(vector) for vector in (call.query, call.key, call.value))
    heads, groups = len(query.rows), len(key.rows)
    if len(value.rows) != groups or heads % groups or heads != call.query.values.shape[1]:
        raise NotAsked(Message("laws.heads.no_groups", heads=heads, keys=groups, values=len(value.rows)))
    if heads % key.values or heads % value.values:
        raise NotAsked(Message(_NO_PROJECTION))
    places, places_of_keys = new_places(heads, groups)
    changes = _Changes(subject.module)
    for vector, rows, order in (
        (call.query, query, places),
        (call.key, key, places_of_keys),
        (call.value, value, places_of_keys),
    ):
        changes.add(vector, rows, order)
    owners = [upwards(name.rpartition(".")[0]) for name in changes.orders]
    path = next(path for path in upwards(call.site) if all(path in owner for owner in owners))
    return HeadMove(
        call, path, changes.parameters(), query.moved(places), key.moved(places_of_keys), value.moved(places_of_keys),
        _read_by(query, key), _read_by(query, value), tuple(head // (heads // groups) for head in range(heads)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class _RowsOfHeads:
    """The different heads of q, k or v, in the order of their rows in the weight.

    Attributes:
        rows: (H, E), numbers of rows in the projection's output.
        number: For each head of the tensor, the number of its rows.
    """

    rows: Tensor
    number: tuple[int, ...]

    @property
    def values(self) -> int:
        """Heads of the tensor."""
        return len(self.number)

    def moved(self, order: list[int]) -> Tensor:
        """Return the head of the tensor that each of its heads becomes."""
        return torch.tensor([self.number.index(order[number]) for number in self.number])


def _rows_of_heads(vector: Vector) -> _RowsOfHeads:
    projection = vector.projection
    if projection is None or not projection.name or projection.weight is None or projection.part:
        raise NotAsked(Message(_NO_PROJECTION))
    every = [tuple(rows) for rows in projection.features.tolist()]
    different = sorted(set(every))
    if len({row for rows in different for row in rows}) != len(different) * len(every[0]):
        raise NotAsked(Message(_NO_PROJECTION))  # a part that all heads share, as the rotated part of latent keys
    return _RowsOfHeads(torch.tensor(different), tuple(different.index(rows) for rows in every))


def _read_by(query: _RowsOfHeads, other: _RowsOfHeads) -> tuple[int, ...]:
    """Return the head that each query head reads, with heads in the order of their rows."""
    each = query.values // other.values
    read = {query.number[head]: other.number[head // each] for head in range(query.values)}
    return tuple(read[number] for number in range(query.values))


@dataclass(slots=True)
class _Changes:
    """The rows that change places in each parameter of a model, by name."""

    module: nn.Module
    orders: dict[str, tuple[int, Tensor]] = field(default_factory=dict)  # axis of the rows, and their new order

    def add(self, vector: Vector, heads: _RowsOfHeads, order: list[int]) -> None:
        """Add the rows of a vector's weight and of its bias, and the gains of norms that have one for each head."""
        projection = vector.projection
        assert projection is not None
        axis, first = _axis_of_rows(self._parameter(projection.name), projection)
        self._move(projection.name, axis, heads.rows + first, order)
        beside = projection.name.removesuffix("weight") + "bias"
        if beside != projection.name and self._find(beside) is not None:
            self._move(beside, 0, heads.rows + first, order)
        for step in vector.steps:
            gain = self._find(step.gain) if step.gain else None
            if gain is not None and gain.numel() == heads.rows.numel() > heads.rows.shape[1]:
                # Of all heads together, as OLMo 2 has it; its numbers are in the order of the heads.
                for name in (step.gain, step.gain.removesuffix("weight") + "bias"):
                    if (part := self._find(name)) is not None and part.numel() == gain.numel():
                        numbers = torch.arange(gain.numel()).view_as(heads.rows)
                        self._move(name, 0, numbers if part.dim() == 1 else numbers[:, :1] // part.shape[-1], order)

    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters with their rows in the new order."""
        return {
            name: self._parameter(name).detach().index_select(axis, rows.to(self._parameter(name).device))
            for name, (axis, rows) in self.orders.items()
        }

    def _move(self, name: str, axis: int, rows: Tensor, order: list[int]) -> None:
        length = self._parameter(name).shape[axis]
        if int(rows.max()) >= length:
            raise NotAsked(Message(_NO_PROJECTION))
        _, now = self.orders.setdefault(name, (axis, torch.arange(length)))
        now[rows] = rows[order]

    def _parameter(self, name: str) -> Tensor:
        found = self._find(name)
        if found is None:
            raise NotAsked(Message(_NO_PROJECTION))
        return found

    def _find(self, name: str) -> Tensor | None:
        """Return a plain parameter; None for one of another kind, such as quantised weights."""
        owner, leaf = _owner(self.module, name)
        found = None if owner is None else owner._parameters.get(leaf)
        return found if type(found) is nn.Parameter and not found.is_meta else None


def _owner(module: nn.Module, name: str) -> tuple[nn.Module | None, str]:
    path, _, leaf = name.rpartition(".")
    owner = module_at(module, path)
    return (None if isinstance(owner, torch.jit.ScriptModule) else owner), leaf


def _axis_of_rows(parameter: Tensor, projection: Projection) -> tuple[int, int]:
    """Return the axis of the rows of a weight, and the number of its first row, by the numbers that were read.

    A Conv1D of GPT-2 has them as columns; nn.MultiheadAttention may read a third of its weight.
    """
    assert projection.weight is not None
    wanted, rows = projection.weight.flatten(0, 1), projection.features.flatten()
    for axis in range(2 if parameter.dim() > 1 else 0):  # a flat one, as FSDP's first version has it, has no rows
        length = parameter.shape[axis]
        for first in (0, length // 3, length // 3 * 2, length // 2):
            if first + int(rows.max()) >= length:
                continue
            read = parameter.detach().index_select(axis, (rows + first).to(parameter.device))
            read = (read if axis == 0 else read.transpose(0, 1)).flatten(1)
            if read.shape == wanted.shape and torch.equal(read, wanted):
                return axis, first
    raise NotAsked(Message(_NO_PROJECTION))


@contextmanager
def exchanged_parameters(module: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace parameters of a module by other tensors within the block; the original parameters are not written to.

    Args:
        module: The module. A parameter that several submodules share is replaced in each of them.
        parameters: The replacements by the parameter's dotted name.
    """
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    try:
        for name, tensor in parameters.items():
            owner, leaf = _owner(module, name)
            own = None if owner is None else owner._parameters[leaf]
            assert own is not None
            new = nn.Parameter(tensor, requires_grad=own.requires_grad)
            for part in module.modules():
                for key, held in list(part._parameters.items()):
                    if held is own:
                        places.append((part, key, own))
                        part._parameters[key] = new
        yield
    finally:
        for part, key, own in places:
            part._parameters[key] = own
