"""What the causes of q, k and v share: parts of a program by name, what differs in one of them, and how exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.compare.program import Norm, Program, Rotation, Way
from sqrtdk.compare.suspect import Sides, Suspicion

QK = ("query", "key")
QKV = ("query", "key", "value")
LETTERS = {"query": "q", "key": "k", "value": "v"}
ROUNDINGS = 8.0  # of a fitted number: those of both sides' steps before and after it
FINEST = 2.0**-40  # no fit in float64 is finer
ALIKE = 0.05  # two fitted numbers that a reader would take for one

Edit = Callable[[Way], Way]


@dataclass(frozen=True, slots=True)
class Finding:
    """What differs in one part of the program.

    Attributes:
        part: "query", "key" or "value".
        a: what A does.
        b: what B does.
        text: half a sentence with B as its subject; "{}" stands for the letters of the parts.
        edit: makes it B's.
    """

    part: str
    a: str | float | None
    b: str | float | None
    text: str
    edit: Edit


def way(program: Program, part: str) -> Way:
    """The way of "query", "key" or "value"."""
    return {"query": program.query, "key": program.key, "value": program.value}[part]


def with_way(program: Program, part: str, new: Way) -> Program:
    """The program with another way of one part."""
    if part == "query":
        return replace(program, query=new)
    return replace(program, key=new) if part == "key" else replace(program, value=new)


def edits(pieces: Iterable[tuple[str, Edit]]) -> Callable[[Program], Program]:
    """A change of a program: each part by its edit."""
    pairs = tuple(pieces)

    def change(program: Program) -> Program:
        for part, edit in pairs:
            program = with_way(program, part, edit(way(program, part)))
        return program

    return change


def slack(sides: Sides) -> float:
    """How far numbers that were fitted on both sides may be apart, relative to their size, and be the same."""
    return max(FINEST, ROUNDINGS * max(torch.finfo(sides.a.dtype).eps, torch.finfo(sides.b.dtype).eps))


def joined(name: str, step: str, findings: Iterable[Finding]) -> Iterator[Suspicion]:
    """One suspicion for all parts that differ alike, one each where they differ otherwise.

    Args:
        name: of the cause.
        step: of the stage, "norm" of "query norm"; "" for the values as projected.
        findings: at most one a part.
    """
    groups: list[list[Finding]] = []
    for finding in findings:
        group = next((g for g in groups if _alike(g[0].a, finding.a) and _alike(g[0].b, finding.b)), None)
        if group is None:
            groups.append([finding])
        else:
            group.append(finding)
    for group in groups:
        first = group[0]
        yield Suspicion(
            name=name,
            stage=f"{first.part} {step}".strip(),
            a=first.a,
            b=first.b,
            change=edits((finding.part, finding.edit) for finding in group),
            text=first.text.replace("{}", listed([LETTERS[finding.part] for finding in group])),
        )


def listed(words: list[str]) -> str:
    """Words as a sentence has them.

    Example:
        >>> listed(["q", "k", "v"])
        'q, k and v'
    """
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"


def number(value: float) -> float:
    """To four digits, as a reader wants it.

    Example:
        >>> number(10000.04), number(0.0883883)
        (10000.0, 0.08839)
    """
    return float(f"{value:.4g}")


def norms(steps: Way) -> list[Norm]:
    """Its normalisations, in order."""
    return [step for step in steps.steps if isinstance(step, Norm)]


def rotation(steps: Way) -> Rotation | None:
    """Its rotation; None where there is none, or one that turns none of several rows."""
    found = next((step for step in steps.steps if isinstance(step, Rotation)), None)
    if found is None or (found.table.shape[1] > 1 and bool((found.table == 1).all())):
        return None
    return found


def with_rotation(old: Way, new: Rotation) -> Way:
    """The way with another rotation in place of its own; as it is where it has none."""
    return replace(old, steps=tuple(new if isinstance(step, Rotation) else step for step in old.steps))


def with_norm(old: Way, place: int, new: Norm) -> Way:
    """The way with another norm in place of its norm number `place`; as it is where it has no such norm."""
    steps, count = [], -1
    for step in old.steps:
        count += isinstance(step, Norm)
        steps.append(new if isinstance(step, Norm) and count == place else step)
    return replace(old, steps=tuple(steps))


def apart(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two tensors differ by more than `tolerance` of the largest of them; shapes broadcast."""
    size = max(float(a.abs().max()), float(b.abs().max())) if a.numel() and b.numel() else 0.0
    return bool(((a - b).abs() > tolerance * size).any())


def like_amplitude(sides: Sides) -> bool:
    """Whether q and k are both off by one and the same factor, and both turn: by the amplitude of their tables."""
    ratios = [
        (torch.as_tensor(way(sides.b, part).scaled) / torch.as_tensor(way(sides.a, part).scaled)).double().flatten()
        for part in QK
    ]
    both = torch.cat(ratios)
    turning = all(rotation(way(side, part)) is not None for part in QK for side in (sides.a, sides.b))
    one = not apart(both[:1], both, slack(sides))
    return turning and one and apart(both[:1], torch.ones(1, dtype=torch.float64), slack(sides))


def _alike(a: str | float | None, b: str | float | None) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return abs(a - b) <= ALIKE * max(abs(a), abs(b))
    return a == b
