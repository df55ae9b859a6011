"""Runs A with edits, each once: on one prompt, to rank, or on all of them, to judge."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sqrtdk.answers.attend import AttentionFacts
from sqrtdk.answers.edit import Edit
from sqrtdk.answers.edited import copy_of, own_values
from sqrtdk.answers.judge import LEAST_FLOOR, Tried
from sqrtdk.answers.rounding import EXACT, Rounding, round_inputs, round_weights
from sqrtdk.answers.rows import Answers, Prompt, fineness, residue, squares

if TYPE_CHECKING:
    from jaxtyping import Float

Edits = tuple[Edit, ...]


@dataclass(frozen=True, slots=True)
class RowAlignment:
    """How rows and prompts of the two sides belong together.

    Attributes:
        shift: Tokens by which B's rows tell of a later place than they say.
        bos: Tokens of the beginning of a sequence that B has before each prompt, besides those that it was sent.
    """

    shift: int = 0
    bos: int = 0


@dataclass(slots=True, eq=False)
class Lab:
    """Runs A with edits, each once.

    Attributes:
        model: A.
        prompts: Token ids that B was asked.
        answers: What B said.
        facts: What A's attentions were called with.
        bos: A's token for the beginning of a sequence; None if B adds none.
        rounding: How A is rounded.
        alignment: How rows and prompts belong together.
        forwards: How many prompts A ran.
    """

    model: nn.Module
    prompts: tuple[Prompt, ...]
    answers: Answers
    facts: tuple[AttentionFacts, ...]
    bos: int | None
    rounding: Rounding = EXACT
    alignment: RowAlignment = RowAlignment()
    forwards: int = 0
    _values: dict[Any, Float[Tensor, "N K"]] = field(default_factory=dict)
    _runs: dict[Any, Tried] = field(default_factory=dict)
    _printed: float | None = None
    _rounded: tuple[str, nn.Module] | None = None

    @property
    def printed(self) -> float:
        """Return how finely B writes log-probabilities, in nats, as a least floor."""
        if self._printed is None:
            self._printed = max(LEAST_FLOOR, fineness(self.answers))
        return self._printed

    def run(self, edits: Edits, *, whole: bool = False, floor: bool = False) -> Tried:
        """Return the run with edits; of the runs with rounded weights, and with rounded inputs as well, the nearer one.

        Args:
            edits: What is changed.
            whole: Whether all prompts run, not only the first one.
            floor: Whether inputs are rounded as well, which gives the floor.
        """
        key = (tuple(edit.key for edit in edits), self.rounding.name, self.alignment, whole, floor)
        if key not in self._runs:
            self._runs[key] = self._run(edits, whole, floor)
        return self._runs[key]

    def _run(self, edits: Edits, whole: bool, floor: bool) -> Tried:
        answers = self.answers.moved(self.alignment.shift + self.alignment.bos)
        own = self._own(edits, whole, inputs=False)
        apart = squares(answers, own)
        if not floor:
            return Tried(apart, own, self.printed)
        rounded = self._own(edits, whole, inputs=True)
        least = residue(squares(answers.with_values(rounded), own))
        other = squares(answers, rounded)
        if residue(other) < residue(apart):
            own, apart = rounded, other
        return Tried(apart, own, max(least, self.printed), whole)

    def ranked(self, sets: Iterable[Edits]) -> list[Edits]:
        """Return sets of edits, the nearest on the first prompt first."""
        return sorted(sets, key=lambda edits: self.run(edits).residue)

    def effect(self, one: Tried, other: Tried) -> float:
        """Return how far the answers of two runs are apart, in nats."""
        answers = self.answers.moved(self.alignment.shift + self.alignment.bos)
        return residue(squares(answers.with_values(one.own), other.own))

    def _own(self, edits: Edits, whole: bool, *, inputs: bool) -> Float[Tensor, "N K"]:
        first = self._part(edits, 0, inputs)
        if not whole:
            return first
        parts = [first, *(self._part(edits, number, inputs) for number in range(1, len(self.prompts)))]
        return _merged(parts)

    def _part(self, edits: Edits, number: int, inputs: bool) -> Float[Tensor, "N K"]:
        """Return the log-probabilities of one prompt's rows; NaN in the others."""
        key = (tuple(edit.key for edit in edits), self.rounding.name, self.alignment, inputs, number)
        if key not in self._values:
            copy = copy_of(self._base(), self.facts)
            for edit in edits:
                edit.change(copy)
            if inputs:
                round_inputs(copy, self.rounding)
            begin = (self.bos,) * self.alignment.bos if self.bos is not None else ()
            answers = self.answers.moved(self.alignment.shift + self.alignment.bos)
            mine = answers.prompt == number
            own = torch.full(answers.values.shape, torch.nan, dtype=torch.float64)
            part = answers.select(mine)
            own[mine] = own_values(copy.module, begin + self.prompts[number], part)
            self._values[key] = own
            self.forwards += 1
        return self._values[key]

    def _base(self) -> nn.Module:
        """Return A with rounded weights; one kind is kept."""
        if self.rounding is EXACT:
            return self.model
        if self._rounded is None or self._rounded[0] != self.rounding.name:
            copy = copy_of(self.model, self.facts)
            round_weights(copy, self.rounding)
            self._rounded = self.rounding.name, copy.module
        return self._rounded[1]


def _merged(parts: Sequence[Float[Tensor, "N K"]]) -> Float[Tensor, "N K"]:
    """Return the values of runs that have other rows each."""
    whole = parts[0].clone()
    for part in parts[1:]:
        whole = torch.where(part.isnan(), whole, part)
    return whole
