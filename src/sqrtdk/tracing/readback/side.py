"""One side of the product, q or k, read back to its projection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sqrtdk.tracing.records import BY_DATA, Factor, Stage
from sqrtdk.tracing.tape import places
from sqrtdk.tracing.tape.node import Node, Root

ROTATION_NAMES = ("rope", "xpos")
PERMUTED = Stage("q", "permuted", "its channels are in another order, or have another sign, than those of k")


@dataclass(frozen=True, slots=True, eq=False)
class ProductSide:
    """The reading of q or of k, one side of the product, from its projection to the product.

    Attributes:
        basis: values of the projection (or of the last norm) in the operand's layout; None if they are unknown.
        root: node of the projection or other root; None if several roots were joined.
        stages: every step, in order.
        factors: factors that multiply q or k, nearest to the projection first.
        norm: kind of the normalisation after the projection ("l2", "rms", ...); None if there is none.
        norm_gain: the norm has a gain for each channel.
        normed: number of features that the norm runs over.
        rope: a rotation was applied, after the norm if there is one.
        decay: factors that differ by position (xPos); the other operand's cancel them where i = j.
        growth: number of times that each head was repeated (GQA).
        pads: (axis, count) of zeros added along an axis; the axis is negative.
        unknown: operations that could not be followed.
        skewed: one of these is a rotation that does not keep lengths.
        own_rows: rows of the first piece if others were joined behind it: `cat([k, compressed], 2)`; else 0.
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
    skewed: bool = False
    own_rows: int = 0
    folded_heads: int | None = None

    def then(self, *stages: Stage, **changes: Any) -> ProductSide:
        """Return a copy after further steps.

        Args:
            stages: the steps, in order.
            changes: attributes to set.
        """
        return replace(self, stages=(*self.stages, *stages), **changes)

    def written_at(self, node: Node) -> ProductSide:
        """Return the side, with the source line of `node` on the stages and factors that have none yet."""
        nowhere = [stage for stage in self.stages if stage.at is None and stage.name != "input"]
        if node.place is None or not (nowhere or any(factor.at is None for factor in self.factors)):
            return self
        at = places.place_text(node.place)
        stages = tuple(replace(stage, at=at) if stage in nowhere else stage for stage in self.stages)
        factors = tuple(replace(factor, at=factor.at or at) for factor in self.factors)
        return replace(self, stages=stages, factors=factors)

    def lost(self, where: str, operation: str, name: str | None = None, **changes: Any) -> ProductSide:
        """Return a copy after an operation that could not be followed.

        Args:
            where: "q" or "k".
            operation: name of the operation, for the stages.
            name: its name in `unknown`; None takes `operation`.
            changes: attributes to set.
        """
        return self.then(Stage(where, "unknown", operation), unknown=(*self.unknown, name or operation), **changes)

    @property
    def moves(self) -> bool:
        """Whether the steps on a row depend on its position; q.k then shows the scale only where i = j."""
        return self.rope or self.decay is not None

    @property
    def turned(self) -> bool:
        """Whether one of the steps is a rotation, before or after a normalisation."""
        return any(stage.name in ROTATION_NAMES for stage in self.stages)

    def times(self, factor: Factor, *stages: Stage) -> ProductSide:
        """Return a copy after a multiplication.

        Args:
            factor: the factor, added behind the others.
            stages: steps to add.
        """
        return self.then(*stages, factors=(*self.factors, factor))

    @property
    def start(self) -> Root:
        """Facts about the root; the defaults of `Root` if there is none."""
        return Root() if self.root is None or self.root.root is None else self.root.root

    @property
    def padding(self) -> int:
        """Number of zero columns added to the head dimension (the last axis)."""
        return sum(count for axis, count in self.pads if axis == -1)

    def transposed(self) -> ProductSide:
        """Return the side of a right operand (..., E, S) with its `pads` renamed as if it were (..., S, E)."""
        return replace(self, pads=tuple(({-1: -2, -2: -1}.get(axis, axis), count) for axis, count in self.pads))

    @property
    def gathered(self) -> bool:
        """Whether its rows were picked by indices computed from the data; their order is then unknown."""
        return any(stage.name == "gather" and stage.detail == BY_DATA for stage in self.stages)

    @property
    def factor(self) -> float:
        """Product of the factors; NaN if any factor is unknown."""
        return math.prod(math.nan if f.value is None else f.value for f in self.factors)


Follow = Callable[[Node, str], ProductSide]
