"""A claim: a statement, an experiment, a control that would show the opposite, and the bars that decide.

An experiment receives an `ExperimentRun`: its parameters, its randomness, and a way to compute many cells. The claims
come from five widely read explanations, `EXPLANATION_IDS`, and from papers.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from sqrtdk.engines import Cell as Cell
from sqrtdk.messages import Message, Text
from sqrtdk_lab.figures import Figure, Figures, Place, Plot

Map = Callable[[Callable[[Cell], dict[str, Any]], Sequence[Cell]], list[dict[str, Any]]]


def compute_in_process(function: Callable[[Cell], dict[str, Any]], cells: Sequence[Cell]) -> list[dict[str, Any]]:
    """Compute cells one after the other in this process."""
    return [function(cell) for cell in cells]


@dataclass(frozen=True, slots=True)
class ExperimentRun:
    """One run of an experiment.

    Attributes:
        parameters: by name; `run["samples"]` reads one.
        seed: of all randomness.
        map: `run.map(function, cells)` computes cells, perhaps in other processes, and returns the results in order.
            The function is defined in a module; cells and results are JSON data. Equal cells are computed once, even
            across claims and interrupted runs.
    """

    parameters: Mapping[str, Any]
    seed: int = 0
    map: Map = compute_in_process

    def __getitem__(self, name: str) -> Any:
        return self.parameters[name]

    def generator(self, *labels: str | float) -> torch.Generator:
        """Return a generator for this combination of seed and labels, independent of all others.

        Example:
            >>> run = ExperimentRun({}, seed=1)
            >>> a, b = (torch.randn(2, generator=run.generator("q", 64)) for _ in range(2))
            >>> torch.equal(a, b)
            True
        """
        return torch.Generator().manual_seed(stable_seed([self.seed, *labels]))


def stable_seed(content: Any) -> int:
    """Return a seed below 2^63 from JSON data: the same in every process and on every machine.

    Example:
        >>> stable_seed({"d_k": 64, "seed": 0}) == stable_seed({"seed": 0, "d_k": 64})
        True
    """
    text = json.dumps(content, sort_keys=True)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


Group = Literal["statistics", "saturation", "gradients", "factors", "precision", "structure"]

GROUPS: tuple[Group, ...] = get_args(Group)  # in the order of the register


@dataclass(frozen=True, slots=True)
class Expect:
    """A bar: the range of a figure for the claim to be true. It decides only if the whole interval is on one side.

    Attributes:
        figure: its name; the bar applies to every figure of that name and place.
        low: smallest value.
        high: largest value.
        at: entries of the place; empty: all places.
    """

    figure: str
    low: float = -math.inf
    high: float = math.inf
    at: Mapping[str, Place] = field(default_factory=dict)


# Figures and their bars, without the places: parts with equal questions ask the same under different conditions.
Question = frozenset[tuple[str, float, float]]


@dataclass(frozen=True, slots=True)
class ClaimPart:
    """A part of the claim, under one condition; true if all its bars are met.

    Attributes:
        text: the part in words.
        expects: its bars; none if the part is not measurable.
        reason: why no experiment can decide the part; None if its bars do. Such a part is named beside the verdict and
            takes no part in it.
    """

    text: Text
    expects: tuple[Expect, ...] = ()
    reason: Text | None = None

    @property
    def question(self) -> Question:
        """The question of this part, wherever it is asked."""
        return frozenset((expect.figure, expect.low, expect.high) for expect in self.expects)


@dataclass(frozen=True, slots=True)
class ExperimentResult:
    """The results of an experiment."""

    figures: list[Figure]
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim about sqrt(d_k) and its experiment.

    id: its name in the register.
    group: its chapter of the register.
    sources: S0 to S4, the explanations that make the claim, and papers.
    statement: the claim, in our words.
    formula: the mathematics behind it, in LaTeX.
    method: how it is measured.
    control: the premise that the control reverses, and what must follow.
    parameters: of the full run.
    quick: parameters that differ in the quick run; it must not change the verdict.
    flipped: parameters that differ in the control; it must change the verdict.
    measure: the experiment.
    parts: the conditions for truth. Parts with the same bars on the same figures at different places are one part of
        the statement under different conditions.
    why: one paragraph with the figures: the reason for the verdict.
    condition: what decides between such parts, in one sentence; None if no two parts ask the same.
    timed: its figures are CPU times: claims run one after the other, and tests run it alone.
    """

    id: str
    group: Group
    sources: tuple[str, ...]
    statement: Text
    formula: str
    method: Text
    control: Text
    parameters: Mapping[str, Any]
    quick: Mapping[str, Any]
    flipped: Mapping[str, Any]
    measure: Callable[[ExperimentRun], ExperimentResult]
    parts: tuple[ClaimPart, ...]
    why: Callable[[Figures], Text]
    condition: Text | None = None
    timed: bool = False

    def __post_init__(self) -> None:
        for changed in (self.quick, self.flipped):
            unknown = set(changed) - set(self.parameters)
            assert not unknown, f"{self.id}: {unknown} are not among its parameters"
        measured = [part for part in self.parts if part.reason is None]
        assert measured, f"{self.id}: no part is measurable"
        assert all(part.expects for part in measured), f"{self.id}: a part has neither bars nor a reason"
        twice = len({part.question for part in measured}) < len(measured)
        assert twice == (self.condition is not None), f"{self.id}: a condition is for parts that ask the same"

    def settings(self, *, quick: bool = False, flipped: bool = False) -> dict[str, Any]:
        """Return the parameters of one kind of run."""
        return {**self.parameters, **(self.quick if quick else {}), **(self.flipped if flipped else {})}


EXPLANATION_IDS = ("S0", "S1", "S2", "S3", "S4")


def spelled(source: str) -> str:
    """Return a source with its name; a paper has no name here and stays as it is.

    Args:
        source: "S0" to "S4", or a paper, such as "arXiv:1706.03762".

    Example:
        >>> spelled("S2"), spelled("S2").said("zh"), spelled("arXiv:1706.03762")
        ('S2 questions of practice', 'S2 实践问题', 'arXiv:1706.03762')
    """
    if source not in EXPLANATION_IDS:
        return source
    return Message("lab.explanation.spelled", source=source, name=Message(f"lab.explanation.{source}.name"))
