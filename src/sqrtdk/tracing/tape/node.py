"""A node of the tape, one for every tensor, and what it can be marked as: a root, a product, weights, and so on.

A node holds a tensor only where a later reading needs one: at roots (projections, inputs, sums of two branches) and at
normalised q and k an alias of the values, elsewhere aliases of what they met (masks, biases, factors, tables). Nodes
live as long as a tensor that descends from them, and roots cut the chain, so a trace holds about one block's
activations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import count
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.places import Place

_SERIAL = count()
EXTREMES = frozenset({"amax", "max", "logsumexp"})  # of a row of logits: the softmax does not see it
_EQUAL = 1e-3  # a factor this near to 1 changes no weight


@dataclass(frozen=True, slots=True)
class Carried:
    """What the weights of a softmax went through."""

    remasked: bool = False  # keys were hidden by zeros
    renormalised: bool = False  # and the rest was then divided by its sum
    thinned: bool = False  # weights were set to 0 by their own size (top-k)
    changes: tuple[str, ...] = ()  # names of other operations that changed them
    stages: tuple[Stage, ...] = ()  # what is known of the rest: mixed over the heads, combined with others, joined
    combined: bool = False  # weights of another softmax, or another tensor, joined them: the rows are no more its own
    gain: float = 1.0  # product of the numbers that all of them were multiplied by; NaN where one is not known
    gained_by: tuple[str, ...] = ()  # the operations that did so

    def then(self, name: str, detail: str) -> Carried:
        """The weights after a step that is known, told once."""
        stage = Stage("weights", name, detail)
        return self if stage in self.stages else replace(self, stages=(*self.stages, stage))

    def changed(self, operation: str) -> Carried:
        """The weights after an operation that could not be followed."""
        return replace(self, changes=(*self.changes, operation))

    def times(self, factor: float, operation: str) -> Carried:
        """The weights after a multiplication of all of them."""
        return replace(self, gain=self.gain * factor, gained_by=(*self.gained_by, operation))

    def over_sum(self) -> Carried:
        """The weights after the division by their sum."""
        return replace(self, renormalised=self.remasked or self.combined, gain=1.0, gained_by=())

    def beside(self, other: Carried, detail: str) -> Carried:
        """The weights joined by those of another softmax, which went through `other`."""
        return replace(
            self,
            remasked=self.remasked or other.remasked,
            thinned=self.thinned or other.thinned,
            changes=tuple(dict.fromkeys((*self.changes, *other.changes))),
            stages=tuple(dict.fromkeys((*self.stages, *other.stages, Stage("weights", "combined", detail)))),
            combined=True,
        )

    def joined(self, detail: str) -> Carried:
        """The weights joined by a tensor that is no softmax: their rows are no longer its own."""
        return replace(self.then("joined", detail), combined=True)

    def settled(self) -> Carried:
        """The weights as they meet the values: a gain other than 1 is a change, unless it is a share in a sum."""
        known = self.combined or abs(self.gain - 1) <= _EQUAL
        return replace(self, gain=1.0, gained_by=(), changes=(*self.changes, *(() if known else self.gained_by)))


@dataclass(slots=True)
class SoftmaxEntry:
    """A softmax that has run, for the list of those that turn out to be no attention."""

    site: str
    shape: tuple[int, ...]
    reason: str  # why it is no attention, unless it turns out to be one
    attention: bool = False
    place: Place | None = None
    lost: bool = False  # its weights met something else, and were not followed further
    lost_at: Place | None = None  # where
    formula: str | None = None  # as far as it was seen
    told: bool = False  # nothing more can be said of it
    record: int | None = None  # number of its record, among those of the trace


@dataclass(frozen=True, slots=True, eq=False)
class EdgeGroups:
    """A softmax over the edges of each node."""

    axis: int  # of the edges
    nodes: int  # how many there are
    index: Tensor | None = None  # the node of each edge; None where it is not known


@dataclass(eq=False)
class Weighing:
    """A softmax that has run; it becomes an attention when its weights reach a value product."""

    node: Node  # of the logits
    logits: Tensor  # what entered it
    weights: Tensor  # what left it
    dim: int
    op: str
    entry: SoftmaxEntry
    flex: bool
    stored: torch.dtype  # of the product's result, before an upcast for the softmax
    dropout: float = 0.0
    sinks: bool = False  # its denominator has more than the keys
    carried: Carried = field(default_factory=Carried)  # what the weights went through until the value product
    met: Tensor | None = None  # the weights that met the values, (..., L, S), where a mixing may have shown hidden keys
    used: Tensor | None = None  # the weights that met the values, (..., L, S), where the trace keeps them
    fault: str | None = None  # the value product sums over another axis than the softmax's
    edges: EdgeGroups | None = None  # it runs over the edges of a graph, by scattered sums
    ended: Callable[[Weighing], None] | None = None  # is told when the last of its weights is gone

    def __del__(self) -> None:
        if self.ended is not None:
            self.ended(self)


@dataclass(eq=False)
class Exponential:
    """exp(z - m) of logits that has met values; a part of a softmax, once the sum of its like divides what came out."""

    node: Node  # of z
    way: tuple[Node, ...]  # from the exp to what met the values, innermost first
    logits: Tensor | None  # what entered the exp; None where that is too much to hold, or is held no more
    power: Tensor | None  # what left it, where it was written over the logits; then they are its logarithm
    offset: Tensor | None  # m; None where nothing was taken off
    maximum: int | None  # number of m's node, where it is of the data
    value: Tensor  # that it met, (..., Sv, Ev)
    shape: tuple[int, ...]  # of z
    dim: int  # its axis of the keys
    base: float  # of the power, e or 2
    stored: torch.dtype  # of the product's result
    entry: SoftmaxEntry  # for the list of what was not read
    number: int  # in the order of running


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """An attention that is read, to some of the keys: what came out may yet be merged with that of the others."""

    entry: SoftmaxEntry
    number: int  # in the order of running
    sides: tuple[object, object]  # of its product; equal where blocks have the same queries, or the same keys


@dataclass(slots=True, eq=False)
class Online:
    """Parts that belong to one attention or more, and what came out of them so far, divided by their sums."""

    parts: list[Exponential | Finished]
    output: Tensor
    loose: bool = False  # sums under unlike maxima were added as they were


@dataclass(frozen=True, slots=True, eq=False)
class Multiplied:
    """The operands of a projection, where a trace keeps them: input (N, D) @ weight (D, F) + bias (F)."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Root:
    """Where a lineage starts."""

    source: int | None = None  # serial number of what a projection read; two projections of one tensor share it
    # Serial numbers of that tensor and of what it was projected from, up to the nearest sum of branches.
    lineage: frozenset[int] = frozenset()
    width: int | None = None  # features that a projection contracted over
    features: int = -1  # the axis of the result along which its features lie: -2 of W x
    additive: bool = False  # it is an additive score, v . tanh(q + k)
    # It projects pairs of rows of two activations, or a curve over them: all pairs, or a single row with all others.
    paired: bool | None = None
    gathered_by: int | None = None  # serial number of the list by which the rows that a projection read were gathered
    projects: bool = False  # a library's own operation projected, or what one gave became floating-point again
    inverse: bool = False  # it is a product of weights with themselves, a step to their inverse (Nystroem)
    pooled: SoftmaxEntry | None = None  # the softmax whose weights met values here
    logits: Node | None = None  # what it was made from, where those were logits: a step that is not followed
    matrices: int = 1  # how many projected, one a head: entry n of a stack of them was projected by n % matrices
    part: bool = False  # a rank's part of a weight projected
    multiplied: Multiplied | None = None  # what was, where the trace keeps it


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """What queries and keys came to."""

    dtype: torch.dtype  # in which it was stored
    largest: Tensor | None  # the largest |q . k|, where it was measured
    distance: int | None = None  # it is |q - k| to this power, 1 or 2; None where it is q . k


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Two activations, rows of one of which met rows of the other, without the views that spread them for that.

    `both` where each has an axis that the other has not, or their rows were gathered by two lists: every row of one met
    rows of the other.
    """

    left: Node
    right: Node
    both: bool


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """Weights of a softmax, and what they went through since."""

    weighing: Weighing
    carried: Carried = field(default_factory=Carried)
    weighted: bool = False  # they were multiplied with values, by broadcasting, and not summed yet
    values: Tensor | None = None  # those values
    beside: tuple[Weighing, ...] = ()  # other softmaxes whose weights were combined with them


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A sum of exponentials times values, as attention by blocks of keys keeps it, or what came out of attentions."""

    parts: frozenset[Exponential | Finished]  # those in it
    open: frozenset[Exponential | Finished]  # those that were not divided by their sum yet
    scaled: bool = False  # it was multiplied by a number of the rows since it was last added to
    loose: bool = False  # sums under unlike maxima were added, and neither was brought to the other's
    weighed: bool = False  # it was multiplied by a share of a sum of exponentials since


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


def back(node: Node, through: frozenset[str] = ops.PASSING) -> Iterator[Node]:
    """The node and what it was made from, parent by parent, as long as the operations are among `through`."""
    yield node
    while node.op in through and not node.is_root and (parent := node.main()) is not None:
        node = parent
        yield node


def origin(node: Node, through: frozenset[str] = ops.PASSING) -> Node:
    """What `back` ends at: without `through` the tensor before the views and casts that lead to `node`."""
    return deque(back(node, through), maxlen=1)[0]
