"""What weights went through between the softmax and the values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Carried:
    """What the weights went through.

    Attributes:
        remasked: keys were hidden by zeros.
        renormalised: and the rest was then divided by its sum.
        thinned: weights were set to 0 by their own size (top-k).
        changes: names of other operations that changed them.
    """

    remasked: bool = False
    renormalised: bool = False
    thinned: bool = False
    changes: tuple[str, ...] = ()
