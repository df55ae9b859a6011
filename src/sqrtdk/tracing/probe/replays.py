"""Runs a part of the recorded graph again on other values, from a source node to a node computed from it.

This shows what unknown operations do to q, k or logits. No code of the model runs, and operations that write in place
get copies.

`rearrangements` asks whether every element of the result is one element of the source times a common factor. Running
the part on 1, 2, 3, ... shows where each element went, and random values check the answer. This finds a `flip`, a
permutation by any operation, a Fourier transform followed by its inverse, or a custom operator that doubles its input.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.tape import graph, ops
from sqrtdk.tracing.tape.graph import ancestors, decided_by, dominator, evaluate
from sqrtdk.tracing.tape.node import Node

_MOST_REPLAYED_ELEMENTS = 2**22  # elements of one tensor
_MOST_REPLAYED_OPERATIONS = 2**11  # operations of a part
_CASTS = frozenset({"_to_copy", "to", "type_as", "_autocast_to_reduced_precision", "_autocast_to_full_precision"})
_CUTS = frozenset({"detach", "alias"})
_RESHAPES_TO_SIZE = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias"})
# These address elements by position, so that a sample of the source would not do.
_BY_PLACE = frozenset({"index", "index_select", "gather", "as_strided", "repeat"})
_UNREPEATABLE = ops.RANDOM | {"native_dropout", "bernoulli", "dropout", "random"}
_MOST_DOMINATORS = 8  # dominators to try, from `node` backwards
_UNIT_FACTOR_TOLERANCE = 1e-4  # relative tolerance for a factor of 1
_INDEX_TOLERANCE = 0.02  # distance from an integer that counts as rounding: indices go up to 2^22 in float64
# Relative tolerance of the check by random values: one float32 rounding if values are float64, because a kernel may
# compute in float32 whatever its input is; sixteen if they are float32.
_REPLAY_TOLERANCES = {torch.float64: 2.0**-24, torch.float32: 2.0**-20}


@dataclass(frozen=True, slots=True, eq=False)
class Subgraph:
    """The operations between a source node and a node computed from it.

    Attributes:
        source: Node whose value is replaced.
        end: Node whose value is the result.
        order: The operations, in order of execution.
        device: Device of the recorded run, or the CPU if it had no data.
    """

    source: Node
    end: Node
    order: tuple[Node, ...]
    device: torch.device

    @property
    def names(self) -> str:
        """Names of the operations that are not views or casts, each once, joined by commas, for a reader."""
        return ", ".join(dict.fromkeys(node.op for node in self.order if node.op not in ops.PASSING))

    @property
    def effect(self) -> str:
        """The text that a record gives as the source of a factor found by running the operations: "effect of NAMES"."""
        return f"effect of {self.names}"

    @property
    def is_large(self) -> bool:
        """Whether a tensor of the part has too many elements to run it on a value of the source's full shape."""
        return any(math.prod(node.shape) > _MOST_REPLAYED_ELEMENTS for node in (self.source, *self.order))

    @property
    def is_meta(self) -> bool:
        """Whether the values of the operands are unknown because the model ran on the meta device."""
        return any(value.is_meta for node in self.order for value in node.operands.values())

    def sampled(self, axis: int, known: Collection[Node] = (), most: int = 2) -> tuple[int, ...]:
        """Return the source's shape, cut to `most` elements along each axis whose elements are all treated alike.

        The operations keep such an axis in place, and no operand except those in `known` varies along it. The last
        axis and `axis` keep their full size.
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
        return tuple(min(n, most) if a in alike else n for a, n in enumerate(shape))

    def run(self, value: Tensor, known: Mapping[Node, Tensor] | None = None) -> Tensor:
        """Return the result for another value of the source, of its shape or that of `sampled`.

        Args:
            value: Value of the source.
            known: Values of operands that the recorded run did not have.

        Raises:
            Exception: An operation does not accept the dtype, the numbers or the sampled shape.
        """
        values = {self.source: value, **(known or {})}
        for node in self.order:
            if node.op == "overwrite":
                values[node] = _overwritten(node, values)
            else:
                values[node] = _ran(node, values, value.dtype, self._sizes(node, value))
        return values[self.end]

    def _sizes(self, node: Node, value: Tensor) -> list[int]:
        """Return the shape of a node's result, reduced like `value` if that is a sample of the source."""
        taken = {a: n for a, n in enumerate(value.shape) if n != self.source.shape[a]}
        return [taken.get(a, n) for a, n in enumerate(node.shape)]


