"""Running a part of the recorded graph again, from some of its nodes to one that was made of them, on other values.

What an operation does to q, k or logits need not be known by its name where it can be asked: other values go in, and
what comes out is looked at. Nothing of the model runs; operations that write in place get copies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.constants import evaluate, part
from sqrtdk.tracing.watch.graph import Node, dominator

_LARGEST = 2**22  # numbers of one tensor
_MOST = 2**11  # operations
_CASTS = frozenset({"_to_copy", "to", "type_as", "_autocast_to_reduced_precision", "_autocast_to_full_precision"})
_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})
_BY_PLACE = frozenset({"index", "index_select", "gather", "as_strided", "repeat"})  # they need all entries
_UNREPEATABLE = ops.RANDOM | {"native_dropout", "bernoulli", "dropout", "random"}


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The operations between a node and one that was made of it.

    Attributes:
        source: where values go in.
        end: where they come out.
        order: the operations, in the order of running.
        device: of the run; the CPU's where it had no data.
    """

    source: Node
    end: Node
    order: tuple[Node, ...]
    device: torch.device

    @property
    def names(self) -> str:
        """Of the operations that are no views, for a reader."""
        return ", ".join(dict.fromkeys(node.op for node in self.order if node.op not in ops.VIEWS | ops.SAME))

    @property
    def effect(self) -> str:
        """What a factor is said to come from that is known by what the operations do."""
        return f"effect of {self.names}"

    @property
    def is_large(self) -> bool:
        """Whether it takes more than a moment to run it on a value of the source's shape."""
        return any(math.prod(node.shape) > _LARGEST for node in (self.source, *self.order))

    @property
    def is_meta(self) -> bool:
        """Whether the run had no values of what the operations met."""
        return any(value.is_meta for node in self.order for value in node.operands.values())

    def sampled(self, axis: int, known: Collection[Node] = ()) -> tuple[int, ...]:
        """The source's shape with no more than two entries along each axis on which all entries fare alike.

        The operations leave such an axis in its place, and no operand but those in `known` varies along it. The last
        axis and `axis` stay whole.
        """
        shape, inside = self.source.shape, {self.source, *self.order, *known}
        alike = set(range(len(shape) - 1)) - {axis % len(shape)}
        for node in self.order:
            if node.op in _BY_PLACE:
                return shape
            alike = {a for a in alike if node.shape[a : a + 1] == shape[a : a + 1]}
            for operand in (parent for parent in node.parents() if parent not in inside):
                before = len(node.shape) - len(operand.shape)
                alike = {a for a in alike if a < before or operand.shape[a - before] == 1}
        return tuple(min(n, 2) if a in alike else n for a, n in enumerate(shape))

    def run(self, value: Tensor, known: Mapping[Node, Tensor] | None = None) -> Tensor:
        """What comes out for a value of the source's shape, or of that of a sample.

        Args:
            value: goes in at the source.
            known: values of operands that the run did not have.

        Raises:
            Exception: of an operation, for a dtype or numbers that it does not take, or for a sample.
        """
        values = {self.source: value, **(known or {})}
        for node in self.order:
            if node.op == "overwrite":
                values[node] = _overwritten(node, values)
            else:
                values[node] = _ran(node, values, value.dtype, self._sizes(node, value))
        return values[self.end]

    def _sizes(self, node: Node, value: Tensor) -> list[int]:
        """The shape of what a node gives, where `value` may be a sample of the source."""
        taken = {a: n for a, n in enumerate(value.shape) if n != self.source.shape[a]}
        return [taken.get(a, n) for a, n in enumerate(node.shape)]


def inwards(node: Node, deepest: int) -> Iterator[Part]:
    """Parts that end in `node`, the shortest first: each begins where all paths meet farther in."""
    source, _ = dominator(node)
    for _ in range(deepest):
        found = None if source is None else part_between(source, node)
        if source is None or found is None:
            return
        yield found
        if source.is_root:
            return
        source, _ = dominator(source)


def part_between(source: Node, end: Node) -> Part | None:
    """The operations from `source` to `end`; None where they can't be run again, or are too many."""
    order: list[Node] = []
    device = torch.device("cpu")
    queue, known = [end], {source}
    while queue:
        node = queue.pop()
        if node in known:
            continue
        known.add(node)
        if node.is_root or node.op in _UNREPEATABLE or len(order) >= _MOST:
            return None
        if node.func is None and node.op != "overwrite":
            return None
        order.append(node)
        for value in node.operands.values():
            device = device if value.is_meta else value.device
        queue += [parent for parent in node.parents() if parent.act and not _is_operand(node, parent)]
    return Part(source, end, tuple(sorted(order, key=lambda node: node.serial)), device)


def _is_operand(node: Node, parent: Node) -> bool:
    """Whether the values of an activation were kept as it met the lineage: it takes no part in the change."""
    return any(i in node.operands for i, arg in enumerate(node.args) if arg is parent)


def _ran(node: Node, known: dict[Node, Tensor], dtype: torch.dtype, sizes: list[int]) -> Tensor:
    """An operation with other values in the places of nodes."""
    args = [_argument(node, i, arg, known) for i, arg in enumerate(node.args)]
    if node.op in _CASTS:
        cast: Tensor = args[0]
        return cast
    if node.op in _RESHAPES:
        whole: Tensor = args[0]
        return whole.reshape(sizes)
    if node.op == "expand":
        args[1] = sizes
    args = [_in_dtype(arg, dtype) for arg in args]
    schema = getattr(node.func, "_schema", None)
    if schema is not None and schema.is_mutable:
        args = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    result = node.func(*args, **node.kwargs)
    output: Tensor = result[node.out] if node.out is not None else result
    return output


def _in_dtype(arg: Any, dtype: torch.dtype) -> Any:
    """Constants of half precision meet values of more: what they are in it they are in any."""
    if isinstance(arg, list):
        return [_in_dtype(item, dtype) for item in arg]
    return arg.to(dtype) if isinstance(arg, Tensor) and arg.is_floating_point() else arg


def _argument(node: Node, place: int, arg: Any, known: dict[Node, Tensor]) -> Any:
    if isinstance(arg, (list, tuple)):
        return [_value(node, (place, j), x, known) if isinstance(x, Node) else x for j, x in enumerate(arg)]
    return _value(node, place, arg, known) if isinstance(arg, Node) else arg


def _value(node: Node, place: int | tuple[int, int], arg: Node, known: dict[Node, Tensor]) -> Tensor:
    if arg in known:
        return known[arg]
    value = node.operands.get(place)
    if value is None or value.is_meta:
        value = evaluate(arg)
    if value is None:
        raise RuntimeError(f"the values of an operand of {node.op} are not known")
    return value


def _overwritten(node: Node, known: dict[Node, Tensor]) -> Tensor:
    """A tensor of which a part was written."""
    old, write = node.args
    before = known[old] if old in known else evaluate(old)
    if before is None and "empty" in old.op and write in known:  # what is not written later is no number
        before = known[write].new_full(old.shape, math.nan)
    if before is None or write not in known:
        raise RuntimeError("what was written to is not known")
    after = before.to(known[write].dtype).clone()
    part(write, after).copy_(known[write])
    return after
