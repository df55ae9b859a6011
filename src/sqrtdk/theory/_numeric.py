"""Checks of the numbers that formulas accept, and zeros of falling functions.

Several zeros are found at once, by a secant within a bracket (Anderson and Bjorck 1973, BIT 13, 253).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales._numbers import finite as finite
from sqrtdk.scales._numbers import positive as positive
from sqrtdk.scales._numbers import whole_number as whole_number


def at_least(value: object, name: str, least: float = 0.0) -> float:
    """Return `value` as a finite float of at least `least`.

    Raises:
        InvalidTypeError: It is not a real number.
        InvalidValueError: It is NaN, infinite or too small.

    Example:
        >>> at_least(3, "the variance")
        3.0
    """
    number = finite(value, name)
    if number < least:
        raise InvalidValueError(f"{name} is at least {least:g}; got {number}", hint="Pass its magnitude.")
    return number


def extended(value: object, name: str) -> float:
    """Return `value` as a float, infinities included.

    Raises:
        InvalidTypeError: It is not a real number.
        InvalidValueError: It is NaN.

    Example:
        >>> extended(-math.inf, "low")
        -inf
    """
    if isinstance(value, Real) and not isinstance(value, Integral) and math.isinf(value):
        return float(value)
    return finite(value, name)


def unit_interval(value: object, name: str) -> float:
    """Return `value` as a float from 0 to 1.

    Example:
        >>> unit_interval(0.5, "p")
        0.5
    """
    number = finite(value, name)
    if not 0.0 <= number <= 1.0:
        raise InvalidValueError(f"{name} is a probability, 0 to 1; got {number}", hint="Divide a percentage by 100.")
    return number


def whole_count(value: object, name: str, least: int = 1) -> int:
    """Return `value` as an int of at least `least` that a float can hold.

    Raises:
        InvalidTypeError: It is not a whole number.
        InvalidValueError: It is too small or too large.

    Example:
        >>> whole_count(64, "dim")
        64
    """
    number = whole_number(value, name, least)
    finite(number, name)
    return number


_Function = Callable[[Sequence[float]], Sequence[float]]
PATIENCE = 3  # steps in a row that may fail to halve the bracket; then it is halved


@dataclass(slots=True)
class _Bracket:
    low: float
    high: float
    above: float  # the function's value at `low`, reduced if the secant would stick to `high`
    below: float
    best: float
    side: int = 0  # of the last step: 1 if it moved `low`
    slow: int = 0
    done: bool = False

    def next(self) -> float:
        if self.done:
            return self.best
        middle = (self.low + self.high) / 2.0
        if self.slow >= PATIENCE or not self.above > self.below:
            return middle
        x = self.low + (self.high - self.low) * self.above / (self.above - self.below)
        return x if self.low < x < self.high else middle

    def take(self, x: float, value: float, relative: float, enough: float) -> None:
        if self.done:
            return
        # Anderson and Bjorck 1973: if one end stays for two steps, its value is reduced, which bends the secant to it.
        self.best, width = x, self.high - self.low
        if value > 0.0:
            if self.side == 1:
                self.below *= _share(value, self.above)
            self.low, self.above, self.side = x, value, 1
        else:
            if self.side == -1:
                self.above *= _share(value, self.below)
            self.high, self.below, self.side = x, value, -1
        self.slow = 0 if self.high - self.low <= 0.5 * width or self.slow >= PATIENCE else self.slow + 1
        narrow = self.high - self.low <= relative * max(abs(self.low), abs(self.high))
        self.done = narrow or abs(value) <= enough or not self.low < (self.low + self.high) / 2.0 < self.high


def _share(value: float, before: float) -> float:
    share = 1.0 - value / before if before != 0.0 else 0.5
    return share if share > 0.0 else 0.5


def falling_roots(
    function: _Function,
    low: Sequence[float],
    high: Sequence[float],
    *,
    relative: float = 1e-12,
    enough: float = 0.0,
    limit: int = 200,
) -> list[float]:
    """Return the zeros of several falling functions, to `relative` of x or `enough` of the function.

    Args:
        function: takes one x for each of the functions, returns their values; at least 0 at `low`, at most 0 at `high`.
        low: lower ends of the brackets.
        high: upper ends.
        relative: width of a bracket, relative to its larger end, at which the search ends.
        enough: magnitude of a value at which it ends.
        limit: most evaluations.

    Example:
        >>> [round(x, 9) for x in falling_roots(lambda xs: [2 - xs[0] ** 2, 1 - xs[1]], [0, 0], [2, 8])]
        [1.414213562, 1.0]
    """
    brackets = []
    for a, b, above, below in zip(low, high, function(low), function(high), strict=True):
        best, value = (a, above) if abs(above) <= abs(below) else (b, below)
        brackets.append(_Bracket(float(a), float(b), above, below, float(best), done=abs(value) <= enough))
    for _ in range(limit):
        if all(bracket.done for bracket in brackets):
            break
        at = [bracket.next() for bracket in brackets]
        for bracket, x, value in zip(brackets, at, function(at), strict=True):
            bracket.take(x, value, relative, enough)
    return [bracket.best for bracket in brackets]
