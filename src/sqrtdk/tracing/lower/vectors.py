"""Follows q, k and v: rotary tables, gates and branches, operations of other libraries, and quantised products.

An opaque operation is judged by its name and shapes, or by its effect: a rotation keeps the length of every vector. A
product with quantised weights takes several operations, one that multiplies and others that rescale:
`x @ W_int * s_W`, and `(x_int @ W_int) * s_x * s_W`, where s_W belongs to the weight.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import alias, ancestors
from sqrtdk.tracing.tape.node import Node, origin
from sqrtdk.tracing.tape.recorder import RecordedOutput, Scene

ROTATION = "rotation"
_LENGTH_TOLERANCE = 1e-3  # relative change of a vector's length that counts as rounding
_PRODUCT_NAME = re.compile(r"(?<![a-z])(?:linear|gemm|gemv|matmul|mm)(?![a-z])")
_ATTENTION_NAME = re.compile(r"attn|attention|flash|(?<![a-z])(?:mha|mla)(?![a-z])")
_OF_ANGLES = frozenset({"cos", "sin", "polar"})  # their arguments may be any positions, also computed from the data
_TO_TABLE = ops.PASSING | {"cat", "stack", "complex", "mul", "div", "neg"}
_WIDEST_ROTATION = 256  # a rotation's matrix spans one head: a wider matrix is a projection
_MOST_NESTED_SUMS = 2  # nested sums whose branches are kept; a recurrence nests without end and would never be released
Shape = tuple[int, ...]


def may_attend(name: str, operands: Sequence[Shape], result: Shape) -> bool:
    """Return whether an operation may be an attention, by its name, or because it takes q, k and v, packed or separate.

    Args:
        name: name of the operation without its namespace.
        operands: shapes of the operands that are activations.
        result: shape of the first output.
    """
    if not operands:
        return False
    if _ATTENTION_NAME.search(name.lower()) or sum(len(shape) >= 2 for shape in operands) >= 3:
        return True
    if any(result in _without(shape, 3) for shape in operands):
        return True  # (B, L, 3, H, E): q, k and v packed in one tensor
    pairs = [(q, kv) for q in operands for kv in operands if q == result and len(kv) == len(q) + 1 and len(q) >= 3]
    return any(k[-1] == q[-1] for q, kv in pairs for k in _without(kv, 2))


def _without(shape: Shape, packed: int) -> list[Shape]:
    """Return the shape without an axis of size `packed`, once for each such axis but the last."""
    return [shape[:i] + shape[i + 1 :] for i, n in enumerate(shape[:-1]) if n == packed and len(shape) >= 4]


def projects(node: Node) -> bool:
    """Return whether another library's operation multiplies with weights of the model.

    It is judged by the operation's name and by its operands: one has two or more axes and is no activation.
    """
    if node.func is None or node.func.namespace in ("aten", "prims", "prim") or not _PRODUCT_NAME.search(node.op):
        return False
    return any(not parent.act and len(parent.shape) >= 2 for parent in node.parents())


def rotated_argument(args: Sequence[Any], output: Tensor) -> int | None:
    """Return the position of the argument that `output` rotates, or None if it rotates none.

    Every vector keeps its length, some vectors change, and another argument fits as a table of cos and sin.
    """
    if output.is_meta or output.is_nested or not output.is_floating_point() or output.dim() < 2 or not output.numel():
        return None
    tensors = {i: arg for i, arg in enumerate(args) if isinstance(arg, Tensor)}
    vectors = {i: x for i, x in tensors.items() if x.shape == output.shape and x.dtype == output.dtype}
    width = output.shape[-1]
    others = [x for i, x in tensors.items() if i not in vectors and (x.is_floating_point() or x.is_complex())]
    if not any(x.dim() > 1 and x.shape[-1] in (width, width // 2) for x in others):
        return None
    return next((i for i, x in vectors.items() if _keeps_lengths(x.detach(), output.detach())), None)


def _keeps_lengths(before: Tensor, after: Tensor) -> bool:
    if before.data_ptr() == after.data_ptr() or torch.equal(before, after):
        return False
    old, new = (x.to(torch.float32).norm(dim=-1) for x in (before, after))
    rounding = _LENGTH_TOLERANCE + 4 * torch.finfo(after.dtype).eps
    return bool(((new - old).abs() <= rounding * old).all()) and bool((old > 0).any())


# -- quantised ---------------------------------------------------------------------------------------------------------


def is_dequantised(node: Node) -> bool:
    """Return whether the node dequantises an activation; a quantised weight has no operation behind it."""
    parents = list(node.parents())
    return node.op == "dequantize" and bool(parents) and parents[0].func is not None


def multiply_integers(scene: Scene, made: RecordedOutput) -> None:
    """Begin a new lineage at an integer product with a quantised weight, or at a sum that corrects such a product.

    Args:
        scene: state of the trace.
        made: the output, whose node is changed; other operations leave it as it is.
    """
    node = made.node
    if node.op not in ops.CONTRACTIONS and node.op not in ("add", "sub"):
        return
    sources = [origin(parent) for parent in node.parents()]
    labels = [source.label for source in sources] if node.op in ops.CONTRACTIONS else []
    if (any(labels) and not all(labels)) or (node.op in ("add", "sub") and any(map(_is_whole, sources))):
        node.act = True
        node.label = next(source.label for source in sources if source.label)
        scene.store.cut(node, made.tensor)


def rescales_projection(scene: Scene, made: RecordedOutput) -> bool:
    """Return whether a node multiplies a quantised projection with its weight's scales, or with its input's.

    If it does, the node becomes the projection's result.
    """
    node = made.node
    if node.op != "mul" or len(node.args) < 2:
        return False
    for projected, size in (node.args[:2], node.args[1::-1]):
        if not isinstance(projected, Node) or not isinstance(size, Node):
            continue
        product = origin(projected)
        if product.root is None or not product.label:
            continue
        of_weight = not size.act and origin(size).label == product.label
        if of_weight or (size.act and size.shape[-1:] == (1,) and _is_whole(product)):
            node.label = product.label
            source, width = product if of_weight else size, product.root.width
            scene.store.cut(node, made.tensor, source=source, width=width, projects=True)
            return True
    return False


def _is_whole(product: Node) -> bool:
    value = product.value
    return product.is_root and product.label != "" and value is not None and not value.is_floating_point()


# -- two lineages meet -------------------------------------------------------------------------------------------------


def without_tables_and_gates(
    node: Node, active: list[Node], tensors: dict[int, Tensor], projected: Container[Node]
) -> list[Node]:
    """Makes constants of tables and gates among the operands of a multiplication; returns the remaining `active` ones.

    A table holds cos and sin, or is made of inputs that nothing has projected: `forward(x, cos, sin)`. A gate has one
    number for each vector.
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
    """Whether the node is made only of inputs that no projection reads; it then holds no hidden states."""
    return bool(node.roots) and all(root.op == "input" and root not in projected for root in node.roots)


