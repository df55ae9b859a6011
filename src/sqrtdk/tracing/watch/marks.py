"""What a node of the lineage graph can be marked as: a root, a product, weights of a softmax, and so on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.tracing.records import Stage
from sqrtdk.tracing.watch.places import Place

if TYPE_CHECKING:
    from sqrtdk.tracing.watch.graph import Node

_EQUAL = 1e-3  # a factor this near to 1 changes no weight


@dataclass(frozen=True, slots=True)
class Carried:
    """What the weights went through.

    Attributes:
        remasked: keys were hidden by zeros.
        renormalised: and the rest was then divided by its sum.
        thinned: weights were set to 0 by their own size (top-k).
        changes: names of other operations that changed them.
        stages: what else they went through, all of it known: mixed over the heads, combined with another softmax,
            joined by another tensor.
        combined: weights of another softmax, or another tensor, joined them: their rows are no longer its own.
        gain: product of the numbers that all of them were multiplied by; NaN where one is not known.
        gained_by: the operations that did so.
    """

    remasked: bool = False
    renormalised: bool = False
    thinned: bool = False
    changes: tuple[str, ...] = ()
    stages: tuple[Stage, ...] = ()
    combined: bool = False
    gain: float = 1.0
    gained_by: tuple[str, ...] = ()

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
    """A softmax over the edges of each node.

    Attributes:
        axis: of the edges.
        nodes: how many there are.
        index: the node of each edge; None where it is not known.
    """

    axis: int
    nodes: int
    index: Tensor | None = None


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
    """exp(z - m) of logits that has met values; a part of a softmax, once the sum of its like divides what came out.

    Attributes:
        node: of z.
        way: from the exp to what met the values, innermost first.
        logits: what entered the exp; None where that is too much to hold, or is held no more.
        power: what left it, where it was written over the logits; then they are its logarithm.
        offset: m; None where nothing was taken off.
        maximum: number of m's node, where it is of the data.
        value: the values that it met, (..., Sv, Ev).
        shape: of z.
        dim: its axis of the keys.
        base: of the power, e or 2.
        stored: dtype of the product's result.
        entry: for the list of what was not read.
        number: in the order of running.
    """

    node: Node
    way: tuple[Node, ...]
    logits: Tensor | None
    power: Tensor | None
    offset: Tensor | None
    maximum: int | None
    value: Tensor
    shape: tuple[int, ...]
    dim: int
    base: float
    stored: torch.dtype
    entry: SoftmaxEntry
    number: int


@dataclass(frozen=True, slots=True, eq=False)
class Finished:
    """An attention that is read, to some of the keys: what came out may yet be merged with that of the others.

    Attributes:
        entry: its softmax.
        number: in the order of running.
        sides: what its product multiplied, left and right; equal where blocks have the same queries, or the same keys.
    """

    entry: SoftmaxEntry
    number: int
    sides: tuple[object, object]


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
    """Where a lineage starts.

    Attributes:
        source: serial number of what a projection read; two projections of the same tensor share it.
        lineage: serial numbers of that tensor and of what it was projected from, up to the nearest sum of branches.
        width: features that a projection contracted over.
        additive: it is an additive score, v . tanh(q + k).
        paired: it projects pairs of rows of two activations, or a curve over them: True for all pairs, False for those
            of a single row with all others.
        meets: it adds, or projects, rows of two activations, an edge of a graph each.
        gathered_by: serial number of the list by which the rows that a projection read were gathered.
        projects: an operation of a library's own projected, or what one projected became floating-point numbers again.
        inverse: it is a product of weights with themselves, a step to their inverse (Nystroem).
        pooled: the softmax whose weights met values here.
        logits: what it was made from, where those were logits: a step that is not followed.
        matrices: how many matrices projected, one a head: entry n of a stack of them was projected by n % matrices.
        part: a rank's part of a weight projected.
        multiplied: what was, where the trace keeps it.
    """

    source: int | None = None
    lineage: frozenset[int] = frozenset()
    width: int | None = None
    additive: bool = False
    paired: bool | None = None
    meets: bool = False
    gathered_by: int | None = None
    projects: bool = False
    inverse: bool = False
    pooled: SoftmaxEntry | None = None
    logits: Node | None = None
    matrices: int = 1
    part: bool = False
    multiplied: Multiplied | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Product:
    """What queries and keys came to.

    Attributes:
        dtype: in which it was stored.
        largest: the largest |q . k|, where it was measured.
        distance: it is |q - k| to this power, 1 or 2, and no q . k; None where it is q . k.
        edges: row is multiplied with row, and not every row with every other.
    """

    dtype: torch.dtype
    largest: Tensor | None
    distance: int | None = None
    edges: bool = False


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
    """Weights of a softmax, and what they went through since.

    Attributes:
        weighing: the softmax.
        carried: what they went through.
        weighted: they were multiplied with values, by broadcasting, and not summed yet.
        values: those values.
        beside: other softmaxes whose weights were combined with them.
    """

    weighing: Weighing
    carried: Carried = field(default_factory=Carried)
    weighted: bool = False
    values: Tensor | None = None
    beside: tuple[Weighing, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Partial:
    """A sum of exponentials times values, as attention by blocks of keys keeps it, or what came out of attentions.

    Attributes:
        parts: those in it.
        open: those that were not divided by their sum yet.
        scaled: it was multiplied by a number of the rows since it was last added to.
        loose: sums under unlike maxima were added, and neither was brought to the other's.
        weighed: it was multiplied by a share of a sum of exponentials since.
    """

    parts: frozenset[Exponential | Finished]
    open: frozenset[Exponential | Finished]
    scaled: bool = False
    loose: bool = False
    weighed: bool = False
