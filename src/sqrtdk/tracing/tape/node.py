"""A node of the tape, one for every tensor, and its marks: root, product, weights, partial sum, and so on.

A node holds a tensor only if a later reading needs it: an alias of the values at roots (projections, inputs, sums of
two branches) and at normalised q and k, and elsewhere aliases of the other operands (masks, biases, factors, tables).
Nodes live as long as a tensor that descends from them, and roots cut the chain, so a trace holds about one block's
activations.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sqrtdk.tracing.records import CallFault, NotAttentionCode, PairDistance, Referable, Stage
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.places import Place

_SERIAL = count()
ROW_SHIFTS = frozenset({"amax", "max", "logsumexp"})  # z - max(z): taken off a row, they do not change its softmax
_UNIT_TOLERANCE = 1e-3  # a factor this near to 1 counts as 1


WeightCode = Literal[
    "other_sum",  # divided by sums over another axis than the softmax's
    "sinkhorn",  # divided by the sums of rows and columns in turn
]


class WeightChange(NamedTuple):
    """An operation that changed the weights of a softmax and could not be followed."""

    name: str
    code: WeightCode | None = None


@dataclass(frozen=True, slots=True)
class WeightSteps:
    """The steps on the weights of a softmax since it ran."""

    remasked: bool = False  # a mask set weights to 0: w * mask
    renormalised: bool = False  # the remasked weights were divided by their sum
    thinned: bool = False  # weights were set to 0 by their own size (top-k)
    changes: tuple[WeightChange, ...] = ()  # other operations that changed the weights
    stages: tuple[Stage, ...] = ()  # known steps: mixed over the heads, combined with other weights, joined
    combined: bool = False  # weights of another softmax, or another tensor, joined: the rows need not sum to 1
    gain: float = 1.0  # product of the numbers that multiply all weights; NaN if one is unknown
    gained_by: tuple[str, ...] = ()  # the operations of `gain`

    def then(self, name: str, detail: str) -> WeightSteps:
        """Return the steps after one more known step, `name`; the same step is listed only once."""
        stage = Stage("weights", name, detail)
        return self if stage in self.stages else replace(self, stages=(*self.stages, stage))

    def changed(self, operation: str, code: WeightCode | None = None) -> WeightSteps:
        """Return the steps after an operation that could not be followed; `code` says why, if it is known."""
        return replace(self, changes=(*self.changes, WeightChange(operation, code)))

    def has(self, *codes: WeightCode) -> bool:
        """Whether a change has one of these codes."""
        return any(change.code in codes for change in self.changes)

    def without(self, *codes: WeightCode) -> WeightSteps:
        """Return the steps without the changes that have one of these codes."""
        return replace(self, changes=tuple(change for change in self.changes if change.code not in codes))

    def times(self, factor: float, operation: str) -> WeightSteps:
        """Return the steps after `operation` multiplied all weights by `factor`, which counts towards `gain`."""
        return replace(self, gain=self.gain * factor, gained_by=(*self.gained_by, operation))

    def over_sum(self) -> WeightSteps:
        """Return the steps after the weights were divided by their sum, which cancels any gain."""
        return replace(self, renormalised=self.remasked or self.combined, gain=1.0, gained_by=())

    def beside(self, other: WeightSteps, detail: str) -> WeightSteps:
        """Return the steps of weights combined with those of another softmax, whose steps are `other`."""
        return replace(
            self,
            remasked=self.remasked or other.remasked,
            thinned=self.thinned or other.thinned,
            changes=tuple(dict.fromkeys((*self.changes, *other.changes))),
            stages=tuple(dict.fromkeys((*self.stages, *other.stages, Stage("weights", "combined", detail)))),
            combined=True,
        )

    def joined(self, detail: str) -> WeightSteps:
        """Return the steps after a tensor that is no softmax joined; the rows need no longer sum to 1."""
        return replace(self.then("joined", detail), combined=True)

    def settled(self) -> WeightSteps:
        """Return the steps at the value product, where a gain other than 1 becomes a change, unless `combined`."""
        known = self.combined or abs(self.gain - 1) <= _UNIT_TOLERANCE
        gains = () if known else map(WeightChange, self.gained_by)
        return replace(self, gain=1.0, gained_by=(), changes=(*self.changes, *gains))


@dataclass(slots=True)
class SoftmaxEntry:
    """What is known of a softmax that has run, for the report of softmaxes that are not an attention."""

    site: str
    shape: tuple[int, ...]
    code: NotAttentionCode = "never_used"  # why it is not an attention; ignored if `attention` becomes True
    attention: bool = False
    place: Place | None = None
    lost: bool = False  # its weights entered an operation that is not followed
    lost_at: Place | None = None  # place of that operation
    formula: str | None = None  # the formula as far as it was read
    reported: bool = False  # it is reported, and nothing can be added
    record: int | None = None  # index of its record in the trace
    logits: Node | None = None  # stands for those of an attention that is one operation and returns their lse


@dataclass(frozen=True, slots=True, eq=False)
class EdgeGroups:
    """The groups of a softmax over the edges of a graph, one group for each node."""

    axis: int  # the axis of the edges
    nodes: int  # number of nodes
    index: Tensor | None = None  # the node of each edge; None if it is unknown


@dataclass(eq=False)
class SoftmaxRun:
    """A softmax that has run; it becomes an attention when its weights reach a value product."""

    node: Node  # node of the logits
    logits: Tensor  # input of the softmax
    weights: Tensor  # output of the softmax
    dim: int
    op: str
    entry: SoftmaxEntry
    flex: bool
    stored: torch.dtype  # dtype of the product's result, before an upcast for the softmax
    dropout: float = 0.0
    sinks: bool = False  # the denominator has more terms than the keys
    weight_steps: WeightSteps = field(default_factory=WeightSteps)  # the steps on the weights up to the value product
    met: Tensor | None = None  # weights at the value product, (..., L, S), if a mixing may have shown hidden keys
    used: Tensor | None = None  # weights at the value product, (..., L, S), if the trace keeps values
    fault: CallFault | None = None  # why it is wrong: the value product sums over another axis than the softmax
    values_first: bool = False  # the value product is v.mT @ weights.mT: channels before keys, (..., Ev, L)
    edges: EdgeGroups | None = None  # it runs over the edges of a graph, by scattered sums
    ended: Callable[[SoftmaxRun], None] | None = None  # called when the last of its weights is gone

    def __del__(self) -> None:
        if self.ended is not None:
            self.ended(self)


@dataclass(eq=False)
class Exponential:
    """exp(z - m) of logits that multiplies values; one block of a softmax, once the sum of all blocks divides it."""

    node: Node  # node of z
    way: tuple[Node, ...]  # nodes from the exp to the value product, innermost first
    logits: Tensor | None  # input of the exp; None if it is too large to hold, or released
    power: Tensor | None  # output of the exp, if `exp_` overwrote the logits: they are then its logarithm
    offset: Tensor | None  # m; None if nothing is subtracted
    maximum: int | None  # serial number of m's node, if m is computed from the data
    value: Tensor  # the values that it multiplies, (..., Sv, Ev)
    value_node: Node
    values_first: bool  # the value product is v.mT @ exp(z - m).mT
    shape: tuple[int, ...]  # shape of z
    dim: int  # the axis of the keys
    base: float  # base of the power, e or 2
    stored: torch.dtype  # dtype of the product's result
    entry: SoftmaxEntry  # for the report if it is not read
    number: int  # rank in the order of running


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """A finished attention to some of the keys, whose output may be merged with that of other keys (by logsumexp)."""

    entry: SoftmaxEntry
    number: int  # rank in the order of running
    sides: tuple[object, object]  # identities of q and k; equal for blocks with the same queries, or the same keys


@dataclass(slots=True, eq=False)
class Online:
    """The parts of one or more attentions, and their output so far, divided by the sums."""

    parts: list[Exponential | Finished]
    output: Tensor
    loose: bool = False  # sums under different maxima were added without rescaling
    whole: bool = False  # one sum of exponentials divided or weighed all parts, so that they are one attention


@dataclass(frozen=True, slots=True, eq=False)
class Multiplied:
    """The operands of a projection, if the trace keeps them: input (N, D) @ weight (D, F) + bias (F)."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Root:
    """Facts about a root, a node at which the way back from a softmax ends: a projection or an input."""

    source: int | None = None  # serial number of the projection's input; two projections of one tensor share it
    lineage: frozenset[int] = frozenset()  # of that input and its own sources, up to the nearest sum of branches
    width: int | None = None  # number of features that the projection sums over
    features: int = -1  # the axis of the result's features: -2 for `W @ x`
    additive: bool = False  # the root is an additive score, v . tanh(q + k)
    paired: bool | None = None  # True: it projects all pairs of rows of two activations. False: pairs with a single row
    gathered_by: int | None = None  # serial number of the index that gathered the projection's input rows: x[target]
    projects: bool = False  # a library's operation is the projection, or its result was dequantised
    inverse: bool = False  # a product of weights with themselves, a step to their inverse (Nystroem)
    pooled: SoftmaxEntry | None = None  # the softmax whose weights multiply values here
    logits: Node | None = None  # the logits behind the root, if it came from logits by an unknown step
    matrices: int = 1  # number of projection matrices, one per head: entry n is projected by matrix n % matrices
    part: bool = False  # the projection uses one rank's shard of a weight
    multiplied: Multiplied | None = None  # the projection's operands, if the trace keeps them
    lookup: tuple[Node, Tensor] | None = None  # the table and the rows that were read from it, likewise


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """The mark of a node that is a score of queries and keys: a product or a distance."""

    dtype: torch.dtype  # dtype in which it is stored
    largest: Tensor | None  # the largest |q . k|, if it was measured
    distance: PairDistance | None = None  # None for q . k


