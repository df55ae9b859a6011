"""Products with quantised weights that an operation multiplies and others put to size: one projection all the same.

x @ W_int * s_W, and (x_int @ W_int) * s_x * s_W, where s_W is a part of the weight.
"""

from __future__ import annotations

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, origin
from sqrtdk.tracing.watch.recorder import Made, Scene


def multiplies_integers(node: Node) -> bool:
    """Whether `node` is a product of whole numbers of the run with those of a weight, or corrects one."""
    if node.op in ("add", "sub"):
        return any(_is_whole(origin(parent)) for parent in node.parents())
    labels = [origin(parent).label for parent in node.parents()] if node.op in ops.CONTRACTIONS else []
    return any(labels) and not all(labels)


def start(scene: Scene, made: Made) -> None:
    """Note that a node is such a product: the sizes are to come."""
    made.node.act = True
    made.node.label = next(label for parent in made.node.parents() if (label := origin(parent).label))
    scene.store.cut(made.node, made.tensor)


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
        if not size.act and origin(size).label == product.label:
            _cut_again(scene, made, product, product)
            return True
        if size.act and size.shape[-1:] == (1,) and _is_whole(product):
            _cut_again(scene, made, product, size)
            return True
    return False


def _is_whole(product: Node) -> bool:
    return (
        product.is_root and product.label != "" and product.value is not None and not product.value.is_floating_point()
    )


def _cut_again(scene: Scene, made: Made, product: Node, source: Node) -> None:
    assert product.root is not None
    made.node.label = product.label
    scene.store.cut(made.node, made.tensor, source=source, width=product.root.width, projects=True)
