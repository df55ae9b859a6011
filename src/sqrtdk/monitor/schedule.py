"""Which steps of a run are sampled: frozen data, and one pure function of the step.

Steps count from 1; the first is sampled by every schedule, as what all later ones are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from sqrtdk.errors import InvalidTypeError, InvalidValueError


class Schedule(Protocol):
    """Says of a step whether it is sampled; `worsening` is True while a trend is bad."""

    def due(self, step: int, worsening: bool = False) -> bool:
        """Whether this step is sampled."""


@dataclass(frozen=True, slots=True)
class Every:
    """Each n-th step, and every `urgent`-th while a trend is bad.

    Attributes:
        steps: n.
        urgent: None: a bad trend changes nothing.

    Example:
        >>> [step for step in range(1, 31) if Every(10).due(step)]
        [1, 10, 20, 30]
        >>> [step for step in range(1, 11) if Every(10, urgent=5).due(step, worsening=True)]
        [1, 5, 10]
    """

    steps: int
    urgent: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("urgent", self.urgent)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidValueError(f"{name} is a whole number from 1 on; got {value!r}", hint="Pass every=100.")

    def due(self, step: int, worsening: bool = False) -> bool:
        """Whether this step is sampled."""
        often = self.urgent if worsening and self.urgent is not None else self.steps
        return step == 1 or step % often == 0 or step % self.steps == 0


@dataclass(frozen=True, slots=True)
class Logarithmic:
    """So many steps a decade, evenly on the scale of their logarithm: 1, 2, 3, 5, 8, 13, 20, ...

    Attributes:
        a_decade: samples from one power of ten to the next.

    Example:
        >>> [step for step in range(1, 101) if Logarithmic(4).due(step)]
        [1, 2, 3, 6, 10, 18, 32, 56, 100]
    """

    a_decade: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.a_decade, bool) or not isinstance(self.a_decade, int) or self.a_decade < 1:
            raise InvalidValueError(
                f"a_decade is a whole number from 1 on; got {self.a_decade!r}", hint="Pass Logarithmic(10)."
            )

    def due(self, step: int, worsening: bool = False) -> bool:
        """Whether this step is sampled."""
        place = round(self.a_decade * math.log10(step))
        return any(round(10 ** (near / self.a_decade)) == step for near in (place - 1, place, place + 1))


@dataclass(frozen=True, slots=True)
class When:
    """Where a function of the step says so, and at the first.

    Attributes:
        says: step -> bool.

    Example:
        >>> [step for step in range(1, 8) if When(lambda step: step in (3, 7)).due(step)]
        [1, 3, 7]
    """

    says: Callable[[int], bool]

    def due(self, step: int, worsening: bool = False) -> bool:
        """Whether this step is sampled."""
        return step == 1 or bool(self.says(step))


def schedule_of(every: int | Schedule | Callable[[int], bool]) -> Schedule:
    """The schedule that a number, a schedule or a function of the step stands for.

    Raises:
        InvalidValueError: a number below 1.
        InvalidTypeError: anything else.

    Example:
        >>> schedule_of(100)
        Every(steps=100, urgent=None)
    """
    if isinstance(every, Every | Logarithmic | When):
        return every
    if isinstance(every, int):
        return Every(every)
    if callable(getattr(every, "due", None)) and not isinstance(every, type):
        return cast(Schedule, every)
    if callable(every) and not isinstance(every, type):
        return When(every)
    raise InvalidTypeError(
        f"every is a number of steps, a schedule, or a function of the step; got {type(every).__name__}",
        hint="Pass every=100, Logarithmic(10), or lambda step: step % 7 == 0.",
    )
