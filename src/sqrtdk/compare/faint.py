"""Causes that move no single number beyond what rounding allows, and show in all numbers of a segment together.

What is allowed of one number is the largest that chance makes of its rounding; in half precision a scale that is off by
a hundredth stays below. All numbers together tell more. Where the programs say that B does something else, that change
of A's program moves its values by d. With r what A's are off by, the cause is there where |r - d|^2 <= |r|^2 / 2: more
than half of what is left is gone with it.

Chance does that to no one: it asks that r, which is nothing but rounding, lies within 45 degrees of d. Of n numbers
that are rounded independently that has a probability of at most 2^(-(n + 1) / 2), `RISK` at n = 39. A vector's numbers
have errors in common, so n counts vectors, not their entries. A constant that one side holds in fewer digits is no
cause: causes ask that the numbers be further apart than that; the cause `rounding` is not asked, nor, of sides of two
dtypes, what finds weights that are not the same.
"""

from __future__ import annotations

import math
from dataclasses import replace

from sqrtdk.compare.explain import Causes, Explained, explain
from sqrtdk.compare.precision import RISK
from sqrtdk.compare.segments import Gap, Segment, gap
from sqrtdk.compare.suspect import Sides

LEFT = 0.5  # of the squares, with a cause that shows
ROUNDED, OF_WEIGHTS = ("rounding",), ("weights", "projection_bias")
VECTORS = math.ceil(-2 * math.log2(RISK) - 1)  # that chance does not lay along another one


def shows(before: Gap, after: Gap) -> bool:
    """Whether more than half of what a program's values are off by, in squares, goes away by a change of it."""
    return before.size > 0.0 and after.size**2 <= LEFT * before.size**2


def faint(segment: Segment, sides: Sides, causes: Causes) -> Explained:
    """Causes over a segment whose numbers are each within rounding, one after the other while they show.

    Args:
        segment: over which A's program gives B's values within rounding.
        sides: both programs.
        causes: who is asked, in order.

    Returns:
        None of the causes, and A's program as it is, where none shows.
    """
    before = gap(segment, sides.a)
    found = Explained((), sides.a, before, before)
    if math.prod(segment.target.shape[:3]) < VECTORS:
        return found
    rounded = ROUNDED if sides.a.dtype == sides.b.dtype else (*ROUNDED, *OF_WEIGHTS)
    asked = {name: suspect for name, suspect in causes.items() if name not in rounded}
    while found.after.size > 0.0:
        sharper = replace(segment, most=math.sqrt(LEFT) * found.after.size)
        more = explain(sharper, replace(sides, a=found.program), asked)
        if not more.after.within:
            break
        found = Explained((*found.causes, *more.causes), more.program, before, gap(segment, more.program))
    return found
