"""Walks over the tape: replays views, finds dominators, and computes values that only the tape holds (constants)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.node import Node, back


def replay(node: Node, value: Tensor) -> Tensor:
    """Return a tensor after the view, or other operation, that made a node.

    Args:
        node: the node; operands other than its main parent have their recorded values.
        value: a tensor of the shape of the node's main parent.

    Raises:
        RuntimeError: an index has no data, or the operation does not take the value.
    """
    if not value.is_meta and any(operand.is_meta for operand in node.operands.values()):
        raise RuntimeError("an index without data")  # torch would return arbitrary numbers
    if node.op in ops.RESHAPES:
        return value.reshape(node.shape)
    if node.op == "as_strided":  # assumes that the model's tensor was contiguous: its strides are not on the tape
        value = value.contiguous()
    if node.op == "view_as_complex" and value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()  # view_as_complex needs float32; the model's own cast is not replayed
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
    """Return `value` after the operations of all `views`, in order."""
    for view in views:
        value = replay(view, value)
    return value


def numbered(shape: tuple[int, ...], axis: int) -> Tensor:
    """Return the index along an axis, 0, 1, 2 and so on, expanded to the shape: int64, on the CPU."""
    line = torch.arange(shape[axis], device="cpu")
    return line.view([-1 if d == axis else 1 for d in range(len(shape))]).expand(shape)


def dominator(node: Node) -> tuple[Node | None, list[Node]]:
    """Return the nearest node that every activation path from `node` passes through, and the nodes in between.

    Serial numbers follow the order of creation, so taking the youngest node of the frontier visits children before
    parents. Once the frontier is a single node, all paths have met in it.
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
    """Yield the node and all its ancestors, each once, depth first.

    Args:
        node: where the walk begins.
        closed: names of the operations beyond which it does not go; their nodes are yielded.
    """
    queue, known = [node], set[Node]()
    while queue:
        current = queue.pop()
        if current not in known:
            known.add(current)
            yield current
            if current.op not in closed:
                queue.extend(current.parents())


def decided_by(node: Node, lineage: Node) -> bool:
    """Return whether a constant operand depends on q, k or logits after all, through a condition.

    In `torch.where(q > -8, q, 2 * q + 8)` the mask `q > -8` carries no activation but decides by q.

    Args:
        node: node of the operand.
        lineage: node of q, k or the logits.
    """
    made_of = (before for before in ancestors(node, closed=ops.CREATIONS) if before.act)
    return not node.act and any(_starts(a) & lineage.roots or a.products & lineage.products for a in made_of)


def _starts(node: Node) -> frozenset[Node]:
    """Return the roots that the node descends from, including those behind products of q and k."""
    return node.roots.union(*(arg.roots for product in node.products for arg in product.parents()))


def is_learned(node: Node) -> bool:
    """Return whether a parameter is among the node's ancestors, or the node itself is one."""
    return any(leaf.op == "parameter" or leaf.learned for leaf in ancestors(node))


def capacity(node: Node) -> int:
    """Return how many different numbers a tensor can hold: the size of the smallest view that leads to it."""
    return min(math.prod(view.shape) for view in back(node))


def alias(tensor: Tensor) -> Tensor:
    """Return another tensor object on the same storage; holding it does not keep the graph's weak key alive."""
    with torch.no_grad():
        return tensor.detach()


# -- constants without data, and tensors that were written part by part ------------------------------------------------


MOST_CONSTANT_ELEMENTS = 2**22  # elements of a constant that is computed again
_SHAPED = frozenset({"zeros_like", "ones_like", "full_like"})  # use only the shape of an activation
_FILLED_LIKE = frozenset({"new_full", "new_zeros", "new_ones"})  # use nothing but its dtype and device
_MOST_CONSTANT_OPERATIONS = 200  # operations behind a constant; the recursion must not exhaust Python's stack


def evaluate(node: Node) -> Tensor | None:
    """Return the values of a tensor that depends on no input or parameter, such as a causal mask.

    They are computed again on the CPU. None for any other tensor, for random or very large ones, and if an operation
    does not run on the CPU.
    """
    try:
        with torch.no_grad():
            return _value(node, {}, 0)
    except Exception:  # not a constant, or an operation has no CPU kernel for its arguments
        return None


