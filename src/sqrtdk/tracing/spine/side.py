"""One side of the product, q or k, as it was read back to its projection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sqrtdk.tracing.records import BY_DATA, Factor, Stage
from sqrtdk.tracing.tape import places
from sqrtdk.tracing.tape.node import Node, Root

TURNS = ("rope", "xpos")
PERMUTED = Stage("q", "permuted", "its channels are in another order, or have another sign, than those of k")


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of the product, read back to its projection.

    Attributes:
        basis: the projection's (or the normalised) values in the operand's layout; None where they are not known.
        root: where the lineage starts; None when several roots were put together.
        stages: every step, in order.
        factors: multiplications on the way, nearest to the projection first.
        norm: normalisation after the projection.
        norm_gain: a gain for each channel followed it.
        normed: how many features it ran over.
        rope: a rotation was applied, after a normalisation if there is one.
        decay: factors that differ from position to position, which cancel those of the other side where i = j.
        growth: how many times each head was repeated (GQA).
        pads: zeros that were added: along which axis, counted from the end, and how many.
        unknown: operations that could not be followed.
        folded_heads: features that the last reshape before the product split into heads.
    """

    basis: Tensor | None
    root: Node | None
    stages: tuple[Stage, ...] = ()
    factors: tuple[Factor, ...] = ()
    norm: str | None = None
    norm_gain: bool = False
    normed: int = 0
    rope: bool = False
    decay: Tensor | None = None
    growth: int = 1
    pads: tuple[tuple[int, int], ...] = ()
    unknown: tuple[str, ...] = ()
    folded_heads: int | None = None

    def then(self, *stages: Stage, **changes: Any) -> Side:
        """The side after further stages, with some of its attributes changed."""
        return replace(self, stages=(*self.stages, *stages), **changes)

    def written_at(self, node: Node) -> Side:
        """The side, what the operation of `node` added to it with the place where that is written."""
        nowhere = [stage for stage in self.stages if stage.at is None and stage.name != "input"]
        if node.place is None or not (nowhere or any(factor.at is None for factor in self.factors)):
            return self
        at = places.text(node.place)
        stages = tuple(replace(stage, at=at) if stage in nowhere else stage for stage in self.stages)
        factors = tuple(replace(factor, at=factor.at or at) for factor in self.factors)
        return replace(self, stages=stages, factors=factors)

    def lost(self, where: str, operation: str, name: str | None = None, **changes: Any) -> Side:
        """The side after an operation that could not be followed."""
        return self.then(Stage(where, "unknown", operation), unknown=(*self.unknown, name or operation), **changes)

    @property
    def moves(self) -> bool:
        """Whether what happened to a row depends on its position: q.k tells the scale where i = j alone."""
        return self.rope or self.decay is not None

    @property
    def turned(self) -> bool:
        """Whether it was rotated, be it before a normalisation."""
        return any(stage.name in TURNS for stage in self.stages)

    def times(self, factor: Factor, *stages: Stage) -> Side:
        """The side after a multiplication."""
        return self.then(*stages, factors=(*self.factors, factor))

    @property
    def start(self) -> Root:
        """What is known of where the lineage starts."""
        return Root() if self.root is None or self.root.root is None else self.root.root

    @property
    def padding(self) -> int:
        """Zero columns added to the head dimension, which is the last."""
        return sum(count for axis, count in self.pads if axis == -1)

    def transposed(self) -> Side:
        """The side of a right operand, which has its features before its rows, with the features last in `pads`."""
        return replace(self, pads=tuple(({-1: -2, -2: -1}.get(axis, axis), count) for axis, count in self.pads))

    @property
    def gathered(self) -> bool:
        """Whether its rows were picked by indices computed from the data, so that their order is not known."""
        return any(stage.name == "gather" and stage.detail == BY_DATA for stage in self.stages)

    @property
    def factor(self) -> float:
        """Product of the factors; NaN where one is not known."""
        return math.prod(math.nan if f.value is None else f.value for f in self.factors)


Follow = Callable[[Node, str], Side]
