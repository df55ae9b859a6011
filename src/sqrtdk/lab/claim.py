"""What a claim is: a statement, an experiment, the control that would show the opposite, and what counts as true."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sqrtdk.lab._run import Run
from sqrtdk.lab.figures import Figure, Figures, Place
from sqrtdk.lab.plots import Plot
from sqrtdk.lab.text import Text

Group = Literal["statistics", "saturation", "gradients", "factors", "precision", "structure"]

GROUPS: dict[Group, Text] = {
    "statistics": Text("Dot-product statistics", "点积的统计性质"),
    "saturation": Text("Softmax saturation", "softmax 的饱和"),
    "gradients": Text("Gradients", "梯度"),
    "factors": Text("Other factors", "其他因素"),
    "precision": Text("Precision and cost", "精度与开销"),
    "structure": Text("Structure", "结构"),
}


@dataclass(frozen=True, slots=True)
class Expect:
    """A bar: what a figure must be for the claim to be true. It decides only where the whole interval is on one side.

    Attributes:
        figure: its name; every figure of that name and place is asked.
        low: least value.
        high: largest value.
        at: entries of the place; empty: all places.
    """

    figure: str
    low: float = -math.inf
    high: float = math.inf
    at: Mapping[str, Place] = field(default_factory=dict)


# Figures and their bars, without the places: parts with one question ask the same thing under different conditions.
Question = frozenset[tuple[str, float, float]]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the claim, under one condition; true if all its bars are met.

    Attributes:
        text: the part in words.
        expects: its bars.
    """

    text: Text
    expects: tuple[Expect, ...]

    @property
    def question(self) -> Question:
        """What it asks, wherever it asks it."""
        return frozenset((expect.figure, expect.low, expect.high) for expect in self.expects)


@dataclass(frozen=True, slots=True)
class Measured:
    """What an experiment gave."""

    figures: list[Figure]
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True, slots=True)
class Claim:
    """One claim about sqrt(d_k) and its experiment.

    Attributes:
        id: its name in the register.
        group: the part of the register.
        sources: S0 to S4, the explanations that make the claim, and papers.
        statement: the claim, in our words.
        formula: the mathematics behind it, in LaTeX.
        method: how it is measured.
        control: what is turned round in the control, and what must follow.
        parameters: of the full run.
        quick: what differs in the quick run; it must not change the verdict.
        flipped: what differs in the control; it must change the verdict.
        measure: the experiment.
        parts: what counts as true; those that put the same bars to the same figures, elsewhere, are one part of the
            statement under different conditions.
        why: one paragraph with the figures: why the verdict is what it is.
        condition: on what such a part depends, in one sentence; None where no two parts ask the same.
        timed: its figures are times of the CPU: claims run one after the other, and tests run it by itself.
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
    measure: Callable[[Run], Measured]
    parts: tuple[Part, ...]
    why: Callable[[Figures], Text]
    condition: Text | None = None
    timed: bool = False

    def __post_init__(self) -> None:
        for changed in (self.quick, self.flipped):
            unknown = set(changed) - set(self.parameters)
            assert not unknown, f"{self.id}: {unknown} are not among its parameters"
        twice = len({part.question for part in self.parts}) < len(self.parts)
        assert twice == (self.condition is not None), f"{self.id}: a condition is for parts that ask the same"

    def settings(self, *, quick: bool = False, flipped: bool = False) -> dict[str, Any]:
        """The parameters of one kind of run."""
        return {**self.parameters, **(self.quick if quick else {}), **(self.flipped if flipped else {})}
