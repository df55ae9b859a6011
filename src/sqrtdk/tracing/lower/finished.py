"""Finished attentions to some of the keys, whose outputs may be merged by their logsumexp, as in a ring of ranks.

    o1, lse1 = attend(q, k1, v1); o2, lse2 = attend(q, k2, v2)
    lse = logaddexp(lse1, lse2); o = o1 * exp(lse1 - lse) + o2 * exp(lse2 - lse)

The output of each carries a mark, and its lse counts as a sum of exponentials; `online` follows both to the merge.
"""

from __future__ import annotations

import math

from torch import Tensor

from sqrtdk.tracing.lower.online import complete_sums, joined_parts, next_number
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.node import Finished, Node, Partial, SoftmaxEntry, SoftmaxRun
from sqrtdk.tracing.tape.recorder import RecordedOutput, Scene
from sqrtdk.tracing.tape.store import tensor_shape

LOGSUMEXP = "logsumexp"  # the operation that stands for the lse of an attention that is one operation


def mark_finished(scene: Scene, made: RecordedOutput, softmax_run: SoftmaxRun) -> None:
    """Mark the output of an attention that has been read, so that it may be merged with outputs for other keys.

    Args:
        scene: state of the trace.
        made: the output.
        softmax_run: the attention's softmax.
    """
    product = next(iter(softmax_run.node.products), None)
    if product is None or product.product is None:
        return
    left, right = map(_identity, list(product.parents())[-2:])
    finished = Finished(softmax_run.entry, next_number(scene), (left, right))
    made.node.partial = Partial(frozenset({finished}), frozenset())


def _identity(node: Node) -> object:
    """Return an identity of vectors that ignores their layout and factors: equal for `q` and `q.mT * 0.5`."""
    while not node.is_root:
        main = node.main()
        if main is None:
            break
        same = math.prod(main.shape) == math.prod(node.shape)
        if same and (node.op in ops.PASSING or sum(p.act for p in node.parents()) == 1):
            node = main
        elif node.op in ops.VIEWS:
            return (_identity(main), node.op, node.out, str([arg for arg in node.args if not isinstance(arg, Node)]))
        else:
            break
    return node.serial


def mark_whole(scene: Scene, entry: SoftmaxEntry, vectors: tuple[Node, Node], output: Tensor, lse: Tensor) -> None:
    """Mark the output and the lse of an attention that is one operation, as `mark_finished` and `logsumexp` would.

    Args:
        scene: state of the trace.
        entry: of the attention; its logits stand for the product, which nothing has seen.
        vectors: the nodes of q and k.
        output: the attention's output.
        lse: log of its sums of exponentials.
    """
    assert entry.logits is not None
    entry.attention = True
    scene.entries.append(entry)
    sides = _identity(vectors[0]), _identity(vectors[1])
    finished = Finished(entry, next_number(scene), sides)
    scene.store.node(output).partial = Partial(frozenset({finished}), frozenset())
    _mark_lse(scene, lse, entry.logits)


def mark_merged(scene: Scene, outputs: list[Node], lses: list[Node], output: Tensor, lse: Tensor) -> None:
    """Mark what `sqrtdk.merge` returned: the blocks behind its outputs are one attention.

    Args:
        scene: state of the trace.
        outputs: the nodes of the outputs of the blocks, each with a mark.
        lses: the nodes of their lses.
        output: the merged output.
        lse: the merged lse.
    """
    partial = joined_parts([node.partial for node in outputs if node.partial is not None])
    node = scene.store.new_root("attention", output)
    node.partial = Partial(partial.parts, frozenset())
    complete_sums(scene, RecordedOutput(node, output, {}))
    _mark_lse(scene, lse, *frozenset[Node]().union(*(each.products for each in lses)))


def _mark_lse(scene: Scene, lse: Tensor, *logits: Node) -> None:
    node = Node(LOGSUMEXP, tensor_shape(lse), args=([*logits],), act=True, site=scene.sites.here())
    node.products = frozenset(logits)
    scene.store.put(lse, node)
