"""Reads the gate behind an attention or within an MLP off the numbers, and the number by which a tensor was multiplied.

Code of a gate stands between modules: `y * torch.sigmoid(self.g_proj(x))[..., None]` in front of `o_proj`,
`F.silu(gate(x)) * up(x)` in front of `down`. What reaches the next module is a product of something known and an
activation of a module's output, so a name is given only to what computes the numbers that were there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.messages import Message

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
    """What a module has at one place.

    Attributes:
        inner: the calls inside it that come first, by path within it: the first tensor that each gave.
        reached: what reaches the next module, or leaves this one, (B, L, D).
        heads: the output of its attention, (B, H, L, E); None without one.
    """

    inner: Sequence[tuple[str, Tensor]]
    reached: Tensor
    heads: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """A product that was found: an activation of a module's output, times something else or nothing.

    Attributes:
        name: the module's path within the module around it; "" if nothing is gated.
        activation: a name of `GATE_ACTIVATIONS`; "" if nothing is gated.
        of: path of the call whose output is multiplied, or passed on; "" for the attention.
    """

    name: str = ""
    activation: str = ""
    of: str = ""


def gate_of(numbers: Numbers) -> Gate | None:
    """Return the first gate that explains the numbers which reach the next module.

    Returns:
        The gate; one with the name "" if a known tensor is passed on without a gate; None if neither explains them.
    """
    return next(gates_of(numbers), None)


def gates_of(numbers: Numbers) -> Iterator[Gate]:
    """Yield every gate that explains the numbers which reach the next module.

    There are several where a gate is constant, as silu and tanh of 0 are both 0. A tensor that is passed on without a
    gate comes first, with the name "". Nothing is yielded for numbers that are not finite.
    """
    reached = numbers.reached.double()
    if reached.dim() != 3 or not bool(reached.isfinite().all()):
        return
    sources = list(_gated(numbers, reached.shape))
    for of, source in sources:
        if _near(source, reached):
            yield Gate(of=of)
            break
    for name, gate in _gates(numbers, reached.shape):
        for activation, function in GATE_ACTIVATIONS.items():
            factor = function(gate)
            gated = [of for of, source in sources if of != name and _near(source * factor, reached)]
            if not gated and activation != NO_ACTIVATION and _near(factor, reached):
                gated = [name]  # its activation alone
            if gated:
                yield Gate(name, activation, gated[0])


def activation_text(activation: str) -> str:
    """Return the name of an activation for a sentence, with words in place of `NO_ACTIVATION`."""
    return Message(activation) if activation == NO_ACTIVATION else activation


def multiple_of(whole: Tensor, part: Tensor) -> float | None:
    """Return the number that multiplies `part` to give `whole` within rounding, by least squares.

    None if no number does: their shapes differ, `whole` is not finite, or the fit is not close.

    Example:
        >>> multiple_of(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0])), multiple_of(torch.ones(2), torch.zeros(2))
        (0.5, None)
    """
    if whole.shape != part.shape or not bool(whole.isfinite().all()):
        return None
    whole, part = whole.double(), part.double()
    size = float((part * part).sum())
    number = float((whole * part).sum()) / size if size else math.nan
    return number if _near(number * part, whole) else None


def merged_heads(heads: Tensor) -> Tensor:
    """Return an attention's output (B, H, L, E) as (B, L, H * E), with the channels of all heads side by side."""
    return heads.transpose(1, 2).flatten(2)


def _gated(numbers: Numbers, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Yield what may be gated: the attention's output by token, and what the inner modules give."""
    # an output that could not be arranged by heads has no elements
    if numbers.heads is not None and numbers.heads.dim() == 4:
        merged = merged_heads(numbers.heads.double())
        if merged.shape == shape:
            yield "", merged
    for name, given in numbers.inner[:MOST_INNER]:
        if given.shape == shape:
            yield name, given.double()


def _gates(numbers: Numbers, shape: torch.Size) -> Iterator[tuple[str, Tensor]]:
    """Yield what may gate: an inner module's output by channel or by head, or that half of it which is not q."""
    heads = numbers.heads.shape[1] if numbers.heads is not None and numbers.heads.dim() == 4 else None
    for name, given in numbers.inner[:MOST_INNER]:
        if given.dim() != 3 or given.shape[:2] != shape[:2]:
            continue
        values, width, wanted = given.double(), given.shape[2], shape[2]
        if width == wanted:
            yield name, values
        elif heads is not None and width == heads and wanted % heads == 0:
            yield name, values.repeat_interleave(wanted // heads, -1)
        elif width == 2 * wanted:
            yield name, values[..., wanted:]
            if heads is not None and wanted % heads == 0:  # q and gate of a head side by side
                yield name, values.view(*shape[:2], heads, -1)[..., wanted // heads :].flatten(2)


def _near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not bool(one.isfinite().all()):
        return False
    return float((one - other).norm()) <= NEAR_GATE * float(other.norm()) and math.isfinite(float(other.norm()))
