"""Suspicions: where two programs differ, and the change of A's program that makes this part B's.

A row of the table of causes (`sqrtdk.compare.causes`) says where it looks, which fields it compares and how a
difference reads. What all rows share stands here: going over q, k and v, one suspicion for those that differ alike, and
the change, which puts B's fields into A's program as it is when the change is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import torch

from sqrtdk.compare.numbers import held, told_apart
from sqrtdk.compare.program import Formula, Norm, Program, Rotation, Way

STAGES = (
    *("input", "query", "key", "value"),  # as projected
    *("query norm", "key norm", "query rotation", "key rotation"),
    *("scale", "softcap", "bias", "mask", "sinks", "weights", "output"),
)
QK = ("query", "key")
QKV = ("query", "key", "value")
LETTERS = {"query": "q", "key": "k", "value": "v"}
NONE = "none"
ABSENT = (None, NONE, "not rotated")  # what a side does that has nothing of the kind
ROUNDINGS = 8.0  # of a fitted number: those of both sides' steps before and after it
FINEST = 2.0**-40  # no fit in float64 is finer
ALIKE = 0.05  # two fitted numbers that a reader would take for one

T = TypeVar("T")
Word = str | float | None
Words = tuple[str, str, str]  # what A has, what B has, half a sentence with B as its subject
Edit = Callable[[T], T]
Change = Callable[[Program], Program]


@dataclass(frozen=True, slots=True, eq=False)
class Suspicion:
    """A change of program A that may explain the difference.

    Attributes:
        name: of the cause.
        stage: one of `STAGES`, where it acts.
        a: what A does, in few words or a number.
        b: what B does.
        change: makes the part of A's program that is meant B's; it may be applied after others.
        text: half a sentence for a reader, with B as its subject: "leaves out the softcap (50)".
    """

    name: str
    stage: str
    a: Word
    b: Word
    change: Change
    text: str


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """The programs of both sides of a pair, what a cause looks at.

    Attributes:
        a: program of A, with what was found before already changed.
        b: program of B, where it is not known as it was inferred from B's tensors.
        head_dim: E.
        model_dim: D; None where it is not known.
        heads: Hq.
        self_attention: rows and keys are the same tokens.
        declared_a: what declares A's scale, where that is not the textbook's: "config.attention_multiplier = 0.0625".
        declared_b: the same of B.
    """

    a: Program
    b: Program
    head_dim: int
    model_dim: int | None
    heads: int
    self_attention: bool
    declared_a: str = ""
    declared_b: str = ""

    @property
    def off(self) -> float:
        """By what numbers that the code of either side holds may be off, relative, and be the same."""
        return held(self.a.dtype, self.b.dtype)

    @property
    def slack(self) -> float:
        """By what numbers that were fitted on both sides may be off, relative, and be the same."""
        return max(FINEST, ROUNDINGS * max(torch.finfo(x.dtype).eps for x in (self.a, self.b)))


@dataclass(frozen=True, slots=True, eq=False)
class Both(Generic[T]):
    """One part of both programs.

    Attributes:
        sides: the programs.
        a: A's: a formula, a way, a norm, a rotation.
        b: B's.
        on: the change of a program that edits this part of it.
        vector: "query", "key" or "value"; "" of a formula.
    """

    sides: Sides
    a: T
    b: T
    on: Callable[[Edit[Any]], Change]
    vector: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Difference:
    """How the two parts differ.

    Attributes:
        a: what A does, as the record has it.
        b: what B does.
        words: what fills the blanks of the row's sentence; `a` and `b` are filled in where they are not among them, and
            a `text` takes the place of the sentence.
        edit: makes A's part B's; by default B's fields are put in.
        key: differences of q, k and v that have the same key are one; by default those of the same `a` and `b`.
    """

    a: Word
    b: Word
    words: Mapping[str, str] = field(default_factory=dict)
    edit: Edit[Any] | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table of causes.

    Attributes:
        name: of the cause.
        among: the parts that it looks at.
        stage: of a formula where the row acts; of a vector what follows its name: "norm" of "query norm".
        fields: that the change makes B's.
        compare: how they differ; None where they are the same.
        text: half a sentence with B as its subject, blanks as {this}; or three: B has none, A has none, both have. That
            of a difference takes its place.
        digits: in which two numbers are told apart in the sentence, more where that takes more.
    """

    name: str
    among: Callable[[Sides], Iterator[Both[Any]]]
    stage: str
    fields: tuple[str, ...]
    compare: Callable[[Both[Any]], Difference | None]
    text: str | tuple[str, str, str] = ""
    digits: int = 4


