"""The grid of a sweep: every combination of its axes is a cell. Rules and distributions are axes, by name.

A rule is a name of `SCALES`, with its number if it takes one, as in "fixed=0.1". The components of q and k always have
mean 0 and variance 1, whatever their distribution, so that one theory holds for all.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.messages import Message, joined
from sqrtdk.scales import SCALES, ScaleRule

GRID_AXES = ("d_k", "keys", "scale", "distribution", "seed")
SCALE_NAMES = tuple(name for name in SCALES if name != "learned")  # an untrained learned scale equals sqrt_dk


def rule(text: str) -> ScaleRule:
    """Return the rule with this name.

    Raises:
        InvalidValueError: The rule does not exist, or its number is missing, unwanted or invalid.

    Example:
        >>> rule("temperature=2")
        Temperature(t=2.0)
    """
    name, _, argument = text.partition("=")
    checked_name(name, SCALE_NAMES, "a scale")
    numbers = list(inspect.signature(SCALES[name]).parameters.values())
    if "=" not in text:
        if any(number.default is inspect.Parameter.empty for number in numbers):
            raise InvalidValueError(
                Message("errors.options.scale_needs", name=name, number=numbers[0].name),
                hint=Message("errors.hint.with_number", name=name),
            )
        return SCALES[name]()
    if not numbers:
        raise InvalidValueError(
            Message("errors.options.scale_alone", name=name, argument=repr(argument)),
            hint=Message("errors.hint.alone", name=name),
        )
    return SCALES[name](_number(name, argument))


def canonical(text: str) -> str:
    """Return the canonical text of a rule: "fixed=0.10" and "fixed=1e-1" become "fixed=0.1".

    Example:
        >>> canonical("temperature=2.0")
        'temperature=2'
    """
    rule(text)
    name, equals, argument = text.partition("=")
    return f"{name}={_number(name, argument)!r}" if equals else name


def checked_name(name: str, names: Iterable[str], what: str) -> None:
    """Refuse a name that is not among `names`, and suggest the nearest.

    Raises:
        InvalidValueError: It is not among them.
    """
    names = list(names)
    if name not in names:
        near = difflib.get_close_matches(name, names, n=3)
        raise InvalidValueError(
            Message("errors.options.one_of", what=what, names=joined([*names], "comma"), name=repr(name)),
            hint=Message("errors.hint.near", names=joined(near, "or")) if near else Message("errors.hint.these_names"),
        )


def _number(name: str, text: str) -> int | float:
    try:
        number = float(text)
    except ValueError as error:
        raise InvalidValueError(
            Message("errors.options.scale_number", name=name, text=repr(text)),
            hint=Message("errors.hint.with_point", name=name),
        ) from error
    return int(number) if math.isfinite(number) and number.is_integer() else number


_FREEDOM = 5.0  # the smallest whole number with a finite fourth moment
_ZEROS = 0.75


@dataclass(frozen=True, slots=True)
class Distribution:
    """A distribution of components.

    Attributes:
        draw: (shape, generator) to float64 components.
        fourth_moment: E x^4 of a component; 3 for a normal one.
    """

    draw: Callable[[tuple[int, ...], Generator], Tensor]
    fourth_moment: float

    def excess_kurtosis(self, d_k: int) -> float:
        """Return the excess kurtosis of a product of d_k components, ((E x^4)^2 - 3) / d_k; 6 / d_k for normal
        components."""
        return (self.fourth_moment**2 - 3.0) / d_k


def _normal(shape: tuple[int, ...], generator: Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _uniform(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Uniform on [-sqrt 3, sqrt 3)."""
    return torch.rand(shape, generator=generator, dtype=torch.float64).sub_(0.5).mul_(2.0 * math.sqrt(3.0))


