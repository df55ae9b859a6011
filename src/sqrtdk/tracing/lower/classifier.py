"""Classifies the output of each operation by the roles of its inputs.

`_CLASSIFIERS` lists the operations that can start a new role; every other operation carries its inputs' roles on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower import finished, online, vectors
from sqrtdk.tracing.lower.combine import combine_roles
from sqrtdk.tracing.lower.contract import contract, is_product, squares_rows
from sqrtdk.tracing.lower.mixing import CONVOLUTIONS, holds_weights, mix_heads
from sqrtdk.tracing.lower.pairs import reads_pairs
from sqrtdk.tracing.lower.softmax import begin_softmax, softmax_of_rows
from sqrtdk.tracing.lower.weights import dropout_of
from sqrtdk.tracing.tape import ops, places
from sqrtdk.tracing.tape.graph import alias, ancestors
from sqrtdk.tracing.tape.node import Node, Root, SoftmaxEntry, back, origin
from sqrtdk.tracing.tape.recorder import RecordedOutput, Scene, Unweighted
from sqrtdk.tracing.tape.store import tensor_shape

Kind = Callable[[Scene, RecordedOutput, list[Node]], None]
_MOST_SCORED = 16  # operations from an indexer's product to its selection; DeepSeek-V4's has nine
_FIRST_ONLY = frozenset({*ops.NORM_OPERATIONS, "native_dropout", "max"})  # only their first output carries the lineage


class Classifier:
    """Makes a node for every output: a projection, a product, a softmax, a value product, or a step in between."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene

    def note(self, func: Any, name: str, args: Any, kwargs: Any, output: Any, turned: Mapping[int | None, int]) -> None:
        """Make the nodes of the outputs of `func(*args, **kwargs)`, with their roles, and put them into the store.

        Args:
            func: the operator that has run.
            name: its name without namespace and overload, "bmm".
            args: its positional arguments.
            kwargs: its keyword arguments.
            output: what it returned, a tensor or several.
            turned: for each output that rotates an argument, its index (None for a single output) and the argument's
                position; see `rotations`.
        """
        store, sites = self.scene.store, self.scene.sites
        loose = not sites.stack
        if loose and name in ops.RANDOM:
            store.forget(output)
            return
        if name == "lift_fresh":  # torch.tensor([...]) in the model's code
            store.constant(args[0])
        node_args = tuple(self._nodes(arg) for arg in args)
        numbers = {key: value for key, value in kwargs.items() if not isinstance(value, Tensor)}
        site, place = sites.here(), places.current_place()
        for i, tensor in _outputs(output, name):
            node = Node(
                name, tensor_shape(tensor), func=func, args=node_args, kwargs=numbers, out=i, site=site, place=place
            )
            if i in turned:
                node.op, node.args = vectors.ROTATION, (node_args[turned[i]],)
            tensors = {j: arg for j, arg in enumerate(args) if isinstance(arg, Tensor) and i not in turned}
            self._classify(RecordedOutput(node, tensor, tensors))
            if name == "index" and node.act and not node.is_root:
                node.operands.update(_inside_lists(args))
            store.put(tensor, node)
            if loose:
                store.loosen(tensor)

    def rotations(self, args: Any, output: Any) -> dict[int | None, int]:
        """Return which outputs of another library's operation rotate which argument, judged by their values.

        Args:
            args: its positional arguments.
            output: what it returned, a tensor or several.

        Returns:
            The position of the rotated argument by the index of the output, None for a single output; {} if none is
            one.
        """
        if not any(isinstance(arg, Tensor) and self.scene.store.node(arg).act for arg in args):
            return {}
        found = {i: vectors.rotated_argument(args, tensor) for i, tensor in _outputs(output, "")}
        return {i: position for i, position in found.items() if position is not None}

    def _nodes(self, arg: Any) -> Any:
        """Return the argument with nodes in place of tensors, one level of lists included."""
        if isinstance(arg, Tensor):
            return self.scene.store.node(arg)
        if isinstance(arg, (list, tuple)) and any(isinstance(item, Tensor) for item in arg):
            return [self.scene.store.node(item) if isinstance(item, Tensor) else item for item in arg]
        return arg

    def whole(self, entry: SoftmaxEntry, vectors: tuple[Node, Node], output: Tensor, lse: Tensor) -> None:
        """Mark the results of an attention that is one operation; see `finished.mark_whole`."""
        finished.mark_whole(self.scene, entry, vectors, output, lse)

    def merged(self, outputs: list[Node], lses: list[Node], output: Tensor, lse: Tensor) -> None:
        """Mark what `sqrtdk.merge` returned; see `finished.mark_merged`."""
        finished.mark_merged(self.scene, outputs, lses, output, lse)

    def is_product(self, left: Tensor, right: Tensor) -> bool:
        """Return whether a contraction of the two tensors is a product of queries and keys, not a projection."""
        return is_product(self.scene.store.node(left), self.scene.store.node(right))

    def may_attend(self, name: str, args: Any, kwargs: Any, output: Any) -> bool:
        """Return whether an operation of another library may be an attention, judged by its name and shapes.

        Args:
            name: its name without namespace and overload.
            args: its positional arguments.
            kwargs: its keyword arguments.
            output: what it returned; of several outputs the first counts.
        """
        node = self.scene.store.node
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and node(x).act]
        first = output[0] if isinstance(output, (tuple, list)) and output else output
        shape = tensor_shape(first) if isinstance(first, Tensor) else ()
        return vectors.may_attend(name, [tensor_shape(x) for x in tensors], shape)

    def _classify(self, made: RecordedOutput) -> None:
        node, tensor = made.node, made.tensor
        parents = list(node.parents())
        if node.op == "copy":
            parents = parents[1:]  # `x.copy_(y)` overwrites x
        node.external = any(p.external for p in parents)
        numeric = tensor.is_floating_point() or tensor.is_complex()
        if not numeric:
            vectors.multiply_integers(self.scene, made)
        if node.op in ops.CREATIONS or not numeric:
            return
        if tensor.is_nested:
            _note_nested(self.scene, made, parents)
            return
        # A number of the model, no activations: sigma = u . (W v), by which a spectral norm divides W. One that has an
        # axis may be a learned query of one row and one channel: nn.Linear(32, 1)(query).
        if not tensor.dim() and all(p.learned for p in parents if p.act):
            return
        if node.op == "embedding":
            _embed(self.scene, made, parents)
        elif any(p.act for p in parents):
            node.act = True
            node.learned = all(p.learned for p in parents if p.act)
            if any(p.partial is not None for p in parents) and online.carry_partial_sums(self.scene, made, parents):
                return
            _kind(node)(self.scene, made, parents)
            if self.scene.keep and not node.products and node.weights is None and node.partial is None:
                self.scene.store.keep(node, tensor)
        elif vectors.is_dequantised(node):
            node.act = True
            self.scene.store.cut(node, tensor, source=parents[0], projects=True)
        elif node.op in ops.CONTRACTIONS and any(origin(p).op == "parameter" for p in parents):
            # A projection of learned or positional vectors: learned queries (DETR), relative keys (DeBERTa).
            node.act = node.learned = True
            self.scene.store.cut(node, tensor, source=parents[-2], width=parents[-2].shape[-1])


