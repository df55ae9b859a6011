"""Checks of the numbers that a caller passes: an error names the argument that is not a finite real number."""

from __future__ import annotations

import math
from numbers import Integral, Real

from sqrtdk.errors import InvalidTypeError, InvalidValueError


def finite(value: object, name: str) -> float:
    """Return `value` as a float if it is a finite real number; the message begins with `name`.

    Raises:
        InvalidTypeError: it is a boolean, a tensor or not a number.
        InvalidValueError: it is NaN or infinite.

    Example:
        >>> finite(2, "the scale")
        2.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidTypeError(f"{name} is a real number; got {_shown(value)}", hint="Pass a float or an int.")
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        number = math.inf
    if not abs(number) < math.inf:  # also for a symbolic float of torch.compile, for which isfinite can't be traced
        raise InvalidValueError(f"{name} is a finite number; got {number}", hint="Look where the number comes from.")
    return number


def positive(value: object, name: str) -> float:
    """Return `value` as a float if it is finite and above 0; errors as in `finite`.

    Example:
        >>> positive(0.5, "the temperature")
        0.5
    """
    number = finite(value, name)
    if number <= 0.0:
        raise InvalidValueError(f"{name} is above 0; got {number}", hint="Pass a positive number.")
    return number


def whole_number(value: object, name: str, least: int) -> int:
    """Return `value` as an int if it is an integer of at least `least`.

    Raises:
        InvalidTypeError: it is a boolean, a float, a tensor or not a number.
        InvalidValueError: it is too small.

    Example:
        >>> whole_number(3, "terms", 1)
        3
    """
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise InvalidTypeError(f"{name} is a whole number; got {_shown(value)}", hint="Pass an int.")
    number = int(value)
    if number < least:
        raise InvalidValueError(f"{name} is at least {least}; got {number}", hint="Pass a larger int.")
    return number


def _shown(value: object) -> str:
    kind = type(value).__name__
    return f"{value!r} ({kind})" if isinstance(value, (bool, float, str)) or value is None else f"a {kind}"
