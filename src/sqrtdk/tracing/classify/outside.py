"""Operations of libraries, and quantised products: those that may be an attention, rotate, or project.

What an operation computes that is not seen is known by its name and its shapes, or by its effect: a rotation keeps the
length of every vector. A product with quantised weights is one that an operation multiplies and others put to size: x @
W_int * s_W, and (x_int @ W_int) * s_x * s_W, where s_W is a part of the weight.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, origin
from sqrtdk.tracing.watch.recorder import Made, Scene

ROTATION = "rotation"
_KEPT = 1e-3
_PRODUCT = re.compile(r"(?<![a-z])(?:linear|gemm|gemv|matmul|mm)(?![a-z])")
_NAMES = re.compile(r"attn|attention|flash|(?<![a-z])(?:mha|mla)(?![a-z])")
Shape = tuple[int, ...]


def may_attend(name: str, operands: Sequence[Shape], result: Shape) -> bool:
    """Whether an operation may be an attention: its name says so, or it takes q, k and v, packed or apart.

    Args:
        name: without its namespace.
        operands: shapes of the activations among its operands.
        result: shape of its first output.
    """
    if not operands:
        return False
    if _NAMES.search(name.lower()) or sum(len(shape) >= 2 for shape in operands) >= 3:
        return True
    if any(result in _without(shape, 3) for shape in operands):
        return True  # q, k and v in one tensor
    pairs = [(q, kv) for q in operands for kv in operands if q == result and len(kv) == len(q) + 1 and len(q) >= 3]
    return any(k[-1] == q[-1] for q, kv in pairs for k in _without(kv, 2))


def _without(shape: Shape, packed: int) -> list[Shape]:
    """The shape without each of the axes, the last apart, that hold `packed` tensors."""
    return [shape[:i] + shape[i + 1 :] for i, n in enumerate(shape[:-1]) if n == packed and len(shape) >= 4]


def projects(node: Node) -> bool:
    """Whether an operation of a library's own is a product with weights of the model, by its name and its operands."""
    if node.func is None or node.func.namespace in ("aten", "prims", "prim") or not _PRODUCT.search(node.op):
        return False
    return any(not parent.act and len(parent.shape) >= 2 for parent in node.parents())


def rotated_argument(args: Sequence[Any], output: Tensor) -> int | None:
    """Position of the argument that `output` is a rotation of, by the tables among the others; None where it is none.

    Every vector keeps its length, some of them move, and a table fits the vectors: cosines and sines, or points.
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
    rounding = _KEPT + 4 * torch.finfo(after.dtype).eps
    return bool(((new - old).abs() <= rounding * old).all()) and bool((old > 0).any())


# -- quantised ---------------------------------------------------------------------------------------------------------


def is_dequantised(node: Node) -> bool:
    """Whether a quantised activation becomes floating-point numbers again; a quantised weight is none."""
    parents = list(node.parents())
    return node.op == "dequantize" and bool(parents) and parents[0].func is not None


def multiply_integers(scene: Scene, made: Made) -> None:
    """Note a product of whole numbers of the run with those of a weight, or its correction: the sizes are to come."""
    node, sources = made.node, [origin(parent) for parent in made.node.parents()]
    labels = [source.label for source in sources] if node.op in ops.CONTRACTIONS else []
    if (any(labels) and not all(labels)) or (node.op in ("add", "sub") and any(map(_is_whole, sources))):
        node.act = True
        node.label = next(source.label for source in sources if source.label)
        scene.store.cut(node, made.tensor)


def put_to_size(scene: Scene, made: Made) -> bool:
    """Whether a node multiplies a projection by its weight's own sizes, or one of whole numbers by its input's."""
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
