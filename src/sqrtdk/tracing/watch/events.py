"""What the recorder tells the readers: a softmax whose weights met values, a kernel that ran, and what was missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sqrtdk.tracing.watch.carried import Carried
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.places import Place


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


@dataclass(slots=True)
class KernelCall:
    """A call of an attention that is one operation.

    Attributes:
        op: its whole name, "aten::_scaled_dot_product_flash_attention_for_cpu".
        arguments: by their names in the operator's schema.
        nodes: of those that are tensors.
        output: its first result.
        lse: log of the sums of exponentials, (B, H, L), where it gave them.
        site: module path.
        place: where in the code.
    """

    op: str
    arguments: dict[str, Any]
    nodes: dict[str, Node]
    output: Tensor
    site: str
    place: Place | None = None
    lse: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Unweighted:
    """Logits that met values without a softmax: their node and values."""

    node: Node
    logits: Tensor


@dataclass(frozen=True, slots=True)
class Operands:
    """The activations among the operands of an operation whose computation is not seen, by their names."""

    name: str
    nodes: dict[str, Node]


class Missed(Protocol):
    """Who is told what can't be followed."""

    def __call__(self, site: str, reason: str, seen: Unweighted | Operands | None = None) -> None:
        """Note the site, why it can't be followed, and what was seen of it."""


@dataclass(slots=True)
class Listener:
    """Who is told: of an eager attention that is complete, of a kernel that ran, and of what could not be seen.

    `unsoftened` is told of logits that met values without a softmax, and their site; `ended` of a softmax whose weights
    are gone.
    """

    eager: Callable[[Weighing, Tensor, Tensor], None]
    kernel: Callable[[KernelCall], None]
    missed: Missed
    enlarge: Callable[[str], float | None]
    unsoftened: Callable[[str, Unweighted], None]
    online: Callable[[Online], None]
    ended: Callable[[Weighing], None] | None = None
