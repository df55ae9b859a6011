"""The lineage graph: one small node for every tensor that an operation gave, linked to what it was made from.

A node holds a tensor only where a later reading needs one: at roots (projections, inputs, sums of two branches) and at
normalised q and k an alias of the values, elsewhere aliases of what they met (masks, biases, factors, tables). Nodes
live as long as a tensor that descends from them, and roots cut the chain, so a trace holds about one block's
activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.marks import Pairs, Partial, Product, Root, Weights
from sqrtdk.tracing.watch.places import Place

if TYPE_CHECKING:
    from sqrtdk.tracing.watch.events import Weighing

_SERIAL = count()
EXTREMES = frozenset({"amax", "max", "logsumexp"})  # of a row of logits: the softmax does not see it


class Node:
    """What one tensor is, seen from the softmax that may come later.

    Attributes:
        op: operator name without namespace and overload, or "input", "parameter", "buffer", "constant", "overwrite".
        func: the operator, to replay views; None for leaves.
        args: its arguments, tensors replaced by their nodes (empty at roots: the chain is cut there).
        kwargs: its keyword arguments that are no tensors.
        out: which of several outputs this is.
        shape: of the tensor.
        site: module path where it was made.
        place: where in the code; None for leaves.
        label: name of a parameter, or of the one that a projection used.
        serial: in the order of creation.
        act: descends from the model's activations.
        external: made from integers that came from outside (token ids).
        learned: made from parameters alone; for a product, one of its sides is.
        operands: aliases of the other tensors of the operation, by position (and place in a list).
        value: alias of the values, where they are kept.
        terms: content-dependent products with a constant that are summed here.
        root: set where a lineage starts.
        branches: what a root sums, each with a factor; it is followed where no projection reads the sum.
        pairs: set where rows of two activations met element by element, spread over one another.
        summed: set where it sums such pairs: a product of queries and keys, should it enter a softmax.
        product: set where queries met keys.
        weights: set where it carries the weights of a softmax.
        partial: set where it carries a sum of exponentials times values.
    """

    __slots__ = (
        "__weakref__",
        "_products",
        "_roots",
        "act",
        "args",
        "branches",
        "external",
        "func",
        "kwargs",
        "label",
        "learned",
        "op",
        "operands",
        "out",
        "pairs",
        "partial",
        "place",
        "product",
        "root",
        "serial",
        "shape",
        "site",
        "summed",
        "terms",
        "value",
        "weights",
    )

    def __init__(
        self,
        op: str,
        shape: tuple[int, ...],
        *,
        func: Any = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        out: int | None = None,
        act: bool = False,
        external: bool = False,
        site: str = "",
        label: str = "",
        root: Root | None = None,
        place: Place | None = None,
    ) -> None:
        self.op = op
        self.shape = shape
        self.func = func
        self.args = args
        self.kwargs = kwargs or {}
        self.out = out
        self.act = act
        self.external = external
        self.site = site
        self.label = label
        self.root = root
        self.place = place
        self.serial = next(_SERIAL)
        self.learned = False
        self._roots: frozenset[Node] = frozenset()
        self._products: frozenset[Node] = frozenset()
        self.pairs: Pairs | None = None
        self.summed: Product | None = None
        self.product: Product | None = None
        self.weights: Weights | None = None
        self.partial: Partial | None = None
        self.value: Tensor | None = None
        self.operands: dict[int | tuple[int, int], Tensor] = {}
        self.terms = 0
        self.branches: tuple[tuple[Node, float], ...] = ()

    def __repr__(self) -> str:
        return f"Node({self.op} {tuple(self.shape)})"

    # A node that held itself in a set would be a cycle, and keep its tensor until the garbage collector runs.

    @property
    def roots(self) -> frozenset[Node]:
        """The roots it descends from, itself included where it is one."""
        return frozenset({self}) if self.is_root else self._roots

    @roots.setter
    def roots(self, roots: frozenset[Node]) -> None:
        self._roots = roots

    @property
    def products(self) -> frozenset[Node]:
        """The q . k products it descends from, before their softmax, itself included where it is one."""
        return frozenset({self}) if self.product is not None else self._products

    @products.setter
    def products(self, products: frozenset[Node]) -> None:
        self._products = products

    @property
    def lost_logits(self) -> Node | None:
        """The logits behind the root that it descends from, where it is no product itself."""
        return next((r.root.logits for r in self.roots if r.root is not None and r.root.logits is not None), None)

    @property
    def is_root(self) -> bool:
        """Whether a lineage starts here."""
        return self.root is not None

    @property
    def weighing(self) -> Weighing | None:
        """The softmax whose weights it carries."""
        return None if self.weights is None else self.weights.weighing

    def make_root(self, root: Root, value: Tensor | None) -> None:
        """Cut the chain: this node is where a lineage starts, and keeps its values."""
        self.args = ()
        self.kwargs = {}
        self.operands = {}
        self.root = root
        self.product = self.weights = None
        self._roots = self._products = frozenset()
        self.value = value

    def stand_for(self, op: str, func: Any, *args: Any) -> None:
        """Be read as another operation with the same result."""
        self.op, self.func, self.args, self.kwargs, self.operands = op, func, args, {}, {}
        self.root = self.value = None

    def parents(self) -> Iterator[Node]:
        """Nodes among the arguments, one level of lists included."""
        for arg in self.args:
            if isinstance(arg, Node):
                yield arg
            elif isinstance(arg, (list, tuple)):
                for item in arg:
                    if isinstance(item, Node):
                        yield item

    def main(self) -> Node | None:
        """The one parent that carries the lineage: product before activation before constant."""
        parents = list(self.parents())
        if len(parents) < 2:
            return parents[0] if parents else None
        return min(parents, key=_rank)

    def number(self, position: int) -> float | None:
        """The argument at `position` as a number: a Python number, or a one-element tensor that has data."""
        if position >= len(self.args):
            return None
        arg = self.args[position]
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return float(arg)
        value = self.operands.get(position)
        if value is not None and value.numel() == 1 and not value.is_meta and not value.is_complex():
            return float(value)
        return None


def _rank(parent: Node) -> int:
    """A product of activations first, then one with learned vectors or its maximum, an activation, a constant."""
    if parent.products:
        return int(all(product.learned for product in parent.products) or origin(parent).op in EXTREMES)
    return 2 if parent.act else 3


def replay(node: Node, value: Tensor) -> Tensor:
    """Apply the view that `node` is to `value`, which has the shape of the node's parent."""
    if node.op in {"view", "_unsafe_view", "reshape", "_reshape_alias", "flatten", "unflatten"}:
        return value.reshape(node.shape)
    if node.op == "as_strided":  # its strides are those of a tensor without gaps, or there is no telling
        value = value.contiguous()
    if node.op == "view_as_complex" and value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()  # as the model's own, whose cast moved nothing and is passed over
    main = node.main()
    args: list[Any] = []
    for i, arg in enumerate(node.args):
        if isinstance(arg, list):
            args.append([node.operands.get((i, j), item) for j, item in enumerate(arg)])
        else:
            args.append(value if arg is main else node.operands.get(i, arg))
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
    return (
        torch.arange(shape[axis], device="cpu").view([-1 if d == axis else 1 for d in range(len(shape))]).expand(shape)
    )


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


def is_learned(node: Node) -> bool:
    """Whether a parameter is among what it was made from."""
    return any(leaf.op == "parameter" for leaf in ancestors(node))


def origin(node: Node) -> Node:
    """The tensor that a projection read, before the views and casts that lead to it."""
    while node.op in ops.VIEWS | ops.SAME and not node.is_root:
        parent = node.main()
        if parent is None:
            break
        node = parent
    return node


def capacity(node: Node) -> int:
    """How many numbers a tensor can hold that differ: those of the smallest among the views that lead to it."""
    fewest = math.prod(node.shape)
    while node.op in ops.VIEWS | ops.SAME and not node.is_root:
        parent = node.main()
        if parent is None:
            break
        node, fewest = parent, min(fewest, math.prod(parent.shape))
    return fewest


def alias(tensor: Tensor) -> Tensor:
    """Another tensor object on the same storage: holding it does not keep the graph's key alive."""
    with torch.no_grad():
        return tensor.detach()
