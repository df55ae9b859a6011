"""What weights went through between the softmax and the values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sqrtdk.tracing.records import Stage

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
