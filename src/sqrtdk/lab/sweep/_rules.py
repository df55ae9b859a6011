"""Scale rules as text: a name of `SCALES`, with its number where it takes one, as in "fixed=0.1"."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Iterable

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales import SCALES, ScaleRule

NAMES = tuple(name for name in SCALES if name != "learned")  # which is sqrt_dk until it is trained


def rule(text: str) -> ScaleRule:
    """The rule that a text names.

    Raises:
        InvalidValueError: no such rule, or its number is missing, unwanted or none.

    Example:
        >>> rule("temperature=2")
        Temperature(t=2.0)
    """
    name, _, argument = text.partition("=")
    checked_name(name, NAMES, "a scale")
    numbers = list(inspect.signature(SCALES[name]).parameters.values())
    if "=" not in text:
        if any(number.default is inspect.Parameter.empty for number in numbers):
            raise InvalidValueError(
                f"the scale {name} needs its {numbers[0].name}; got none", hint=f"Write it as {name}=NUMBER."
            )
        return SCALES[name]()
    if not numbers:
        raise InvalidValueError(f"the scale {name} takes no number; got {argument!r}", hint=f"Write {name} alone.")
    return SCALES[name](_number(name, argument))


def canonical(text: str) -> str:
    """One text a rule: "fixed=0.10" and "fixed=1e-1" are "fixed=0.1".

    Example:
        >>> canonical("temperature=2.0")
        'temperature=2'
    """
    rule(text)
    name, equals, argument = text.partition("=")
    return f"{name}={_number(name, argument)!r}" if equals else name


def checked_name(name: str, names: Iterable[str], what: str) -> None:
    """Refuse a name that is not among `names`, and offer the nearest.

    Raises:
        InvalidValueError: it is not.
    """
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3)
        raise InvalidValueError(
            f"{what} is one of {', '.join(names)}; got {name!r}",
            hint=f"Did you mean {' or '.join(near)}?" if near else "Take one of these names.",
        )


def _number(name: str, text: str) -> int | float:
    try:
        number = float(text)
    except ValueError as error:
        raise InvalidValueError(
            f"the scale {name} takes a number; got {text!r}", hint=f"Write it as {name}=0.5, with a point."
        ) from error
    return int(number) if math.isfinite(number) and number.is_integer() else number