@dataclass(frozen=True, slots=True, eq=False)
class Pairs:
    """Two activations whose rows are combined element by element, before the views that broadcast them.

    `both` is True if each has an axis that the other lacks, or if two lists gathered their rows.
    """

    left: Node
    right: Node
    both: bool


@dataclass(frozen=True, slots=True, eq=False)
class Weights:
    """The mark of a node that carries the weights of a softmax, with the steps on them since."""

    softmax_run: SoftmaxRun
    weight_steps: WeightSteps = field(default_factory=WeightSteps)
    weighted: bool = False  # multiplied with values by broadcasting, not summed yet: w[..., None] * v
    values: Tensor | None = None  # those values
    beside: tuple[SoftmaxRun, ...] = ()  # other softmaxes whose weights are combined with these


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A running sum of exponentials times values (attention by blocks of keys), or merged outputs of attentions."""

    parts: frozenset[Exponential | Finished]  # the parts that were added up
    open: frozenset[Exponential | Finished]  # the parts not yet divided by their sum
    scaled: bool = False  # multiplied by one number per row since the last addition: o * exp(m_old - m_new)
    loose: bool = False  # sums under different maxima were added without rescaling either
    weighed: bool = False  # multiplied by a share of a sum of exponentials: o * exp(lse_1 - lse)


@dataclass(slots=True, eq=False, repr=False)
class Node(Referable):
    """The record of one tensor: its operation, its operands, and its role for a softmax that may follow."""

    op: str  # operator without namespace and overload, "input", "parameter", "buffer", "constant" or "overwrite"
    shape: tuple[int, ...]
    _: KW_ONLY
    func: Any = None  # the operator, to replay views; None for leaves
    args: tuple[Any, ...] = ()  # arguments, with nodes in place of tensors; empty at roots, which cut the chain
    kwargs: dict[str, Any] = field(default_factory=dict)  # keyword arguments that are not tensors
    out: int | None = None  # index among several outputs
    act: bool = False  # descends from the model's activations
    external: bool = False  # made from integers that came from outside (token ids)
    site: str = ""  # path of the module that ran
    label: str = ""  # name of the parameter, or of the parameter that a projection used
    root: Root | None = None  # set where a lineage starts
    place: Place | None = None  # source line; None for leaves
    serial: int = field(init=False, default_factory=_SERIAL.__next__)  # rank in the order of creation
    learned: bool = False  # made from parameters alone; for a product: one of its sides is

    # `summed`: a sum over the features of pairs, which becomes a product of q and k once it enters a softmax
    pairs: Pairs | None = None
    summed: Product | None = None
    product: Product | None = None  # set if the node is a product of queries and keys
    weights: Weights | None = None  # set if it carries the weights of a softmax
    partial: Partial | None = None  # set if it carries a sum of exponentials times values

    # Aliases of the values, if they are kept, and of the other operands by position (and index in a list argument).
    value: Tensor | None = None
    operands: dict[int | tuple[int, int], Tensor] = field(default_factory=dict)
    terms: int = 0  # number of content-dependent products with a constant that are summed here
    # The summands of a root with their factors; readers follow them unless a projection reads the sum.
    branches: tuple[tuple[Node, float], ...] = ()
    _roots: frozenset[Node] = frozenset()
    _products: frozenset[Node] = frozenset()

    def __repr__(self) -> str:
        return f"Node({self.op} {tuple(self.shape)})"

    # A node that held itself in a set would be a reference cycle and keep its tensor until the collector runs.

    @property
    def roots(self) -> frozenset[Node]:
        """The roots that the node descends from, or the node itself if it is a root."""
        return frozenset({self}) if self.is_root else self._roots

    @roots.setter
    def roots(self, roots: frozenset[Node]) -> None:
        self._roots = roots

    @property
    def products(self) -> frozenset[Node]:
        """The q . k products that the node descends from, before their softmax, or itself if it is a product."""
        return frozenset({self}) if self.product is not None else self._products

    @products.setter
    def products(self, products: frozenset[Node]) -> None:
        self._products = products

    @property
    def lost_logits(self) -> Node | None:
        """The node of the logits behind one of the node's roots, or None if no root came from logits."""
        return next((r.root.logits for r in self.roots if r.root is not None and r.root.logits is not None), None)

    @property
    def is_root(self) -> bool:
        """Whether the node is a root: readers do not look behind it, and it has no parents."""
        return self.root is not None

    @property
    def softmax_run(self) -> SoftmaxRun | None:
        """The softmax whose weights the node carries, or None if it carries none."""
        return None if self.weights is None else self.weights.softmax_run

    def make_root(self, root: Root, value: Tensor | None) -> None:
        """Make this node a root that keeps its values, without links to its parents."""
        self.args, self.kwargs, self.operands = (), {}, {}
        self.product = self.weights = None
        self._roots = self._products = frozenset()
        self.root, self.value = root, value

    def stand_for(self, op: str, func: Any, *args: Any) -> None:
        """Turn this node into another operation, `func(*args)` named `op`, with the same result."""
        self.op, self.func, self.args, self.kwargs, self.operands = op, func, args, {}, {}
        self.root = self.value = None

    def parents(self) -> Iterator[Node]:
        """Yield the nodes among the arguments, one level of lists included."""
        for arg in self.args:
            for item in arg if isinstance(arg, (list, tuple)) else (arg,):
                if isinstance(item, Node):
                    yield item

    def main(self) -> Node | None:
        """Return the parent to follow: a product before an activation before a constant; None without parents."""
        parents = list(self.parents())
        if len(parents) < 2:
            return parents[0] if parents else None
        return min(parents, key=_rank)

    def number(self, position: int) -> float | None:
        """Return the argument at `position` if it is a Python number or a one-element tensor with data, else None."""
        arg = self.args[position] if position < len(self.args) else None
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return float(arg)
        value = self.operands.get(position)
        if value is not None and value.numel() == 1 and not value.is_meta and not value.is_complex():
            return float(value)
        return None


def _rank(parent: Node) -> int:
    """Return the rank of a parent as main: product of activations, product with learned vectors or maximum, rest."""
    if parent.products:
        return int(all(product.learned for product in parent.products) or origin(parent).op in ROW_SHIFTS)
    return 2 if parent.act else 3


def back(node: Node, through: frozenset[str] | None = ops.PASSING) -> Iterator[Node]:
    """Yield the node and its main parents in turn, up to a root.

    It ends as well behind the first operation that is not in `through`; None lets all operations pass. So all but the
    last are passed: `*passed, start = back(node)` are the views and casts of `x.mT.float()`, and x.
    """
    yield node
    while (through is None or node.op in through) and not node.is_root and (parent := node.main()) is not None:
        node = parent
        yield node


def origin(node: Node, through: frozenset[str] | None = ops.PASSING) -> Node:
    """Return the last node of `back`: by default the tensor before the views and casts that lead to `node`."""
    return deque(back(node, through), maxlen=1)[0]
