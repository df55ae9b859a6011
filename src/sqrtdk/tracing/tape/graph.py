"""Walks over the tape: views, what dominates what, and the values that only the tape holds (constants, writes)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.node import Node, back


def replay(node: Node, value: Tensor) -> Tensor:
    """Apply the view that `node` is to `value`, which has the shape of the node's parent.

    Raises:
        RuntimeError: an index has no data, or the operation does not take the value.
    """
    if not value.is_meta and any(operand.is_meta for operand in node.operands.values()):
        raise RuntimeError("an index without data")  # torch would give any numbers
    if node.op in ops.RESHAPES:
        return value.reshape(node.shape)
    if node.op == "as_strided":  # its strides are those of a tensor without gaps, or there is no telling
        value = value.contiguous()
    if node.op == "view_as_complex" and value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()  # as the model's own, whose cast moved nothing and is passed over
    main = node.main()
    args = [
        [node.operands.get((i, j), item) for j, item in enumerate(arg)]
        if isinstance(arg, list)
        else (value if arg is main else node.operands.get(i, arg))
        for i, arg in enumerate(node.args)
    ]
    result = node.func(*args, **node.kwargs)
    output: Tensor = result[node.out] if node.out is not None else result
    return output


def replay_all(views: Iterable[Node], value: Tensor) -> Tensor:
    """Apply one view after the other."""
    for view in views:
        value = replay(view, value)
    return value


def numbered(shape: tuple[int, ...], axis: int) -> Tensor:
    """0, 1, 2 ... along an axis, spread over the shape."""
    line = torch.arange(shape[axis], device="cpu")
    return line.view([-1 if d == axis else 1 for d in range(len(shape))]).expand(shape)


def dominator(node: Node) -> tuple[Node | None, list[Node]]:
    """The nearest node that every activation path from `node` passes through, and the nodes in between.

    Nodes are numbered in the order of creation, so always taking the youngest of the frontier visits children
    before parents; when the frontier is a single node, every path has met in it.
    """
    frontier = {p for p in node.parents() if p.act}
    between = [node]
    while frontier:
        youngest = max(frontier, key=lambda n: n.serial)
        if len(frontier) == 1:
            return youngest, between
        frontier.remove(youngest)
        if youngest.is_root:
            return None, between
        between.append(youngest)
        frontier.update(p for p in youngest.parents() if p.act)
    return None, between


def ancestors(node: Node, *, closed: frozenset[str] = frozenset()) -> Iterator[Node]:
    """The node and all that it was made from, each once, depth first; not what went into operations of `closed`."""
    queue, known = [node], set[Node]()
    while queue:
        current = queue.pop()
        if current not in known:
            known.add(current)
            yield current
            if current.op not in closed:
                queue.extend(current.parents())


def decided_by(node: Node, lineage: Node) -> bool:
    """Whether a constant operand is none: it is a condition on q, k or logits, or made of one.

    torch.where(q > -8, q, 2 * q + 8)
    """
    made_of = (before for before in ancestors(node, closed=ops.CREATIONS) if before.act)
    return not node.act and any(_starts(a) & lineage.roots or a.products & lineage.products for a in made_of)


def _starts(node: Node) -> frozenset[Node]:
    """The roots that it descends from, those behind products of q and k too."""
    return node.roots.union(*(arg.roots for product in node.products for arg in product.parents()))


def is_learned(node: Node) -> bool:
    """Whether a parameter is among what it was made from."""
    return any(leaf.op == "parameter" or leaf.learned for leaf in ancestors(node))


def capacity(node: Node) -> int:
    """How many numbers a tensor can hold that differ: those of the smallest among the views that lead to it."""
    return min(math.prod(view.shape) for view in back(node))


def alias(tensor: Tensor) -> Tensor:
    """Another tensor object on the same storage: holding it does not keep the graph's key alive."""
    with torch.no_grad():
        return tensor.detach()


# -- constants without data, and tensors that were written part by part ------------------------------------------------


