"""The lineage graph: one small node for every tensor that an operation gave, linked to what it was made from.

A node holds a tensor only where a later reading needs one: at roots (projections, inputs, sums of two branches) and at
normalised q and k an alias of the values, elsewhere aliases of what they met (masks, biases, factors, tables). Nodes
live as long as a tensor that descends from them, and roots cut the chain, so a trace holds about one block's
activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.marks import Pairs, Partial, Product, Root, Weights
from sqrtdk.tracing.watch.places import Place

if TYPE_CHECKING:
    from sqrtdk.tracing.watch.marks import Weighing

_SERIAL = count()
EXTREMES = frozenset({"amax", "max", "logsumexp"})  # of a row of logits: the softmax does not see it


@dataclass(slots=True, eq=False, repr=False, weakref_slot=True)
class Node:
    """What one tensor is, seen from the softmax that may come later."""

    op: str  # operator without namespace and overload, "input", "parameter", "buffer", "constant" or "overwrite"
    shape: tuple[int, ...]
    _: KW_ONLY
    func: Any = None  # the operator, to replay views; None for leaves
    args: tuple[Any, ...] = ()  # tensors replaced by their nodes; empty at roots: the chain is cut there
    kwargs: dict[str, Any] = field(default_factory=dict)  # those that are no tensors
    out: int | None = None  # which of several outputs this is
    act: bool = False  # descends from the model's activations
    external: bool = False  # made from integers that came from outside (token ids)
    site: str = ""  # module path where it was made
    label: str = ""  # name of a parameter, or of the one that a projection used
    root: Root | None = None  # set where a lineage starts
    place: Place | None = None  # where in the code; None for leaves
    serial: int = field(init=False, default_factory=_SERIAL.__next__)  # in the order of creation
    learned: bool = False  # made from parameters alone; for a product, one of its sides is

    # Rows of two activations met element by element, spread over one another; `summed` where such pairs were summed: a
    # product of queries and keys, should it enter a softmax.
    pairs: Pairs | None = None
    summed: Product | None = None
    product: Product | None = None  # queries met keys
    weights: Weights | None = None  # it carries the weights of a softmax
    partial: Partial | None = None  # it carries a sum of exponentials times values

    # Aliases of the values, where they are kept, and of the operation's other tensors, by position and place in a list.
    value: Tensor | None = None
    operands: dict[int | tuple[int, int], Tensor] = field(default_factory=dict)
    terms: int = 0  # content-dependent products with a constant that are summed here
    # What a root sums, each with a factor; it is followed where no projection reads the sum.
    branches: tuple[tuple[Node, float], ...] = ()
    _roots: frozenset[Node] = frozenset()
    _products: frozenset[Node] = frozenset()

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
        self.args, self.kwargs, self.operands = (), {}, {}
        self.product = self.weights = None
        self._roots = self._products = frozenset()
        self.root, self.value = root, value

    def stand_for(self, op: str, func: Any, *args: Any) -> None:
        """Be read as another operation with the same result."""
        self.op, self.func, self.args, self.kwargs, self.operands = op, func, args, {}, {}
        self.root = self.value = None

    def parents(self) -> Iterator[Node]:
        """Nodes among the arguments, one level of lists included."""
        for arg in self.args:
            for item in arg if isinstance(arg, (list, tuple)) else (arg,):
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
        arg = self.args[position] if position < len(self.args) else None
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


def is_learned(node: Node) -> bool:
    """Whether a parameter is among what it was made from."""
    return any(leaf.op == "parameter" for leaf in ancestors(node))


def back(node: Node, *, through: frozenset[str] = ops.PASSING) -> Iterator[Node]:
    """The node and what it was made from, by way of its main parents, to the first that is no view and no cast."""
    yield node
    while node.op in through and not node.is_root and (parent := node.main()) is not None:
        node = parent
        yield node


def origin(node: Node) -> Node:
    """The tensor that a projection read, before the views and casts that lead to it."""
    *_, first = back(node)
    return first


def capacity(node: Node) -> int:
    """How many numbers a tensor can hold that differ: those of the smallest among the views that lead to it."""
    return min(math.prod(view.shape) for view in back(node))


def alias(tensor: Tensor) -> Tensor:
    """Another tensor object on the same storage: holding it does not keep the graph's key alive."""
    with torch.no_grad():
        return tensor.detach()
