"""One operation of an ONNX graph with what goes into it: tensors without values, or numbers where they are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.graph import Graph, Node

Result = Tensor | tuple[Tensor, ...]
Operation = Callable[["Step"], Result]
DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
_ONLY_TENSORS = (torch.maximum, torch.minimum, torch.logical_and, torch.logical_or, torch.logical_xor, torch.remainder,
                 torch.fmod)  # fmt: skip


def dtype_of(number: int) -> torch.dtype:
    """The dtype that ONNX gives a number.

    Raises:
        UnsupportedError: torch has none for it here.
    """
    if number not in DTYPES:
        raise UnsupportedError(f"tensors of ONNX's type {number}")
    return DTYPES[number]


@dataclass(frozen=True, slots=True)
class Step:
    """An operation, and its inputs.

    Attributes:
        node: of the graph.
        graph: that it is of.
        inputs: tensors, in order; None for one that is left out.
        numbers_of: values of the inputs that are constants of few elements, by name.
        device: on which its result is made: "meta", or "cpu" where it is computed from values.
        learned: names of inputs that are weights.
        as_numbers: whether a constant of one element is handed to torch as a number, so that a trace reads the number.
    """

    node: Node
    graph: Graph
    inputs: tuple[Tensor | None, ...]
    numbers_of: Mapping[str, Tensor]
    device: str
    learned: frozenset[str] | set[str]
    as_numbers: bool = True

    def optional(self, index: int) -> Tensor | None:
        """An input; None where it is left out."""
        return self.inputs[index] if 0 <= index < len(self.inputs) else None

    def given(self, index: int) -> bool:
        """Whether an input is there."""
        return self.optional(index) is not None

    def tensor(self, index: int) -> Tensor:
        """An input.

        Raises:
            UnsupportedError: it is left out.
        """
        found = self.optional(index)
        if found is None:
            raise UnsupportedError(f"{self.node.op} without its input {index}")
        return found

    def known(self, index: int) -> bool:
        """Whether the values of an input are known."""
        return self.node.input(index) in self.numbers_of

    def numbers(self, index: int) -> list[Any]:
        """Values of an input.

        Raises:
            UnsupportedError: they are not known.
        """
        if not self.known(index) and self.device == "meta":
            raise UnsupportedError(f"{self.node.op} with an input {index} that is computed from values")
        values = self.numbers_of[self.node.input(index)] if self.known(index) else self.tensor(index)
        numbers: list[Any] = values.flatten().tolist()
        return numbers

    def operand(self, index: int) -> Tensor | float | int | bool:
        """An input; as a number where it is one that is known, and no weight."""
        name = self.node.input(index)
        if self.as_numbers and name in self.numbers_of and name not in self.learned:
            value = self.numbers_of[name]
            if value.numel() == 1:
                number: float | int | bool = value.item()
                return number
        return self.tensor(index)

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute."""
        value = self.node.attributes.get(name)
        return default if value is None else value

    def listed(self, index: int, name: str, default: Any = None) -> Any:
        """Whole numbers that newer versions of an operator take as an input, and older ones as an attribute."""
        return self.numbers(index) if self.given(index) else self.attribute(name, default)


def binary(function: Callable[[Any, Any], Tensor], left: Any, right: Any) -> Any:
    """A function of two operands, of which one may be a number."""
    if not isinstance(left, Tensor) and not isinstance(right, Tensor):
        return function(torch.tensor(left), torch.tensor(right)).item()
    if not isinstance(left, Tensor):
        if function is torch.sub:
            return torch.rsub(right, left)
        if function in (torch.add, torch.mul, torch.eq):
            return function(right, left)
        if function is not torch.pow:
            left = torch.full((), left, dtype=right.dtype, device=right.device)
    elif not isinstance(right, Tensor) and function in _ONLY_TENSORS:
        right = torch.full((), right, dtype=left.dtype, device=left.device)
    return function(left, right)