def _kind(node: Node) -> Kind:
    """Return the function that sets the role of a node."""
    return _CLASSIFIERS.get(node.op) or (_project if vectors.projects(node) else combine_roles)


def _outputs(output: Any, name: str) -> Iterator[tuple[int | None, Tensor]]:
    """Yield the output tensors of an operation, each with its index, or None for a single output."""
    if not isinstance(output, (tuple, list)):
        if isinstance(output, Tensor):
            yield None, output
        return
    for i, tensor in enumerate(output):
        if isinstance(tensor, Tensor):
            yield i, tensor
            if name in _FIRST_ONLY:
                return


def _inside_lists(args: Any) -> dict[int | tuple[int, int], Tensor]:
    """Return aliases of tensors in list arguments (the indices of `x[i, j]`), by argument and list position."""
    return {
        (i, j): alias(item)
        for i, arg in enumerate(args)
        if isinstance(arg, (list, tuple))
        for j, item in enumerate(arg)
        if isinstance(item, Tensor)
    }


def _embed(scene: Scene, made: RecordedOutput, parents: list[Node]) -> None:
    if parents[1].external or parents[0].act:
        made.node.act = True
        indices = made.tensors.get(1)
        lookup = None
        if scene.keep and parents[0].op == "parameter" and indices is not None:
            lookup = parents[0], alias(indices)
        scene.store.cut(made.node, made.tensor, lookup=lookup)


def _contract(scene: Scene, made: RecordedOutput, parents: list[Node]) -> None:
    if squares_rows(made.node):
        combine_roles(scene, made, parents)
    else:
        contract(scene, made)


