"""What a node of the lineage graph can be marked as: a root, a product, weights of a softmax, and so on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.tracing.watch.carried import Carried

if TYPE_CHECKING:
    from sqrtdk.tracing.watch.events import Exponential, Finished, SoftmaxEntry, Weighing
    from sqrtdk.tracing.watch.graph import Node


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
    """

    dtype: torch.dtype
    largest: Tensor | None
    distance: int | None = None


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