def subgraphs_inwards(node: Node) -> Iterator[Subgraph]:
    """Yield the subgraphs that end in a node, shortest first.

    Each begins at the next dominator: a node through which all paths from the activations go. There are few at most.
    """
    source, _ = dominator(node)
    for _ in range(_MOST_DOMINATORS):
        found = None if source is None else subgraph_between(source, node)
        if source is None or found is None:
            return
        yield found
        if source.is_root:
            return
        source, _ = dominator(source)


def subgraph_between(source: Node, end: Node) -> Subgraph | None:
    """Return the operations from one node to another, so that they can be run again.

    Args:
        source: node whose value is replaced.
        end: node whose value is the result.

    Returns:
        The operations; None if they can't be run again, are too many, or reach a root beside `source`.
    """
    order: list[Node] = []
    device = torch.device("cpu")
    queue, known = [end], {source}
    while queue:
        node = queue.pop()
        if node in known:
            continue
        known.add(node)
        if node.is_root or node.op in _UNREPEATABLE or len(order) >= _MOST_REPLAYED_OPERATIONS:
            return None
        if node.func is None and node.op != "overwrite":
            return None
        order.append(node)
        for value in node.operands.values():
            device = device if value.is_meta else value.device
        for parent in node.parents():
            # The recorded value of an operand is used, unless it depends on the same product: z / z.std() is not a
            # factor.
            fixed = _is_operand(node, parent) and not parent.products & source.products
            if not fixed if parent.act else decided_by(parent, source):
                queue.append(parent)
    return Subgraph(source, end, tuple(sorted(order, key=lambda node: node.serial)), device)


def run_again(ends: Collection[Node], known: Mapping[Node, Tensor]) -> dict[Node, Tensor]:
    """Return the values of nodes, computed again in float64 from the roots behind them, with autograd as it is set.

    Casts and `detach` are left out.

    Args:
        ends: The nodes.
        known: Values of nodes; those of roots, and of operands that the tape kept, need not be among them.

    Raises:
        RuntimeError: The values of an operand are not known.
        Exception: An operation does not accept float64.
    """
    values = {**known}
    moving = {node for node, value in known.items() if value.requires_grad}  # all else may be what it was
    for node in sorted({node for end in ends for node in ancestors(end)}, key=lambda node: node.serial):
        if node in values or node.op in _UNREPEATABLE:
            continue
        table = None if node.root is None or node.root.lookup is None else node.root.lookup[0]
        moves = table in moving or any(parent in moving for parent in node.parents())
        moving |= {node} if moves else set()
        try:
            value = _computed_again(node, values, moves)
        except Exception:
            if node in ends:
                raise
            continue
        if value is not None:
            values[node] = value.to(torch.float64) if value.is_floating_point() else value
    return values


def _computed_again(node: Node, values: dict[Node, Tensor], moves: bool) -> Tensor | None:
    """Return the values of a node as `run_again` does; None for a constant, which is computed where it is an operand.

    Args:
        node: The node.
        values: Values of nodes before it.
        moves: Whether it may be another than in the recorded run.
    """
    lookup = None if node.root is None else node.root.lookup
    if lookup is not None and lookup[0] in values:
        return values[lookup[0]][lookup[1]]
    if not node.args or (node.value is not None and not moves):
        value = node.value if node.value is not None else evaluate(node)
        # cat([torch.tensor([]), key], -2): a cache without tokens
        return torch.zeros(node.shape) if value is None and not math.prod(node.shape) else value
    if not (node.act or any(parent in values for parent in node.parents())):
        return None
    if node.op == "overwrite":
        return _overwritten(node, values)
    if node.op in _CUTS:
        return values[next(node.parents())]
    if node.op in _CASTS and not node.kwargs.get("dtype", torch.float64).is_floating_point:
        return values[next(node.parents())].to(node.kwargs["dtype"])
    return _ran(node, values, torch.float64, list(node.shape))


def _is_operand(node: Node, parent: Node) -> bool:
    """Return whether the tape kept the values of `parent` as an operand, so that it need not be recomputed."""
    return any(i in node.operands for i, arg in enumerate(node.args) if arg is parent)


