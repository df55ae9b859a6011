"""Running a part of the recorded graph again, from some of its nodes to one that was made of them, on other values.

What an operation does to q, k or logits need not be known by its name where it can be asked: other values go in, and
what comes out is looked at. Nothing of the model runs; operations that write in place get copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.constants import evaluate, part
from sqrtdk.tracing.watch.graph import Node, dominator, is_learned

_LARGEST = 2**22  # numbers of one tensor
_MOST = 2**11  # operations
_CASTS = frozenset({"_to_copy", "to", "type_as", "_autocast_to_reduced_precision", "_autocast_to_full_precision"})
_SIZELESS = frozenset({"unsqueeze", "squeeze"})  # views that do not hold the sizes of what they view
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

    def sampled(self, axis: int) -> tuple[int, ...]:
        """The shape of the first and the last of each axis but `axis`."""
        dims = len(self.source.shape)
        return tuple(n if d - dims == axis else min(n, 2) for d, n in enumerate(self.source.shape))

    def run(self, value: Tensor) -> Tensor:
        """What comes out for a value of the source's shape, or for the first and the last of some of its axes.

        Parameters without values count as ones.

        Raises:
            Exception: of an operation, for a dtype or numbers that it does not take, or for a sample.
        """
        known = {self.source: value}
        sample = None if tuple(value.shape) == self.source.shape else _Sample(self.source.shape, tuple(value.shape))
        for node in self.order:
            if node.op == "overwrite":
                known[node] = _overwritten(node, known)
            else:
                known[node] = _ran(node, known, value.dtype, sample)
        return known[self.end]


@dataclass(frozen=True, slots=True)
class _Sample:
    """The first and the last of some axes of a shape."""

    whole: tuple[int, ...]
    taken: tuple[int, ...]

    def of(self, operand: Tensor) -> Tensor:
        """The part of an operand that meets what was taken."""
        for axis in range(-operand.dim(), 0):
            size = self.whole[axis]
            if operand.shape[axis] == size != self.taken[axis]:
                operand = operand.index_select(axis, torch.tensor([0, size - 1], device=operand.device))
        return operand

    def sizes(self, sizes: Any) -> list[int]:
        """Those that `x.expand(sizes)` would have been called with."""
        return [taken if n == whole else n for n, whole, taken in zip(sizes, self.whole, self.taken, strict=True)]


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


def _ran(node: Node, known: dict[Node, Tensor], dtype: torch.dtype, sample: _Sample | None) -> Tensor:
    """An operation with other values in the places of nodes."""
    args: list[Any] = [_argument(node, i, arg, known, sample) for i, arg in enumerate(node.args)]
    if sample is not None and node.op in ops.VIEWS - _SIZELESS:
        if node.op != "expand":
            raise RuntimeError(f"{node.op} needs all rows")
        args[1] = sample.sizes(args[1])
    if node.op in _CASTS:
        cast: Tensor = args[0]
        return cast
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


def _argument(node: Node, place: int, arg: Any, known: dict[Node, Tensor], sample: _Sample | None) -> Any:
    if isinstance(arg, (list, tuple)):
        items = enumerate(arg)
        return [_value(node, (place, j), x, known, sample) if isinstance(x, Node) else x for j, x in items]
    return _value(node, place, arg, known, sample) if isinstance(arg, Node) else arg


def _value(
    node: Node, place: int | tuple[int, int], arg: Node, known: dict[Node, Tensor], sample: _Sample | None
) -> Tensor:
    if arg in known:
        return known[arg]
    value = node.operands.get(place)
    if value is None or value.is_meta:
        value = evaluate(arg)
    if value is None and not arg.act and is_learned(arg):
        value = torch.ones(arg.shape)
    if value is None:
        raise RuntimeError(f"the values of an operand of {node.op} are not known")
    return value if sample is None else sample.of(value)


def _overwritten(node: Node, known: dict[Node, Tensor]) -> Tensor:
    """A tensor of which a part was written."""
    old, write = node.args
    before = known[old] if old in known else evaluate(old)
    if before is None or write not in known:
        raise RuntimeError("what was written to is not known")
    after = before.to(known[write].dtype).clone()
    part(write, after).copy_(known[write])
    return after
