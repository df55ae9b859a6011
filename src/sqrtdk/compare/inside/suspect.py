"""Suspicions: where two programs differ, and the change of A's program that makes that part B's.

A row of the table of causes (`sqrtdk.compare.causes`) says where it looks, which fields it compares and how a
difference reads. This module has what all rows share: the loop over q, k and v, one suspicion for vectors that differ
alike, and the change. The change puts B's fields into A's program as it is when the change is applied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from sqrtdk.compare.inside.program import Formula, NormStep, Program, Rotation, VectorPath
from sqrtdk.compare.numbers import constant_tolerance, unequal_texts
from sqrtdk.compare.records import LackingSide
from sqrtdk.messages import Message, catalogue_text, joined, placeholders

STAGES = (
    *("input", "query", "key", "value"),  # as projected
    *("query norm", "key norm", "query rotation", "key rotation"),
    *("scale", "softcap", "bias", "mask", "sinks", "weights", "output"),
)
QKV_LETTERS = {"query": "q", "key": "k", "value": "v"}
NO_VALUE = "causes.value.none"
OWN_DTYPE = "causes.rounding.own_dtype"
ABSENT_WORDS = (NO_VALUE, "causes.rope_missing.not_rotated")  # words for having nothing of a kind
FIT_ROUNDINGS = 8.0  # roundings of a fitted number: by both sides' steps before and after it
FINEST_FIT = 2.0**-40  # no fit in float64 is finer than this
READER_TOLERANCE = 0.05  # relative distance of two fitted numbers that a reader would call equal

_TOLD_BY_B = ("head_order", "weights")  # causes of which A has "in order", or "gain": what B has tells more

T = TypeVar("T")
Word = str | float | None
Edit = Callable[[T], T]
ProgramChange = Callable[[Program], Program]


class DifferenceWords(NamedTuple):
    """What to say about a difference.

    Attributes:
        a: what A has, as text or a message.
        b: what B has.
        text: the sentence: its id in the catalogue, or the whole as a message.
        values: values that the sentence needs beside `a` and `b`.
    """

    a: str
    b: str
    text: str
    values: Mapping[str, str] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Suspicion:
    """A change of program A that may explain the difference.

    Attributes:
        name: name of the cause.
        stage: one of `STAGES`, where it acts.
        a: what A does, as a number or short text.
        b: what B does.
        change: makes a part of A's program B's; may be applied after other changes.
        sentence: makes `text`. Of many suspicions few are proven, and only these are put into words.
        stages: every stage that the change acts on: a norm of q and k alike is wrong in both.
        codes: what the cause is in particular, as in `records.Cause`.
        lacks: the side that has nothing of the kind, as there.
    """

    name: str
    stage: str
    a: Word
    b: Word
    change: ProgramChange
    sentence: Callable[[], str]
    stages: frozenset[str] = frozenset()
    codes: tuple[str, ...] = ()
    lacks: LackingSide = ""

    @property
    def text(self) -> str:
        """Return half a sentence for a reader, with B as its subject: "leaves out the softcap (50)"."""
        return self.sentence()


@dataclass(frozen=True, slots=True, eq=False)
class Sides:
    """The programs of both sides of a pair, as causes see them.

    Attributes:
        a: program of A, already changed by the causes found so far.
        b: program of B; unknown parts are inferred from B's tensors.
        head_dim: E.
        model_dim: D; None if unknown.
        heads: Hq.
        self_attention: whether rows and keys are the same tokens.
        declared_a: what declares A's scale if it is not the textbook scale: "config.attention_multiplier = 0.0625".
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
        """Return the relative error within which constants in the code of either side count as equal."""
        return constant_tolerance(self.a.dtype, self.b.dtype)

    @property
    def slack(self) -> float:
        """Return the relative error within which fitted numbers are equal: 8 eps of the coarser dtype."""
        return max(FINEST_FIT, FIT_ROUNDINGS * max(torch.finfo(x.dtype).eps for x in (self.a, self.b)))