def holds_angles(node: Node) -> bool:
    """Return whether a tensor holds only cosines and sines, also written into a matrix: R[0, 0] = cos."""
    parts = [node]
    while parts:
        part = origin(parts.pop(), _TO_TABLE)
        if part.op == "overwrite":  # the old tensor (zeros, or an earlier write) and the written block
            old, new = part.args
            parts += [old, new] if old.act else [new]
        elif part.op == "copy":
            parts.append(part.args[1])
        elif part.op not in _OF_ANGLES:
            return False
    return True


def _is_gate(node: Node, product: Node) -> bool:
    fits = any(p is not node and p.shape == product.shape for p in product.parents())
    return node.shape[-1:] in ((), (1,)) and product.shape[-1:] > (1,) and fits


def keep_rotation(node: Node, vector: Node, matrix: Node, values: Tensor) -> None:
    """Keep the vector before a product with a constant square matrix, as the matrix may turn out to be a rotation.

    Args:
        node: node of the product, whose `branches` are set.
        vector: node of the vector.
        matrix: node of the matrix.
        values: numbers of the matrix.
    """
    width = matrix.shape[-1]
    if node.shape != vector.shape or matrix.shape[-2:] != (width, width) or width > _WIDEST_ROTATION:
        return
    if max(map(_depth, vector.roots), default=0) >= _MOST_NESTED_SUMS:
        return
    if not holds_angles(matrix) and any(p.act or p.op == "parameter" for p in ancestors(matrix)):
        return
    node.branches = ((vector, 1.0),)
    node.args = (_leaf(matrix, "table") if matrix.act else matrix,)
    node.operands = {0: alias(values)}


def keep_channels(node: Node, source: Node) -> None:
    """Keep the input of a depthwise convolution as a branch of its node, unless the input has branches already.

    Args:
        node: node of the convolution's output; other operations leave it as it is.
        source: node of its input.
    """
    groups = node.args[8] if node.op == "convolution" and len(node.args) > 8 else 1
    channels = node.shape[1] if len(node.shape) > 1 else 0
    if source.act and groups == channels > 1 and not any(root.branches for root in source.roots):
        node.branches = ((source, 1.0),)


def summands(node: Node, projected: Container[Node]) -> tuple[tuple[Node, float], ...]:
    """Return the two summands of a sum with their factors, to be followed as branches.

    Args:
        node: node of the sum or difference.
        projected: the roots that a projection has read.

    Returns:
        ((node, factor), (node, factor)); () if the node is no sum of two activations, if a projection has read one of
        them, so that it is a residual stream, or if sums are deeply nested, as a recurrence's would never be released.
    """
    left, right = (*node.args, None, None)[:2]
    if node.op not in ("add", "sub") or not isinstance(left, Node) or not isinstance(right, Node):
        return ()
    roots = left.roots | right.roots
    if not (left.act and right.act) or any(root in projected or _depth(root) >= _MOST_NESTED_SUMS for root in roots):
        return ()
    sign = float(node.kwargs.get("alpha", 1)) * (-1.0 if node.op == "sub" else 1.0)
    return (left, 1.0), (right, sign)


def _depth(root: Node) -> int:
    return 1 + max(_depth(r) for branch, _ in root.branches for r in branch.roots) if root.branches else 0