def _rademacher(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """-1 or 1, with equal probability."""
    return torch.randint(2, shape, generator=generator, dtype=torch.float64).mul_(2.0).sub_(1.0)


def _student_t(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """Bailey 1994's polar method, sqrt(v (u^(-2/v) - 1)) cos(2 pi w), over the root of its variance v / (v - 2)."""
    # in (0, 1], as u = 0 would give an infinite radius
    u = torch.rand(shape, generator=generator, dtype=torch.float64).neg_().add_(1.0)
    w = torch.rand(shape, generator=generator, dtype=torch.float64)
    radius = u.pow_(-2.0 / _FREEDOM).sub_(1.0).mul_(_FREEDOM - 2.0).sqrt_()
    return radius.mul_(w.mul_(2.0 * math.pi).cos_())


def _sparse(shape: tuple[int, ...], generator: Generator) -> Tensor:
    """0 with probability 3/4, otherwise normal with variance 4."""
    kept = torch.rand(shape, generator=generator, dtype=torch.float64) >= _ZEROS
    return _normal(shape, generator).mul_(kept).mul_(1.0 / math.sqrt(1.0 - _ZEROS))


DISTRIBUTIONS: dict[str, Distribution] = {
    "normal": Distribution(_normal, 3.0),
    "uniform": Distribution(_uniform, 1.8),
    "rademacher": Distribution(_rademacher, 1.0),
    "student_t": Distribution(_student_t, 3.0 * (_FREEDOM - 2.0) / (_FREEDOM - 4.0)),
    "sparse": Distribution(_sparse, 3.0 / (1.0 - _ZEROS)),
}


MAX_SWEEP_CELLS = 10**7
MAX_NUMBERS_AT_ONCE = 2**25  # of a row's keys, and of a cell's queries and logits: 256 MiB each, 1 GiB with temporaries
_LARGEST_SEED = 2**63 - 1  # Parquet's int64


@dataclass(frozen=True, slots=True)
class Grid:
    """Axes of a sweep; each is sorted, and duplicates count once.

    Attributes:
        d_k: head dimensions, at least 1.
        keys: keys that a row sees, at least 2.
        scale: rules of `sqrtdk.scales.SCALES` by name, with their number if they take one: "fixed=0.1".
        distribution: of the components, names of `DISTRIBUTIONS`.
        seeds: one cell each.
        rows: of a cell, at least 2, each with its own query and keys.

    Raises:
        InvalidTypeError: A size or seed is no whole number.
        InvalidValueError: An axis is empty, a number out of range, a name unknown, a cell too large, or the cells too
            many.

    Example:
        >>> grid = Grid(d_k=[64, 16], keys=[16], scale=["none", "fixed=0.10"])
        >>> grid.d_k, grid.scale, len(grid)
        ((16, 64), ('fixed=0.1', 'none'), 4)
    """

    d_k: Sequence[int]
    keys: Sequence[int]
    scale: Sequence[str] = ("sqrt_dk",)
    distribution: Sequence[str] = ("normal",)
    seeds: Sequence[int] = (0,)
    rows: int = 512

    def __post_init__(self) -> None:
        for name, least in (("d_k", 1), ("keys", 2), ("seeds", 0)):
            object.__setattr__(self, name, _numbers(getattr(self, name), name, least))
        _numbers([self.rows], "rows", 2)
        for scale in self.scale:
            canonical(scale)
        for distribution in self.distribution:
            checked_name(distribution, DISTRIBUTIONS, "a distribution")
        object.__setattr__(self, "scale", _axis(map(canonical, self.scale), "scale"))
        object.__setattr__(self, "distribution", _axis(self.distribution, "distribution"))
        most = {"keys": max(self.keys), "d_k": max(self.d_k), "rows": self.rows}
        for one, other in (("keys", "d_k"), ("rows", "keys"), ("rows", "d_k")):
            if most[one] * most[other] > MAX_NUMBERS_AT_ONCE:
                raise InvalidValueError(
                    Message(
                        "errors.options.cell_size",
                        one=one,
                        other=other,
                        limit=f"{MAX_NUMBERS_AT_ONCE:,}",
                        first=f"{most[one]:,}",
                        second=f"{most[other]:,}",
                    ),
                    hint=Message("errors.hint.fewer", one=one),
                )
        _check_count(math.prod(map(len, self._axes)), "cells")

    @property
    def _axes(self) -> tuple[Sequence[Any], ...]:
        return self.d_k, self.keys, self.scale, self.distribution, self.seeds

    def __len__(self) -> int:
        return math.prod(map(len, self._axes))

    def cell(self, index: int) -> dict[str, Any]:
        """Return the cell at a place, 0 to len - 1; the last axis, the seed, varies fastest."""
        values = []
        for axis in reversed(self._axes):
            index, at = divmod(index, len(axis))
            values.append(axis[at])
        return {**dict(zip(GRID_AXES, reversed(values), strict=True)), "rows": self.rows}

    def places(self, cells: Iterable[tuple[Any, ...]]) -> Iterator[int]:
        """Yield the place of each cell, given by its axes in order.

        Raises:
            KeyError: A cell is not of this grid.
        """
        at = [{value: place for place, value in enumerate(axis)} for axis in self._axes]
        for cell in cells:
            place = 0
            for axis, value in zip(at, cell, strict=True):
                place = place * len(axis) + axis[value]
            yield place

    def content(self) -> dict[str, Any]:
        """Return the grid as JSON data."""
        names = ("d_k", "keys", "scale", "distribution", "seeds")
        return {**{name: list(getattr(self, name)) for name in names}, "rows": self.rows}


def _check_count(count: int, of: str) -> None:
    if count > MAX_SWEEP_CELLS:
        raise InvalidValueError(
            Message("errors.options.cells", limit=f"{MAX_SWEEP_CELLS:,}", count=f"{count:,}", of=of),
            hint=Message("errors.hint.parts"),
        )


def _numbers(values: Sequence[int], name: str, least: int) -> tuple[int, ...]:
    if isinstance(values, range):  # a range may exceed memory, and even len()
        _check_count((values.stop - values.start) // values.step, name)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidTypeError(
                Message("errors.options.whole_numbers", name=name, value=repr(value)), hint=Message("errors.hint.ints")
            )
        if not least <= value <= _LARGEST_SEED:
            raise InvalidValueError(
                Message("errors.options.least", name=name, least=least, value=str(value)),
                hint=Message("errors.hint.take_another"),
            )
    return _axis(values, name)


def _axis(values: Iterable[Any], name: str) -> tuple[Any, ...]:
    axis = tuple(sorted(set(values)))
    if not axis:
        raise InvalidValueError(
            Message("errors.options.no_value", name=name), hint=Message("errors.hint.one_or_several")
        )
    return axis


def whole_numbers(text: str, name: str) -> list[int]:
    """Parse the whole numbers of a comma-separated text.

    Raises:
        InvalidValueError: A part is no whole number, or there is none.

    Example:
        >>> whole_numbers("16, 64", "d_k")
        [16, 64]
    """
    parts = words(text, name)
    try:
        return [int(part) for part in parts]
    except ValueError as error:
        raise InvalidValueError(
            Message("errors.options.list_of_numbers", name=name, text=repr(text)),
            hint=Message("errors.hint.list_of_numbers"),
        ) from error


def words(text: str, name: str) -> list[str]:
    """Split a comma-separated text.

    Raises:
        InvalidValueError: There is no word, or nothing between two commas.

    Example:
        >>> words("sqrt_dk,none", "scale")
        ['sqrt_dk', 'none']
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        what = "an empty list" if not any(parts) else f"nothing between two commas of {text!r}"
        raise InvalidValueError(
            Message("errors.options.list_of_values", name=name, what=what), hint=Message("errors.hint.list_of_values")
        )
    return parts