LARGEST = 2**22  # elements of one tensor
_SHAPED = frozenset({"zeros_like", "ones_like", "full_like"})  # of an activation they take the shape alone
_NEW = frozenset({"new_full", "new_zeros", "new_ones"})  # and these not even that
_DEEPEST = 200  # operations between a tensor and its numbers


def evaluate(node: Node) -> Tensor | None:
    """The values of a tensor that depends on no input and no parameter (a causal mask); None for any other."""
    try:
        with torch.no_grad():
            return _value(node, {}, 0)
    except Exception:  # it is no constant, or an operation has no CPU kernel for what it was given
        return None


def _value(node: Node, known: dict[int, Tensor], depth: int) -> Tensor:
    """As `evaluate`, with the values that are known by serial number; raises for what is no constant."""
    if node.serial not in known:
        if node.external or node.act or node.op in ops.RANDOM or depth > _DEEPEST or math.prod(node.shape) > LARGEST:
            raise LookupError(node.op)
        known[node.serial] = _computed(node, known, depth)
    return known[node.serial]


def _computed(node: Node, known: dict[int, Tensor], depth: int) -> Tensor:
    if node.op == "constant" and node.value is not None:
        return node.value
    written = node.op == "overwrite"
    made = node.args[1] if written else node
    args = [_argument(arg, made, known, depth) for arg in (made.args[1:] if written else made.args)]
    keywords = {name: "cpu" if name == "device" else value for name, value in made.kwargs.items()}
    if written:
        whole = _value(node.args[0], known, depth + 1).clone()
        made.func(part(made, whole), *args, **keywords)
        return whole
    result = made.func(*args, **keywords)
    output: Tensor = result[node.out] if node.out is not None else result
    return output


def _argument(arg: Any, node: Node, known: dict[int, Tensor], depth: int) -> Any:
    """An argument of an operation, with values in place of nodes."""
    if isinstance(arg, (list, tuple)):
        return [_argument(item, node, known, depth) for item in arg]
    if not isinstance(arg, Node):
        return arg
    try:
        return _value(arg, known, depth + 1).clone()  # the operation may write to it
    except Exception:
        if node.op not in _SHAPED | _NEW:
            raise
        return torch.empty(arg.shape if node.op in _SHAPED else ())


def written(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """What a tensor was before it was written to, and the writes, the first one first."""
    writes: tuple[Node, ...] = ()
    while node.op == "overwrite":
        node, new = node.args
        writes = (new, *writes)
    return node, writes


def block(write: Node) -> Node | None:
    """The logits that a write copied; None for any other write."""
    source = write.args[1] if write.op == "copy" and len(write.args) > 1 else None
    return source if isinstance(source, Node) and source.products else None


def part(write: Node, whole: Tensor) -> Tensor:
    """The view of `whole` that was written to."""
    path: list[Node] = []
    view = write.args[0]
    while view.shape != whole.shape and view.op in ops.VIEWS:
        path.append(view)
        view = view.args[0]
    return replay_all(reversed(path), whole)


def box(write: Node, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Where a block that was written begins on each axis of the whole; None where it is no slice, or has gaps."""
    starts = []
    for dim in range(len(shape)):
        places = part(write, numbered(shape, dim))
        line = places[tuple(slice(None) if d == dim else 0 for d in range(places.dim()))]
        if places.dim() != len(shape) or bool((line != line[0] + torch.arange(places.shape[dim])).any()):
            return None
        starts.append(int(line[0]))
    return tuple(starts)


def spread(node: Node, value: Tensor) -> Tensor:
    """The whole of which `value` is the first block of logits written to it; elsewhere its nearest entry.

    Raises:
        RuntimeError: the block is no box.
    """
    starts = box(next(write for write in written(node)[1] if block(write) is not None), node.shape)
    if starts is None or value.dim() != len(starts):
        raise RuntimeError("a block that is no slice, or has gaps")
    for dim, (n, start) in enumerate(zip(node.shape, starts, strict=True)):
        if value.shape[dim] != n:
            nearest = (torch.arange(n, device=value.device) - start).clamp(0, value.shape[dim] - 1)
            value = value.index_select(dim, nearest)
    return value