def _ran(node: Node, known: dict[Node, Tensor], dtype: torch.dtype, sizes: list[int]) -> Tensor:
    """Return the result of one operation with the known values in place of its argument nodes."""
    if node.op == "copy":  # y[..., :n] = x into an empty y: the previous content is unknown and does not matter
        written: Tensor = _argument(node, 1, node.args[1], known)
        return written.expand(sizes)
    args = [_argument(node, i, arg, known) for i, arg in enumerate(node.args)]
    if node.op in _CASTS:  # left out, so that the test values keep their precision
        cast: Tensor = args[0]
        return cast
    if node.op in _RESHAPES_TO_SIZE:  # a sample has other sizes than the recorded arguments
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
    """Return an argument with its floating-point tensors in `dtype`, so that constants match the test values."""
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
    """Return a tensor after a write into a part of it: y[..., :n] = x."""
    old, write = node.args
    before = known[old] if old in known else evaluate(old)
    if before is None and "empty" in old.op and write in known:  # NaN marks elements that are never written
        before = known[write].new_full(old.shape, math.nan)
    if before is None or write not in known:
        raise RuntimeError("what was written to is not known")
    after = before.to(known[write].dtype).clone()
    graph.written_view(write, after).copy_(known[write])
    return after


# -- entries that are moved and multiplied by one number ---------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Rearrangement:
    """A part that permutes or selects elements of `part.source` and multiplies all of them by `by`.

    Attributes:
        part: The operations.
        by: The factor.
        order: Flat index in the source of each element of the end.
    """

    part: Subgraph
    by: float
    order: Tensor

    def factor(self, where: str) -> Factor | None:
        """Return the factor for the record, or None if it is 1 within rounding."""
        return (
            None
            if math.isclose(self.by, 1.0, rel_tol=_UNIT_FACTOR_TOLERANCE)
            else Factor(self.by, where, self.part.effect)
        )

    @property
    def in_place(self) -> bool:
        """Whether every element keeps its place, so that the operations only multiply by `by`."""
        same = self.part.source.shape == self.part.end.shape
        return same and torch.equal(self.order, torch.arange(len(self.order), device=self.order.device))

    def place(self, value: Tensor) -> Tensor:
        """Return values of the source moved to their places in the end, without the factor."""
        return value.reshape(-1)[self.order.to(value.device)].reshape(self.part.end.shape)


def rearrangements(node: Node) -> Iterator[Rearrangement]:
    """Yield the subgraphs that end in a node and only move elements and scale all by one number, shortest first."""
    for part in subgraphs_inwards(node):
        if part.is_large:
            return
        for dtype in (torch.float64, torch.float32):
            try:
                found = _rearrangement(part, dtype)
            except Exception:  # an operation may not accept the dtype or the numbers
                continue
            if found is not None:
                yield found
            break


def _random(part: Subgraph, dtype: torch.dtype) -> Tensor:
    return torch.randn(part.source.shape, dtype=dtype, generator=torch.Generator().manual_seed(0)).to(part.device)


def _rearrangement(part: Subgraph, dtype: torch.dtype) -> Rearrangement | None:
    count = math.prod(part.source.shape)
    numbers = torch.arange(1.0, count + 1.0, dtype=dtype, device=part.device).reshape(part.source.shape)
    if not count or (dtype == torch.float32 and count > 2**12):  # float32 must tell the indices apart
        return None
    # Ones give the factor; 1, 2, 3, ... divided by it give the place of each element.
    ones = part.run(torch.ones_like(numbers))
    if ones.is_complex() or not ones.is_floating_point() or not ones.numel() or tuple(ones.shape) != part.end.shape:
        return None
    by = float(ones.double().mean())
    rounding = _REPLAY_TOLERANCES[dtype] * abs(by)
    if not by or not math.isfinite(by):
        return None
    places = part.run(numbers).double() / by
    order = places.round()
    if (
        bool(((places - order).abs() > _INDEX_TOLERANCE).any())
        or bool((order < 1).any())
        or bool((order > count).any())
    ):
        return None
    found = Rearrangement(part, by, order.long().flatten() - 1)
    other = _random(part, dtype)
    for scale in (1.0, 64.0, 2.0**20):  # a clamp acts on large values only
        gap = part.run(scale * other).double() - by * scale * found.place(other).double()
        if bool((gap.abs() > 16 * rounding * scale).any()):
            return None
    return found
