"""Reads the gates of both sides where two modules begin to differ, and how they differ.

Each side's gate is read off its numbers (`tracing.probe.gates`), among the calls inside its own module.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from sqrtdk.compare.causes import named_differences
from sqrtdk.compare.outside.modules import KeptTensor, ModuleStep
from sqrtdk.compare.outside.parts import GatePair, NamedDifference
from sqrtdk.tracing.probe.gates import Gate, Numbers, gate_of
from sqrtdk.tracing.tensors import CallTensors


@dataclass(frozen=True, slots=True, eq=False)
class GatedModule:
    """The module of A or B in which their outputs begin to differ.

    Attributes:
        numbers: what it computed at the operation where they begin to differ.
        ran: paths of the calls inside the module, relative to it.
    """

    numbers: Numbers
    ran: Collection[str]


def gate_at(
    numbers: Sequence[tuple[KeptTensor, KeptTensor]],
    a: tuple[ModuleStep, Sequence[ModuleStep]],
    b: tuple[ModuleStep, Sequence[ModuleStep]],
    calls: Sequence[CallTensors],
    calls_a: Sequence[CallTensors] | None = None,
) -> NamedDifference | None:
    """Return how the gates inside a module of both sides differ; None if none is seen, or not all numbers were kept.

    Args:
        numbers: what reaches the place where the sides begin to differ, of A and of B; may be empty.
        a: A's call of the module, and all calls of its run.
        b: the same of B.
        calls: B's attentions. A may have run again since its own was recorded; both give the same for one input.
        calls_a: A's attentions, if `a` is the run in which they were recorded.
    """
    sides = numbers_at(numbers, a, b, calls, calls_a)
    return None if sides is None else gates_apart(gate_of(sides[0].numbers), gate_of(sides[1].numbers), sides[1])


def numbers_at(
    numbers: Sequence[tuple[KeptTensor, KeptTensor]],
    a: tuple[ModuleStep, Sequence[ModuleStep]],
    b: tuple[ModuleStep, Sequence[ModuleStep]],
    calls: Sequence[CallTensors],
    calls_a: Sequence[CallTensors] | None = None,
) -> tuple[GatedModule, GatedModule] | None:
    """Return what both sides compute at a place inside a module, and which modules ran inside it.

    The arguments are those of `gate_at`. None is returned if `numbers` is empty or not all of its entries were kept.
    """
    if not numbers or any(kept.stride != 1 for kept in numbers[0]):
        return None
    every = [(b[0], calls) if calls_a is None else (a[0], calls_a), (b[0], calls)]
    sides = []
    for (call, steps), kept, (of, ran) in zip((a, b), numbers[0], every, strict=True):
        heads = next((one.output.detach().cpu() for one in ran if (one.site, one.index) == of.place), None)
        inner = [(_below(step, call.place[0]), step) for step in steps if step.parent == call.number]
        given = [(path, tensor) for path, step in inner if (tensor := _given(step)) is not None]
        found = Numbers(given, kept.values.view(kept.shape), heads)
        sides.append(GatedModule(found, {path for path, _ in inner}))
    return sides[0], sides[1]


def gates_apart(first: Gate | None, second: Gate | None, b: GatedModule) -> NamedDifference | None:
    """Return how the gates of both sides differ; None if they don't or if either is None (no gate could be read).

    Args:
        first: A's gate.
        second: B's gate.
        b: what B computed there.
    """
    if first is None or second is None:
        return None
    return next(named_differences("gate", GatePair(first, second, b.ran)), None)


def _given(step: ModuleStep) -> Tensor | None:
    """Return the first tensor that a call gave; None if only some of its entries were kept."""
    if not step.gives or step.gives[0].stride != 1 or not step.gives[0].values.is_floating_point():
        return None
    return step.gives[0].values.view(step.gives[0].shape)


def _below(step: ModuleStep, module: str) -> str:
    return step.place[0].removeprefix(f"{module}.") if module else step.place[0]
