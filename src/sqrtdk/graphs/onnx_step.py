"""One operation of an ONNX graph with what goes into it: tensors without values, or numbers where they are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
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
# Attributes that change no number here: hints on memory and precision, what training alone reads (a graph is read as it
# is used, not trained), how numbers get into float8 (which is not read), what the shapes of inputs or the count of
# outputs say as well, and what counts beside inputs or outputs that are refused.
IDLE = frozenset((
    "consumed_inputs", "past_present_share_buffer", "stash_type", "softmax_precision", "momentum", "is_test", "ratio",
    "seed", "saturate", "round_mode", "broadcast", "is_inner_broadcast", "kernel_shape", "num_outputs",
    "rotary_embedding_dim", "mask_index_type", "storage_order", "sorted", "q_norm_epsilon", "k_norm_epsilon",
    "qk_norm_epsilon",
))  # fmt: skip


def dtype_of(number: int) -> torch.dtype:
    """The dtype that ONNX gives a number; an `UnsupportedError` where torch has none for it here."""
    if number not in DTYPES:
        raise UnsupportedError(f"tensors of ONNX's type {number}")
    return DTYPES[number]


@dataclass(frozen=True, slots=True)
class Step:
    """An operation, and its inputs; what it is asked for that is not there is refused with an `UnsupportedError`."""

    node: Node  # of the graph
    graph: Graph  # that it is of
    inputs: tuple[Tensor | None, ...]  # tensors, in order; None for one that is left out
    numbers_of: Mapping[str, Tensor]  # values of the inputs that are constants of few elements, by name
    device: str  # on which its result is made: "meta", or "cpu" where it is computed from values
    learned: frozenset[str] | set[str]  # names of inputs that are weights
    as_numbers: bool = True  # a constant of one element is handed to torch as a number, which a trace reads
    read: set[int | str] = field(default_factory=set)  # the inputs and attributes that were looked at

    def optional(self, index: int) -> Tensor | None:
        """An input; None where it is left out."""
        self.read.add(index)
        return self.inputs[index] if index < len(self.inputs) else None

    def given(self, index: int) -> bool:
        """Whether an input is there."""
        return self.optional(index) is not None

    def tensor(self, index: int) -> Tensor:
        """An input that has to be there."""
        found = self.optional(index)
        if found is None:
            raise UnsupportedError(f"{self.node.op} without its input {index}")
        return found

    def tensors(self) -> list[Tensor]:
        """All inputs."""
        return [self.tensor(index) for index in range(len(self.inputs))]

    def known(self, index: int) -> bool:
        """Whether the values of an input are known."""
        return self.node.input(index) in self.numbers_of

    def numbers(self, index: int) -> list[Any]:
        """Values of an input, which have to be known."""
        self.read.add(index)
        if not self.known(index) and self.device == "meta":
            raise UnsupportedError(f"{self.node.op} with an input {index} that is computed from values")
        values = self.numbers_of[self.node.input(index)] if self.known(index) else self.tensor(index)
        numbers: list[Any] = values.flatten().tolist()
        return numbers

    def operand(self, index: int) -> Tensor | float | int | bool:
        """An input; as a number where it is one that is known, and no weight."""
        tensor, name = self.tensor(index), self.node.input(index)
        if self.as_numbers and name in self.numbers_of and name not in self.learned:
            value = self.numbers_of[name]
            if value.numel() == 1:
                number: float | int | bool = value.item()
                return number
        return tensor

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute."""
        self.read.add(name)
        value = self.node.attributes.get(name)
        return default if value is None else value

    def listed(self, index: int, name: str, default: Any = None) -> Any:
        """Whole numbers that newer versions of an operator take as an input, and older ones as an attribute."""
        return self.numbers(index) if self.given(index) else self.attribute(name, default)

    def unread(self) -> Iterator[str]:
        """What the operation was given and nobody looked at, but for attributes that change nothing."""
        from onnx import defs, helper

        node, opset, names = self.node, self.graph.opset, sorted({*self.node.attributes} - self.read - IDLE)
        schema = defs.get_schema(node.op, opset) if names and not node.domain and defs.has(node.op, opset) else None
        for name in names:
            value, nothing = node.attributes[name], [0, -1, 0.0, b"", b"NONE", []]  # as onnxruntime's own have it
            if schema is not None and name in schema.attributes:
                default = schema.attributes[name].default_value
                nothing = [helper.get_attribute_value(default)] if default.name else []
            plain = value.encode() if isinstance(value, str) else value
            if not any(type(plain) is type(one) and plain == one for one in nothing):
                yield f"{name} = {value[:40]}" if isinstance(value, str) else name
        yield from (f"its input {i}" for i, x in enumerate(self.inputs) if x is not None and i not in self.read)


def of_torch(function: Callable[..., Result], inputs: int = 1, **attributes: Any) -> Operation:
    """An operator that is a function of its first inputs and of some attributes, whose defaults are given."""

    def run(step: Step) -> Result:
        tensors = (step.tensor(0), *(step.optional(index) for index in range(1, inputs)))
        return function(*tensors, *(step.attribute(name, default) for name, default in attributes.items()))

    return run


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
