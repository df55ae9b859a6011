"""Errors planted in the package: where each stands, and by which changes of the code.

A change is two patterns, Python in a Python file and C++ in a C++ file. What `old` matches in the function becomes
`new`. A name of one capital letter stands for whatever is there, and for the same thing wherever it comes again:

    Change("A.masked_fill(~B, C)", "A.masked_fill(B, C)")       a mask turned round, whatever the three are called
    Change("F(*A, B + C, D)", "F(*A, B, D)")                    `*A` (`**A`): any number of arguments (by name)

Everything else stands for itself, so that a pattern names operators, torch's operations and, where these do not single
a place out, a field or a function of the package; never a variable. How the code is laid out, what its variables are
called and what stands beside the place make no difference.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

LETTER = re.compile(r"\b[A-Z]\b")
Match = TypeVar("Match")


@dataclass(frozen=True, slots=True)
class Change:
    """What becomes of one piece of a function."""

    old: str
    new: str | None = None  # None: nothing; the piece only says what its letters stand for in the changes that follow
    at: int | None = None  # which of several matches, from 0, in their order in the file; None: it is the only one


@dataclass(frozen=True, slots=True)
class Planted:
    """One error."""

    place: str  # file, below the package, and function or class or constant: "impl/call.py:Call.visible_mask"
    changes: tuple[Change, ...]  # one after the other, with the same letters

    @property
    def file(self) -> str:
        return self.place.partition(":")[0]

    @property
    def name(self) -> str:
        return self.place.partition(":")[2]


def plant(place: str, *changes: Change) -> Planted:
    """A row of a table."""
    return Planted(place, changes)


def the_one(matches: Sequence[Match], change: Change, place: str) -> Match:
    """The match that the change is for."""
    assert matches, f"{place}: nothing is like: {change.old}"
    if change.at is None:
        assert len(matches) == 1, f"{place}: {len(matches)} pieces are like: {change.old}; say which with `at`"
        return matches[0]
    assert 0 <= change.at < len(matches), f"{place}: there is no match {change.at} of {len(matches)}: {change.old}"
    return matches[change.at]
