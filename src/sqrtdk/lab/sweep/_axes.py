"""Axes of a sweep, by name: scale rules, and distributions of the components of q and k.

A rule is a name of `SCALES`, with its number if it takes one, as in "fixed=0.1". Each distribution has mean 0 and
variance 1, so that one theory holds for all.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from sqrtdk.errors import InvalidValueError
from sqrtdk.scales import SCALES, ScaleRule

NAMES = tuple(name for name in SCALES if name != "learned")  # a learned scale is sqrt_dk until it is trained


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


_FREEDOM = 5.0  # the least whole number with a finite fourth moment
_ZEROS = 0.75


@dataclass(frozen=True, slots=True)
class Distribution:
    """How components are drawn.

    Attributes:
        draw: (shape, generator) to float64 components.
        fourth_moment: E x^4 of a component; 3 for a normal one.
    """

    draw: Callable[[tuple[int, ...], Generator], Tensor]
    fourth_moment: float

    def excess_kurtosis(self, d_k: int) -> float:
        """Excess kurtosis of a product of d_k components, ((E x^4)^2 - 3) / d_k; 6 / d_k for normal ones."""
        return (self.fourth_moment**2 - 3.0) / d_k


def _normal(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """On [-sqrt 3, sqrt 3)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64).sub_(0.5).mul_(2.0 * math.sqrt(3.0))


def _rademacher(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """-1 or 1."""
    return torch.randint(2, shape, generator=generator, dtype=torch.float64).mul_(2.0).sub_(1.0)


def _student_t(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Bailey 1994's polar method, sqrt(v (u^(-2/v) - 1)) cos(2 pi w), over the root of its variance v / (v - 2)."""
    u = torch.rand(shape, generator=generator, dtype=torch.float64).neg_().add_(1.0)  # never 0
    w = torch.rand(shape, generator=generator, dtype=torch.float64)
    radius = u.pow_(-2.0 / _FREEDOM).sub_(1.0).mul_(_FREEDOM - 2.0).sqrt_()
    return radius.mul_(w.mul_(2.0 * math.pi).cos_())


def _sparse(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """0 with a probability of 3/4, else normal with variance 4."""
    kept = torch.rand(shape, generator=generator, dtype=torch.float64) >= _ZEROS
    return _normal(shape, generator).mul_(kept).mul_(1.0 / math.sqrt(1.0 - _ZEROS))


DISTRIBUTIONS: dict[str, Distribution] = {
    "normal": Distribution(_normal, 3.0),
    "uniform": Distribution(_uniform, 1.8),
    "rademacher": Distribution(_rademacher, 1.0),
    "student_t": Distribution(_student_t, 3.0 * (_FREEDOM - 2.0) / (_FREEDOM - 4.0)),
    "sparse": Distribution(_sparse, 3.0 / (1.0 - _ZEROS)),
}
