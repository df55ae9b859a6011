"""Which heads are scaled as one: those that share a row, over all calls of a plan; and which must be left alone."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.repair.gains import gain_rows
from sqrtdk.repair.rows import CallPlan, Refusal, Rows
from sqrtdk.tracing import CallTensors

if TYPE_CHECKING:
    from jaxtyping import Int

    from sqrtdk.repair.lookup import Parameters


def number_groups(rows: Sequence[Sequence[Rows]], heads: Sequence[int]) -> list[Int[Tensor, " Hq"]]:
    """Numbers of heads: one number for all that share a row of a parameter, directly or through others.

    Args:
        rows: of each call.
        heads: query heads of each call.

    Returns:
        (Hq,) of each call; numbers are dense, from 0.

    Example:
        >>> own, group = torch.tensor([[0], [1], [2]]), torch.tensor([[0], [0], [1]])
        >>> number_groups([[Rows("q", "q", own), Rows("k", "k", group)]], [3])
        [tensor([0, 0, 1])]
    """
    starts = [sum(heads[:number]) for number in range(len(heads) + 1)]
    pairs: dict[str, list[Tensor]] = defaultdict(list)
    for number, of_call in enumerate(rows):
        nodes = torch.arange(starts[number], starts[number + 1])
        for entry in of_call:
            index = entry.index.cpu()
            pairs[entry.name].append(torch.stack([index, nodes[:, None].expand_as(index)], -1).flatten(0, 1))
    root = list(range(starts[-1]))

    def find(node: int) -> int:
        while root[node] != node:
            root[node] = root[root[node]]
            node = root[node]
        return node

    for of_parameter in pairs.values():
        table = torch.unique(torch.cat(of_parameter), dim=0)  # by feature, then by head
        beside = table[1:, 0] == table[:-1, 0]
        neighbours = torch.stack([table[:-1, 1], table[1:, 1]], -1)[beside]
        for one, other in torch.unique(neighbours, dim=0).tolist():
            root[find(other)] = find(one)
    roots = torch.tensor([find(node) for node in range(starts[-1])], dtype=torch.long)
    _, numbers = torch.unique(roots, return_inverse=True)
    return [numbers[starts[i] : starts[i + 1]] for i in range(len(heads))]


@dataclass(frozen=True, slots=True, eq=False)
class Readers:
    """Who reads the parameters of a model: the refused calls', and v's."""

    names: tuple[frozenset[str], ...]  # of each call: the parameters of its q and k
    values: tuple[Rows, ...]


def readers(kept: Sequence[CallTensors], parameters: Parameters) -> Readers:
    """What each call of a trace is known to read; all that its site has, where q or k is not known."""
    return Readers(
        tuple(_read(tensors, parameters) for tensors in kept),
        tuple(rows for tensors in kept for rows in rows_of_v(tensors, parameters)),
    )


def conflict(plan: CallPlan, plans: Sequence[CallPlan], read: Readers) -> str | None:
    """Why a call can't be scaled though its own rows are known: who else uses them."""
    for entry in plan.rows:
        for other, names in zip(plans, read.names, strict=True):
            if other.refused is not None and entry.name in names:
                return f"{entry.name} is also used by {other.site or 'the root'}, call {other.index}: {other.refused}"
    beside = [rows for other in plans for rows in other.rows] + list(read.values)
    for entry in plan.rows:
        for rows in beside:
            if rows.name == entry.name and (rows.axis, rows.offset) != (entry.axis, entry.offset):
                return f"{entry.name} is used both as it is and transposed, or as a gain in two ways"
            if _role(rows) != _role(entry) and overlaps(entry, rows):
                return f"{entry.name} gives both {_role(entry)} and {_role(rows)}: scaled for one, it changes the other"
    return None


def overlaps(one: Rows, other: Rows) -> bool:
    """Whether two sets of rows have one in common."""
    return one.name == other.name and bool(torch.isin(one.index, other.index).any())


def _role(rows: Rows) -> str:
    return rows.side.replace("whole", "q")


def rows_of_v(tensors: CallTensors, parameters: Parameters) -> list[Rows]:
    """Rows that set v: of its projection, and of the gain of a norm behind it; as far as they are known."""
    value, rows = tensors.value, list[Rows]()
    with contextlib.suppress(Refusal):
        if value.projection is not None:
            place = parameters.find("v", value.projection)
            rows.append(Rows(place.name, "v", value.projection.features.cpu() + place.shift, place.axis))
    with contextlib.suppress(Refusal):
        if any(step.name == "norm" for step in value.steps):
            rows += gain_rows("v", value, tensors.query.values.shape[1], tensors.site, parameters)
    return rows


def _read(tensors: CallTensors, parameters: Parameters) -> frozenset[str]:
    names = set()
    for vector in (tensors.query, tensors.key):
        if vector.projection is None or any(step.name == "norm" for step in vector.steps):
            return frozenset(parameters.below(tensors.site))
        try:
            names.add(parameters.find("", vector.projection).name)
        except Refusal:
            return frozenset(parameters.below(tensors.site))
    return frozenset(names)