def _softmax(scene: Scene, made: RecordedOutput, parents: list[Node]) -> None:
    args = made.node.args
    # softmax(torch.stack([lse_a, lse_b])) weighs two blocks of keys, whose outputs it merges.
    if online.is_sum(parents[0]):
        made.node.products = parents[0].products
        return
    begin_softmax(scene, made, made.tensors[0], int(args[1]) if len(args) > 1 else -1)


def _sparse_softmax(scene: Scene, made: RecordedOutput, parents: list[Node]) -> None:
    scene.listener.missed(made.node.site, Message("trace.missed.sparse"))
    scene.store.cut(made.node, made.tensor)


def _affine(scene: Scene, made: RecordedOutput, parents: list[Node]) -> None:
    if holds_weights(parents[0]):
        combine_roles(scene, made, parents)
        return
    scene.store.cut(made.node, made.tensor, source=parents[0])


def _project(scene: Scene, made: RecordedOutput, parents: list[Node]) -> None:
    node = made.node
    if node.op in CONVOLUTIONS and parents[0].shape[-2:] == node.shape[-2:]:  # nn.Conv2d over (B, H, L, S) logits
        if (parents[0].products or holds_weights(parents[0])) and mix_heads(node, made.tensors):
            return
        if parents[0].products or (holds_weights(parents[0]) and parents[0].shape == node.shape):
            combine_roles(scene, made, parents)
            return
    vectors.keep_channels(node, parents[0])
    width = parents[1].shape[1] if len(parents) > 1 and len(parents[1].shape) > 1 else None
    source = next(parent for parent in parents if parent.act)  # integers quantised with one scale per row are not `act`
    scene.store.cut(node, made.tensor, source=source, width=width, paired=reads_pairs(source), projects=True)


def _pick_keys(scene: Scene, made: RecordedOutput, parents: list[Node]) -> None:
    """Names an indexer, whose scores pick keys without a softmax: `(relu(q @ k.mT) * w[..., None]).sum(2).topk(n)`.

    With its heads summed by a matrix product (GLM, DeepSeek-V3.2) it is an attention without softmax to `contract`.
    Whether there is an attention whose keys it picks is known at the end of the trace.
    """
    combine_roles(scene, made, parents)
    names: set[str] = set()
    for node in islice(back(parents[0], None), _MOST_SCORED + 1):
        if not node.products or node.product is not None:
            break
        names.add(node.op)
    if made.node.out == 0 and node.product is not None and {"relu", "mul", "sum"} <= names:
        scene.listener.unsoftened(made.node.site, Unweighted(parents[0], alias(made.tensors[0]), picks=True))


def _note_nested(scene: Scene, made: RecordedOutput, parents: list[Node]) -> None:
    """Sets the role of an operation on a nested tensor: without a kernel, torch's attention runs on nested batches.

    Their nodes have no shape. Jagged tensors do not come here: their operations on plain values are recorded.
    """
    node = made.node
    node.act = any(p.act for p in parents)
    node.roots = frozenset[Node]().union(*(p.roots for p in parents))
    if node.op in ops.SOFTMAX_OPERATIONS:
        begin_softmax(scene, made, made.tensors[0], int(node.args[1]))
    elif node.op in ops.PASSING:
        node.weights = parents[0].weights
        if node.weights is not None:
            drop = dropout_of(node)
            node.weights.softmax_run.dropout = node.weights.softmax_run.dropout or (0.0 if drop is None else drop[0])
    elif node.op == "matmul":
        weights = node.args[0].weights
        if weights is None:
            _multiplied(scene, made)
        elif not weights.softmax_run.entry.attention:
            weights.softmax_run.entry.attention = True
            scene.listener.eager(weights.softmax_run, made.tensors[1], made.tensor)
            node.act = True
            node.make_root(Root(), None)


def _multiplied(scene: Scene, made: RecordedOutput) -> None:
    """Keeps the operands of a nested product for a softmax that may follow."""
    if any(ancestor.weights is not None for ancestor in ancestors(made.node.args[0])):
        scene.listener.missed(made.node.site, Message("trace.missed.nested_weights"))
    made.node.operands = {i: alias(tensor) for i, tensor in made.tensors.items()}


_CLASSIFIERS: dict[str, Kind] = {
    **dict.fromkeys(ops.CONTRACTIONS, _contract),
    **dict.fromkeys(ops.SOFTMAX_OPERATIONS, _softmax),
    "_sparse_softmax": _sparse_softmax,
    "softmax_csr": softmax_of_rows,
    "topk": _pick_keys,
    **dict.fromkeys(ops.AFFINE, _affine),
    **dict.fromkeys(ops.PROJECTIONS, _project),
}