@dataclass(frozen=True, slots=True, eq=False)
class BothParts(Generic[T]):
    """One part of both programs.

    Attributes:
        sides: the programs.
        a: A's part: a formula, a path, a norm, a rotation.
        b: B's part.
        on: turns an edit of this part into a change of a program.
        vector: "query", "key" or "value"; "" for a formula.
    """

    sides: Sides
    a: T
    b: T
    on: Callable[[Edit[Any]], ProgramChange]
    vector: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class PartDifference:
    """A difference of the two parts.

    Attributes:
        a: what A does, as the record shows it.
        b: what B does.
        words: values of the sentence beside `a`, `b` and `parts` (q, k or both), or other words for these.
        edit: makes A's part B's; by default puts in B's fields.
        key: differences of q, k and v with the same key are merged; by default those with the same `a` and `b`.
        text: the sentence in place of the row's: its id, or the whole.
        code: what neither the sentence nor the words tell apart, and a fix needs: "interleaved" of `group_order`.
    """

    a: Word
    b: Word
    words: Mapping[str, str] = field(default_factory=dict)
    edit: Edit[Any] | None = None
    key: object = None
    text: str = ""
    code: str = ""

    @property
    def lacks(self) -> LackingSide:
        """Return "b" if B has nothing of the kind, else "a" if A has nothing of it, else ""."""
        return "b" if _is_absent(self.b) else "a" if _is_absent(self.a) else ""


@dataclass(frozen=True, slots=True)
class CauseRow:
    """A row of the table of causes.

    Attributes:
        name: name of the cause.
        among: yields the parts that the row compares.
        stage: for a formula, the stage; for a vector, what follows its name: "norm" of "query norm".
        fields: fields that the change copies from B.
        compare: returns the difference; None if the parts agree.
        text: id of half a sentence with B as its subject; or three: B has none, A has none, both have one. A difference
            may bring its own text instead.
        digits: digits of two numbers in the sentence, more if they need more to differ.
    """

    name: str
    among: Callable[[Sides], Iterator[BothParts[Any]]]
    stage: str
    fields: tuple[str, ...]
    compare: Callable[[BothParts[Any]], PartDifference | None]
    text: str | tuple[str, str, str] = ""
    digits: int = 4


def suspicions(row: CauseRow, sides: Sides) -> Iterator[Suspicion]:
    """Yield what a row of the table suspects, from the parts that differ by its `compare`.

    q, k and v make one suspicion if they differ alike, and one each otherwise. Of several norms of a vector, only the
    first that differs counts.
    """
    groups: list[list[tuple[BothParts[Any], PartDifference]]] = []
    compared: set[str] = set()
    for both in row.among(sides):
        found = None if both.vector in compared else row.compare(both)  # of several norms, the first that differs
        if found is not None:
            compared.add(both.vector)
            group = next((group for group in groups if _alike(group[0][1], found)), None)
            if group is None:
                groups.append(group := [])
            group.append((both, found))
    for group in groups:
        found, vectors = group[0][1], [QKV_LETTERS[both.vector] for both, _ in group if both.vector]
        changes = [both.on(one.edit or _copy_fields(row.fields, both.b)) for both, one in group]
        stages = [f"{both.vector} {row.stage}".strip() for both, _ in group]
        sentence = partial(_sentence, row, found, vectors)
        change = partial(_apply_changes, changes)
        codes = _codes(row, found)
        yield Suspicion(
            row.name, stages[0], found.a, found.b, change, sentence, frozenset(stages), codes, found.lacks
        )  # fmt: skip


def _copy_fields(fields: tuple[str, ...], other: Any) -> Edit[Any]:
    return lambda own: replace(own, **{name: getattr(other, name) for name in fields})


def _apply_changes(changes: list[ProgramChange], program: Program) -> Program:
    for change in changes:
        program = change(program)
    return program


def _alike(one: PartDifference, other: PartDifference) -> bool:
    if one.key is not None:
        return one.key == other.key
    return all(
        abs(x - y) <= READER_TOLERANCE * max(abs(x), abs(y))
        if isinstance(x, float) and isinstance(y, float)
        else x == y
        for x, y in ((one.a, other.a), (one.b, other.b))
    )


def _codes(row: CauseRow, found: PartDifference) -> tuple[str, ...]:
    """Return the difference's own code, then those of its sentence, of what A has, and for some rows of what B has."""
    sentence, own = _text_of(row, found), f"causes.{row.name}."
    words = (found.a, found.b) if row.name in _TOLD_BY_B else (found.a,)
    ids = [sentence.id if isinstance(sentence, Message) else sentence]
    ids += [word.id for word in words if isinstance(word, Message)]
    return (*filter(None, (found.code,)), *(id.removeprefix(own) for id in ids if id.startswith(own)))


