"""Names a gate that only one side runs, or another activation of it, where two modules begin to differ.

Code of a gate stands between modules: `y * torch.sigmoid(self.g_proj(x))[..., None]` in front of `o_proj`,
`F.silu(gate(x)) * up(x)` in front of `down`. It is read off the numbers: what reaches the next module is a product of
something known and an activation of a module's output. Each side's product is looked for among the calls inside its own
module, so a name is given only to what computes the numbers that were there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.compare.modules import KeptTensor, ModuleStep
from sqrtdk.messages import Message
from sqrtdk.tracing.tensors import CallTensors

MOST_INNER = 12  # calls inside a module that are tried as gates, and as what is gated
NEAR_GATE = 1e-4  # share of the size: an attention's output is that of the run in its own dtype
NO_ACTIVATION = "outputs.gate.plain"
GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu (tanh)": lambda x: functional.gelu(x, approximate="tanh"),
    "tanh": torch.tanh,
    "relu": functional.relu,
    "relu squared": lambda x: functional.relu(x).square(),
    "softplus": functional.softplus,
    "2 * sigmoid": lambda x: 2 * torch.sigmoid(x),
    "x * sigmoid(1.702 * x)": lambda x: x * torch.sigmoid(1.702 * x),
    NO_ACTIVATION: lambda x: x,
}


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """What one side has at the place where it begins to differ.

    Attributes:
        module: path of the module around the place.
        inner: calls inside it.
        reached: what reaches the next module, or leaves this one, (B, L, D).
        heads: the output of its attention, (B, H, L, E); None without one.
    """

    module: str
    inner: Sequence[ModuleStep]
    reached: Tensor
    heads: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """A product that was found: an activation of a module's output, times something else or nothing.

    Attributes:
        name: the module's path within the module around it; "" if nothing is gated.
        activation: a name of `GATE_ACTIVATIONS`; "" if nothing is gated.
        gates: the path of the module whose output is gated, or is reached ungated; "" for the attention's own output.
    """

    name: str = ""
    activation: str = ""
    gates: str = field(default="", compare=False)


def gate_at(
    numbers: Sequence[tuple[KeptTensor, KeptTensor]],
    a: tuple[ModuleStep, Sequence[ModuleStep]],
    b: tuple[ModuleStep, Sequence[ModuleStep]],
    calls: Sequence[CallTensors],
    calls_a: Sequence[CallTensors] | None = None,
) -> Message | None:
    """Returns how the gates inside a module of both sides differ; None if none is seen, or not all numbers were kept.

    Args:
        numbers: what reaches the place where the sides begin to differ, of A and of B; may be empty.
        a: A's call of the module, and all calls of its run.
        b: the same of B.
        calls: B's attentions. A may have run again since its own was recorded; both give the same for one input.
        calls_a: A's attentions, if `a` is the run in which they were recorded.
    """
    sides = numbers_at(numbers, a, b, calls, calls_a)
    return None if sides is None else gate_words(gate_of(sides[0]), gate_of(sides[1]), sides[1])


def numbers_at(
    numbers: Sequence[tuple[KeptTensor, KeptTensor]],
    a: tuple[ModuleStep, Sequence[ModuleStep]],
    b: tuple[ModuleStep, Sequence[ModuleStep]],
    calls: Sequence[CallTensors],
    calls_a: Sequence[CallTensors] | None = None,
) -> list[Numbers] | None:
    """Returns what both sides have there, by the arguments of `gate_at`; None if not all numbers were kept."""
    if not numbers or any(kept.stride != 1 for kept in numbers[0]):
        return None
    every = [(b[0], calls) if calls_a is None else (a[0], calls_a), (b[0], calls)]
    sides = []
    for (call, steps), kept, (of, ran) in zip((a, b), numbers[0], every, strict=True):
        heads = next((one.output.detach().cpu() for one in ran if (one.site, one.index) == of.place), None)
        inner = [step for step in steps if step.parent == call.number]
        sides.append(Numbers(call.place[0], inner, kept.values.view(kept.shape), heads))
    return sides


def gate_words(first: Gate | None, second: Gate | None, b: Numbers) -> Message | None:
    """Returns how the gates of both sides differ, with B as the subject; None if no gate is found, or the same."""
    if first is None or second is None or (first.name, first.activation) == (second.name, second.activation):
        return None
    if first.name and not second.name:
        ran = any(_below(step, b.module) == first.name for step in b.inner)
        return Message("outputs.gate.not_applied" if ran else "outputs.gate.not_run", gate=f"`{first.name}`")
    if second.name and not first.name:
        return Message("outputs.gate.added", gate=f"`{second.name}`")
    if first.activation == second.activation:
        return Message("outputs.gate.moved", gate=f"`{second.name}`", other=f"`{first.name}`")
    words = {"new": _word(second.activation), "old": _word(first.activation)}
    return Message("outputs.gate.activation", gate=f"`{second.name}`", **words)


def _word(activation: str) -> str:
    return Message(activation) if activation == NO_ACTIVATION else activation


def gate_of(side: Numbers) -> Gate | None:
    """Returns the gate that gives what is reached; one without a name if it is ungated; None if neither is seen."""
    reached = side.reached.double()
    if reached.dim() != 3 or not bool(reached.isfinite().all()):
        return None
    sources = list(_gated(side, reached.shape))
    for name, source in sources:
        if _near(source, reached):
            return Gate(gates=name)
    for name, gate in _gates(side, reached.shape):
        for activation, function in GATE_ACTIVATIONS.items():
            factor = function(gate)
            for of, source in sources:
                if of != name and _near(source * factor, reached):
                    return Gate(name, activation, of)
            if activation != NO_ACTIVATION and _near(factor, reached):
                return Gate(name, activation, name)
    return None


def _gated(side: Numbers, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Yields what may be gated: the attention's output by token, and what the inner modules give."""
    if side.heads is not None:
        merged = side.heads.double().transpose(1, 2).flatten(2)
        if merged.shape == shape:
            yield "", merged
    for step in side.inner[:MOST_INNER]:
        if (given := _given(step)) is not None and given.shape == shape:
            yield _below(step, side.module), given


def _gates(side: Numbers, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Yields what may gate: an inner module's output by channel or by head, or that half of it which is not q."""
    heads = None if side.heads is None else side.heads.shape[1]
    for step in side.inner[:MOST_INNER]:
        given, name = _given(step), _below(step, side.module)
        if given is None or given.dim() != 3 or given.shape[:2] != shape[:2]:
            continue
        width, wanted = given.shape[2], shape[2]
        if width == wanted:
            yield name, given
        elif heads is not None and width == heads and wanted % heads == 0:
            yield name, given.repeat_interleave(wanted // heads, -1)
        elif width == 2 * wanted:
            yield name, given[..., wanted:]
            if heads is not None and wanted % heads == 0:  # q and gate of a head side by side
                yield name, given.view(*shape[:2], heads, -1)[..., wanted // heads :].flatten(2)


def _given(step: ModuleStep) -> Tensor | None:
    """Returns the first tensor that a call gave; None if only some of its entries were kept."""
    if not step.gives or step.gives[0].stride != 1 or not step.gives[0].values.is_floating_point():
        return None
    return step.gives[0].values.double().view(step.gives[0].shape)


def _below(step: ModuleStep, module: str) -> str:
    return step.place[0].removeprefix(f"{module}.") if module else step.place[0]


def _near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not bool(one.isfinite().all()):
        return False
    return float((one - other).norm()) <= NEAR_GATE * float(other.norm()) and math.isfinite(float(other.norm()))
