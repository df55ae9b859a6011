"""The grid of a sweep: every combination of its axes is a cell."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.lab.sweep._axes import DISTRIBUTIONS, canonical, checked_name
from sqrtdk.lab.sweep._cell import AXES

MOST_CELLS = 10**7
MOST_NUMBERS = 2**25  # of a row's keys, and of a cell's queries and logits: 256 MiB each, 1 GiB with what they need
_LARGEST_SEED = 2**63 - 1  # Parquet's int64


@dataclass(frozen=True, slots=True)
class Grid:
    """Axes of a sweep; each is sorted, and what it names twice counts once.

    Attributes:
        d_k: head dimensions, at least 1.
        keys: keys a row sees, at least 2.
        scale: rules of `sqrtdk.scales.SCALES` by name, with their number where they take one: "fixed=0.1".
        distribution: of the components, names of `DISTRIBUTIONS`.
        seeds: one cell each.
        rows: of a cell, at least 2, each with a query and keys of its own.

    Raises:
        InvalidTypeError: a size or seed is no whole number.
        InvalidValueError: an empty axis, a number out of range, an unknown name, too large a cell, too many cells.

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
            if most[one] * most[other] > MOST_NUMBERS:
                raise InvalidValueError(
                    f"{one} * {other} of a cell is at most {MOST_NUMBERS:,}, which is 256 MiB; "
                    f"got {most[one]:,} * {most[other]:,}",
                    hint=f"Take fewer {one}.",
                )
        _check_count(math.prod(map(len, self._axes)), "cells")

    @property
    def _axes(self) -> tuple[Sequence[Any], ...]:
        return self.d_k, self.keys, self.scale, self.distribution, self.seeds

    def __len__(self) -> int:
        return math.prod(map(len, self._axes))

    def cell(self, index: int) -> dict[str, Any]:
        """The cell at a place, 0 to len - 1; the last axis, the seed, goes fastest."""
        values = []
        for axis in reversed(self._axes):
            index, at = divmod(index, len(axis))
            values.append(axis[at])
        return {**dict(zip(AXES, reversed(values), strict=True)), "rows": self.rows}

    def places(self, cells: Iterable[tuple[Any, ...]]) -> Iterator[int]:
        """The place of each cell, given by its axes in order.

        Raises:
            KeyError: a cell is not of this grid.
        """
        at = [{value: place for place, value in enumerate(axis)} for axis in self._axes]
        for cell in cells:
            place = 0
            for axis, value in zip(at, cell, strict=True):
                place = place * len(axis) + axis[value]
            yield place

    def content(self) -> dict[str, Any]:
        """As JSON data."""
        names = ("d_k", "keys", "scale", "distribution", "seeds")
        return {**{name: list(getattr(self, name)) for name in names}, "rows": self.rows}


def _check_count(count: int, of: str) -> None:
    if count > MOST_CELLS:
        raise InvalidValueError(
            f"a grid has at most {MOST_CELLS:,} cells; got {count:,} {of}",
            hint="Sweep parts of it into directories of their own.",
        )


def _numbers(values: Sequence[int], name: str, least: int) -> tuple[int, ...]:
    if isinstance(values, range):  # which may be longer than any memory, and than len() can tell
        _check_count((values.stop - values.start) // values.step, name)
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidTypeError(f"{name} are whole numbers; got {value!r}", hint="Pass ints.")
        if not least <= value <= _LARGEST_SEED:
            raise InvalidValueError(f"{name} are at least {least} and below 2^63; got {value}", hint="Take another.")
    return _axis(values, name)


def _axis(values: Iterable[Any], name: str) -> tuple[Any, ...]:
    axis = tuple(sorted(set(values)))
    if not axis:
        raise InvalidValueError(f"{name} has at least one value; got none", hint="Give one, or several with commas.")
    return axis


def whole_numbers(text: str, name: str) -> list[int]:
    """The numbers of a text with commas.

    Raises:
        InvalidValueError: one is no whole number, or there is none.

    Example:
        >>> whole_numbers("16, 64", "d_k")
        [16, 64]
    """
    parts = words(text, name)
    try:
        return [int(part) for part in parts]
    except ValueError as error:
        raise InvalidValueError(
            f"{name} are whole numbers with commas between them; got {text!r}", hint="Write 16,64,256."
        ) from error


def words(text: str, name: str) -> list[str]:
    """The words of a text with commas.

    Raises:
        InvalidValueError: there is none, or nothing between two commas.

    Example:
        >>> words("sqrt_dk,none", "scale")
        ['sqrt_dk', 'none']
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        what = "an empty list" if not any(parts) else f"nothing between two commas of {text!r}"
        raise InvalidValueError(f"{name} has at least one value; got {what}", hint="Write values with commas: a,b,c.")
    return parts