def _text_of(row: CauseRow, found: PartDifference) -> str:
    """Return the sentence of a difference: its id, or the whole."""
    text = found.text or row.text
    return text[{"b": 0, "a": 1, "": 2}[found.lacks]] if isinstance(text, tuple) else text


def _sentence(row: CauseRow, found: PartDifference, vectors: list[str]) -> str:
    a, b, text = found.a, found.b, _text_of(row, found)
    if isinstance(text, Message):
        return text
    if isinstance(a, float) and isinstance(b, float):
        a, b = unequal_texts(a, b, row.digits)
    words = {name: f"{x:g}" if isinstance(x, float) else "" if x is None else x for name, x in (("a", a), ("b", b))}
    words |= {"parts": joined(vectors, "and")} if vectors else {}
    words |= found.words
    return Message(text, **{name: words[name] for name in sorted(placeholders(catalogue_text(text).en))})


def _is_absent(word: Word) -> bool:
    return word is None or (isinstance(word, Message) and word.id in ABSENT_WORDS)


# -- parts of a program ------------------------------------------------------------------------------------------------


def formula_pairs(sides: Sides) -> Iterator[BothParts[Formula]]:
    """Yield the two formulas once if both are known; else nothing."""
    a, b = sides.a.formula, sides.b.formula
    if a is not None and b is not None:
        yield BothParts(sides, a, b, change_formula)


def path_pairs(*vectors: str) -> Callable[[Sides], Iterator[BothParts[VectorPath]]]:
    """Return a function that yields both paths of each of these vectors: "query", "key", "value"."""

    def among(sides: Sides) -> Iterator[BothParts[VectorPath]]:
        for vector in vectors:
            yield BothParts(sides, path_of(sides.a, vector), path_of(sides.b, vector), change_path(vector), vector)

    return among


def path_of(program: Program, vector: str) -> VectorPath:
    """Return the path of "query", "key" or "value"."""
    return {"query": program.query, "key": program.key, "value": program.value}[vector]


def with_path(program: Program, vector: str, path: VectorPath) -> Program:
    """Return a copy of the program with another path for "query", "key" or "value"."""
    paths: dict[str, Any] = {vector: path}
    return replace(program, **paths)


def change_formula(edit: Edit[Formula]) -> ProgramChange:
    """Return the change of a program by an edit of its formula; it does nothing if the formula is unknown."""
    return lambda own: own if own.formula is None else replace(own, formula=edit(own.formula))


def change_path(vector: str) -> Callable[[Edit[VectorPath]], ProgramChange]:
    """Return a function that turns an edit of the path of one vector ("query") into a change of a program."""
    return lambda edit: lambda program: with_path(program, vector, edit(path_of(program, vector)))


def change_step(vector: str, kind: type, place: int = 0) -> Callable[[Edit[Any]], ProgramChange]:
    """Return a function that turns an edit of one step of a path into a change of a program.

    The change does nothing if the path has no such step.

    Args:
        vector: "query", "key" or "value".
        kind: class of the step.
        place: number of the step among those of its class.
    """

    def edited(path: VectorPath, edit: Edit[Any]) -> VectorPath:
        at = [number for number, step in enumerate(path.steps) if isinstance(step, kind)][place : place + 1]
        return replace(
            path, steps=tuple(edit(step) if number in at else step for number, step in enumerate(path.steps))
        )

    return lambda edit: change_path(vector)(lambda path: edited(path, edit))


def norms_of(path: VectorPath) -> list[NormStep]:
    """Return the norms of a path, in order; [] if it has none."""
    return [step for step in path.steps if isinstance(step, NormStep)]


def rotation_of(path: VectorPath) -> Rotation | None:
    """Return the first rotation of a path; None if there is none, or if its table is 1 in all of several rows."""
    found = next((step for step in path.steps if isinstance(step, Rotation)), None)
    if found is None or (found.table.shape[1] > 1 and bool((found.table == 1).all())):
        return None
    return found