def _value(node: Node, known: dict[int, Tensor], depth: int) -> Tensor:
    """Return the values as `evaluate` does, with known values by serial number; raises if it is not a constant."""
    if node.serial not in known:
        if (
            node.external
            or node.act
            or node.op in ops.RANDOM
            or depth > _MOST_CONSTANT_OPERATIONS
            or math.prod(node.shape) > MOST_CONSTANT_ELEMENTS
        ):
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
        made.func(written_view(made, whole), *args, **keywords)
        return whole
    result = made.func(*args, **keywords)
    output: Tensor = result[node.out] if node.out is not None else result
    return output


def _argument(arg: Any, node: Node, known: dict[int, Tensor], depth: int) -> Any:
    """Return an argument of an operation with values in place of nodes."""
    if isinstance(arg, (list, tuple)):
        return [_argument(item, node, known, depth) for item in arg]
    if not isinstance(arg, Node):
        return arg
    try:
        return _value(arg, known, depth + 1).clone()  # the operation may write to it
    except Exception:
        if node.op not in _SHAPED | _FILLED_LIKE:
            raise
        return torch.empty(arg.shape if node.op in _SHAPED else ())


def distinct(tensor: Tensor, last: int = 2) -> Tensor:
    """Return the tensor with its broadcast axes (stride 0) narrowed to size 1.

    Args:
        tensor: the tensor.
        last: number of axes at the end that stay as they are.
    """
    for axis in range(tensor.dim() - last):
        if tensor.stride(axis) == 0 and tensor.shape[axis] > 1:
            tensor = tensor.narrow(axis, 0, 1)
    return tensor


def before_writes(node: Node) -> tuple[Node, tuple[Node, ...]]:
    """Return the node of a tensor before it was written to in place, and the nodes of the writes, oldest first."""
    writes: tuple[Node, ...] = ()
    while node.op == "overwrite":
        node, new = node.args
        writes = (new, *writes)
    return node, writes


def written_logits(write: Node) -> Node | None:
    """Return the node of the logits that a write copied, as in `z[..., :8] = q @ k.mT`; None for any other write."""
    source = write.args[1] if write.op == "copy" and len(write.args) > 1 else None
    return source if isinstance(source, Node) and source.products else None


def written_view(write: Node, whole: Tensor) -> Tensor:
    """Return the view of a tensor that was written to.

    Args:
        write: node of the write.
        whole: a tensor of the shape of the whole, for example of numbers that tell the elements apart.
    """
    path: list[Node] = []
    view = write.args[0]
    while view.shape != whole.shape and view.op in ops.VIEWS:
        path.append(view)
        view = view.args[0]
    return replay_all(reversed(path), whole)


def written_box(write: Node, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Return where a written block begins on each axis of the whole tensor.

    Args:
        write: node of the write.
        shape: shape of the whole.

    Returns:
        One index for each axis; None if the block is not a slice with as many axes, or has gaps.
    """
    starts = []
    for dim in range(len(shape)):
        places = written_view(write, numbered(shape, dim))
        line = places[tuple(slice(None) if d == dim else 0 for d in range(places.dim()))]
        if places.dim() != len(shape) or bool((line != line[0] + torch.arange(places.shape[dim])).any()):
            return None
        starts.append(int(line[0]))
    return tuple(starts)


def extended_block(node: Node, value: Tensor) -> Tensor:
    """Return a block of logits extended to the shape of the tensor that it was written to, by its entries at the edge.

    Args:
        node: node of that tensor after the writes.
        value: a tensor of the shape of the first block that was written.

    Raises:
        RuntimeError: the block is not a slice, or has gaps.
    """
    first = next(write for write in before_writes(node)[1] if written_logits(write) is not None)
    starts = written_box(first, node.shape)
    if starts is None or value.dim() != len(starts):
        raise RuntimeError("a block that is no slice, or has gaps")
    for dim, (n, start) in enumerate(zip(node.shape, starts, strict=True)):
        if value.shape[dim] != n:
            nearest = (torch.arange(n, device=value.device) - start).clamp(0, value.shape[dim] - 1)
            value = value.index_select(dim, nearest)
    return value