def suspicions(row: Row, sides: Sides) -> Iterator[Suspicion]:
    """What a row suspects: one suspicion for all vectors that differ alike, one each where they differ otherwise."""
    groups: list[list[tuple[Both[Any], Difference]]] = []
    compared: set[str] = set()
    for both in row.among(sides):
        found = None if both.vector in compared else row.compare(both)  # of several norms the first that differs
        if found is not None:
            compared.add(both.vector)
            group = next((group for group in groups if _alike(group[0][1], found)), None)
            if group is None:
                groups.append(group := [])
            group.append((both, found))
    for group in groups:
        (first, found), vectors = group[0], [LETTERS[both.vector] for both, _ in group if both.vector]
        letters = {"parts": listed(vectors)} if vectors else {}
        changes = [both.on(one.edit or _put(row.fields, both.b)) for both, one in group]
        stage = f"{first.vector} {row.stage}".strip()
        yield Suspicion(row.name, stage, found.a, found.b, partial(_changed, changes), _sentence(row, found, letters))


def _put(fields: tuple[str, ...], other: Any) -> Edit[Any]:
    return lambda own: replace(own, **{name: getattr(other, name) for name in fields})


def _changed(changes: list[Change], program: Program) -> Program:
    for change in changes:
        program = change(program)
    return program


def _alike(one: Difference, other: Difference) -> bool:
    if one.key is not None:
        return one.key == other.key
    return all(
        abs(x - y) <= ALIKE * max(abs(x), abs(y)) if isinstance(x, float) and isinstance(y, float) else x == y
        for x, y in ((one.a, other.a), (one.b, other.b))
    )


def _sentence(row: Row, found: Difference, letters: dict[str, str]) -> str:
    a, b, text = found.a, found.b, found.words.get("text", row.text)
    if isinstance(a, float) and isinstance(b, float):
        a, b = told_apart(a, b, row.digits)
    if isinstance(text, tuple):
        text = text[0 if found.b in ABSENT else 1 if found.a in ABSENT else 2]
    shown = {name: f"{x:g}" if isinstance(x, float) else str(x) for name, x in (("a", a), ("b", b))}
    return text.format_map({**shown, **letters, **found.words})


def listed(words: list[str]) -> str:
    """Words as a sentence has them.

    Example:
        >>> listed(["q", "k", "v"])
        'q, k and v'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


# -- parts of a program ------------------------------------------------------------------------------------------------


def formulas(sides: Sides) -> Iterator[Both[Formula]]:
    """The formulas, where both are known."""
    a, b = sides.a.formula, sides.b.formula
    if a is not None and b is not None:
        yield Both(sides, a, b, of_formula)


def ways(*vectors: str) -> Callable[[Sides], Iterator[Both[Way]]]:
    """The ways of some vectors."""

    def among(sides: Sides) -> Iterator[Both[Way]]:
        for vector in vectors:
            yield Both(sides, way_of(sides.a, vector), way_of(sides.b, vector), on_way(vector), vector)

    return among


def way_of(program: Program, vector: str) -> Way:
    """The way of q, k or v by name."""
    return {"query": program.query, "key": program.key, "value": program.value}[vector]


def with_way(program: Program, vector: str, way: Way) -> Program:
    """The program with another way of q, k or v."""
    ways: dict[str, Any] = {vector: way}
    return replace(program, **ways)


def of_formula(edit: Edit[Formula]) -> Change:
    """The change of a program by an edit of its formula, where that is known."""
    return lambda own: own if own.formula is None else replace(own, formula=edit(own.formula))


def on_way(vector: str) -> Callable[[Edit[Way]], Change]:
    """Changes of a program by edits of one way."""
    return lambda edit: lambda program: with_way(program, vector, edit(way_of(program, vector)))


def on_step(vector: str, kind: type, place: int = 0) -> Callable[[Edit[Any]], Change]:
    """Changes of a program by edits of one step of a way; a way that has no such step stays as it is."""

    def edited(way: Way, edit: Edit[Any]) -> Way:
        at = [number for number, step in enumerate(way.steps) if isinstance(step, kind)][place : place + 1]
        return replace(way, steps=tuple(edit(step) if number in at else step for number, step in enumerate(way.steps)))

    return lambda edit: on_way(vector)(lambda way: edited(way, edit))


def norms(way: Way) -> list[Norm]:
    """Its normalisations, in order."""
    return [step for step in way.steps if isinstance(step, Norm)]


def rotation(way: Way) -> Rotation | None:
    """Its rotation; None where there is none, or one that turns none of several rows."""
    found = next((step for step in way.steps if isinstance(step, Rotation)), None)
    if found is None or (found.table.shape[1] > 1 and bool((found.table == 1).all())):
        return None
    return found
