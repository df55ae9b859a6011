"""Two lineages meet: q and a rotation's table, q and a gate, or two branches that are summed."""

from __future__ import annotations

from collections.abc import Container

from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, alias, ancestors

_ANGLES = frozenset({"cos", "sin", "polar"})  # of any positions, also of those that are data
_TO_TABLE = ops.VIEWS | ops.SAME | {"cat", "stack", "complex", "mul", "div", "neg"}
_WIDEST = 256  # of a rotation's matrix: one head
_DEEPEST = 2  # sums of sums that are kept


def set_beside(node: Node, active: list[Node], tensors: dict[int, Tensor], projected: Container[Node]) -> list[Node]:
    """Make constants of the tables, or of the gate, among the `active` operands of a multiplication; those that remain.

    A table holds cosines and sines, of positions that are data, or is made of inputs that nothing has projected, as
    `forward(x, cos, sin)` takes them; a gate has one number for each vector.
    """
    if node.op not in ("mul", "addcmul", "div") or len({p.roots for p in active}) < 2:
        return active
    values = {arg: tensors[i] for i, arg in enumerate(node.args) if i in tensors}
    kind, aside = "table", [p for p in active if holds_angles(p) or (p.op == "exp" and values[p].is_complex())]
    if not aside and any(not _is_of_inputs(p, projected) for p in active):
        aside = [p for p in active if _is_of_inputs(p, projected)]
    if not aside:
        kind, aside = "gate", [p for p in active if _is_gate(p, node)]
    if not aside or len(aside) == len(active) or (node.op == "div" and node.args[0] in aside):
        return active
    node.args = tuple(_leaf(arg, kind) if arg in aside else arg for arg in node.args)
    return [p for p in active if p not in aside]


def _leaf(arg: Node, kind: str) -> Node:
    return Node(kind, arg.shape, args=(arg,) if kind == "table" else ())


def _is_of_inputs(node: Node, projected: Container[Node]) -> bool:
    """Whether it is made of inputs alone, and of none that is projected: no hidden states."""
    return bool(node.roots) and all(root.op == "input" and root not in projected for root in node.roots)


def holds_angles(node: Node) -> bool:
    """Whether a tensor holds cosines and sines, and nothing but."""
    while node.op in _TO_TABLE and not node.is_root:
        parent = node.main()
        if parent is None:
            return False
        node = parent
    return node.op in _ANGLES


def _is_gate(node: Node, product: Node) -> bool:
    return node.shape[-1:] in ((), (1,)) and product.shape[-1:] > (1,) and _fits(node, product)


def _fits(node: Node, product: Node) -> bool:
    """Whether the other operand has the shape of the result."""
    return any(p is not node and p.shape == product.shape for p in product.parents())


def keep_rotation(node: Node, vector: Node, matrix: Node, values: Tensor) -> None:
    """What a root was before it was multiplied by a square matrix of the model's own, which may be a rotation."""
    width = matrix.shape[-1]
    if node.shape != vector.shape or matrix.shape[-2:] != (width, width) or width > _WIDEST:
        return
    if max(map(_depth, vector.roots), default=0) >= _DEEPEST:
        return
    if not holds_angles(matrix) and any(p.act or p.op == "parameter" for p in ancestors(matrix)):
        return
    node.branches = ((vector, 1.0),)
    node.args = (_leaf(matrix, "table") if matrix.act else matrix,)
    node.operands = {0: alias(values)}


def keep_channels(node: Node, source: Node) -> None:
    """What a root was before a convolution of each channel by itself, where that was no convolution of the kind."""
    groups = node.args[8] if node.op == "convolution" and len(node.args) > 8 else 1
    channels = node.shape[1] if len(node.shape) > 1 else 0
    if source.act and groups == channels > 1 and not any(root.branches for root in source.roots):
        node.branches = ((source, 1.0),)


def summands(node: Node, projected: Container[Node]) -> tuple[tuple[Node, float], ...]:
    """The branches of a sum, and what each is multiplied by; none where a projection has read one: a residual stream.

    Nor where they are sums of sums, of a recurrence perhaps, which would never be let go.
    """
    left, right = (*node.args, None, None)[:2]
    if node.op not in ("add", "sub") or not isinstance(left, Node) or not isinstance(right, Node):
        return ()
    roots = left.roots | right.roots
    if not (left.act and right.act) or any(root in projected or _depth(root) >= _DEEPEST for root in roots):
        return ()
    sign = float(node.kwargs.get("alpha", 1)) * (-1.0 if node.op == "sub" else 1.0)
    return (left, 1.0), (right, sign)


def _depth(root: Node) -> int:
    return 1 + max(_depth(r) for branch, _ in root.branches for r in branch.roots) if root.branches else 0
