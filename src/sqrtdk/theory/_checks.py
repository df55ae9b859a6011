"""Numbers that the functions of this package take: what their formulas do not admit is refused by name."""

from __future__ import annotations

import math
from numbers import Integral, Real

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales._numbers import finite as finite
from sqrtdk.scales._numbers import positive as positive
from sqrtdk.scales._numbers import whole as whole


def at_least(value: object, name: str, least: float = 0.0) -> float:
    """`value` as a finite float of at least `least`.

    Raises:
        InvalidTypeError: it is no real number.
        InvalidValueError: it is NaN, infinite or too small.

    Example:
        >>> at_least(3, "the variance")
        3.0
    """
    number = finite(value, name)
    if number < least:
        raise InvalidValueError(f"{name} is at least {least:g}; got {number}", hint="Pass its magnitude.")
    return number


def extended(value: object, name: str) -> float:
    """`value` as a float, infinities included.

    Raises:
        InvalidTypeError: it is no real number.
        InvalidValueError: it is NaN.

    Example:
        >>> extended(-math.inf, "low")
        -inf
    """
    if isinstance(value, Real) and not isinstance(value, Integral) and math.isinf(value):
        return float(value)
    return finite(value, name)


def probability(value: object, name: str) -> float:
    """`value` as a float from 0 to 1.

    Example:
        >>> probability(0.5, "p")
        0.5
    """
    number = finite(value, name)
    if not 0.0 <= number <= 1.0:
        raise InvalidValueError(f"{name} is a probability, 0 to 1; got {number}", hint="Divide a percentage by 100.")
    return number


def count(value: object, name: str, least: int = 1) -> int:
    """`value` as an int of at least `least` that a float can hold.

    Raises:
        InvalidTypeError: it is no whole number.
        InvalidValueError: it is too small or too large.

    Example:
        >>> count(64, "dim")
        64
    """
    number = whole(value, name, least)
    finite(number, name)
    return number
