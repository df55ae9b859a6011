"""One operation of an ONNX graph with its inputs: tensors, and their values where those are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sqrtdk.errors import UnsupportedError
from sqrtdk.graphs.graph import Graph, GraphNode

Result = Tensor | tuple[Tensor, ...]
Operation = Callable[["OnnxStep"], Result]
ONNX_DTYPES = {
    1: torch.float32, 2: torch.uint8, 3: torch.int8, 5: torch.int16, 6: torch.int32, 7: torch.int64, 9: torch.bool,
    10: torch.float16, 11: torch.float64, 16: torch.bfloat16,
}  # fmt: skip
_ONLY_TENSORS = (torch.maximum, torch.minimum, torch.logical_and, torch.logical_or, torch.logical_xor, torch.remainder,
                 torch.fmod)  # fmt: skip
# Attributes that change no result here: hints on memory and precision, settings of training (a graph is read for
# inference), the conversion to float8 (not supported), facts that also follow from the shapes of inputs or the number
# of outputs, and settings of inputs or outputs that are refused anyway.
IDLE_ATTRIBUTES = frozenset((
    "consumed_inputs", "past_present_share_buffer", "stash_type", "softmax_precision", "momentum", "is_test", "ratio",
    "seed", "saturate", "round_mode", "broadcast", "is_inner_broadcast", "kernel_shape", "num_outputs",
    "rotary_embedding_dim", "mask_index_type", "storage_order", "sorted", "q_norm_epsilon", "k_norm_epsilon",
    "qk_norm_epsilon",
))  # fmt: skip


def torch_dtype(number: int) -> torch.dtype:
    """Return the torch dtype for ONNX's number of a dtype.

    Raises:
        UnsupportedError: torch has no such dtype.

    Example:
        >>> torch_dtype(1)
        torch.float32
    """
    if number not in ONNX_DTYPES:
        raise UnsupportedError(f"tensors of ONNX's type {number}")
    return ONNX_DTYPES[number]


@dataclass(frozen=True, slots=True)
class OnnxStep:
    """One node of an ONNX graph together with the tensors of its inputs, as the function that computes it sees them.

    It records which inputs and attributes were read, so that one that was ignored is noticed (`unread`).
    """

    node: GraphNode
    graph: Graph  # graph of the node
    inputs: tuple[Tensor | None, ...]  # in order; None for an omitted input
    numbers_of: Mapping[str, Tensor]  # values of small constants, by name
    device: str  # device of the result: "meta", or "cpu" if it is computed from values
    learned: frozenset[str] | set[str]  # names of inputs that are weights
    as_numbers: bool = True  # pass constants of one element to torch as Python numbers, which a trace reads
    read: set[int | str] = field(default_factory=set)  # inputs (by index) and attributes (by name) read so far

    def optional(self, index: int) -> Tensor | None:
        """Return an input by its index; None if it is omitted."""
        self.read.add(index)
        return self.inputs[index] if index < len(self.inputs) else None

    def given(self, index: int) -> bool:
        """Return whether an input is present."""
        return self.optional(index) is not None

    def tensor(self, index: int) -> Tensor:
        """Return an input by its index.

        Raises:
            UnsupportedError: It is omitted.
        """
        found = self.optional(index)
        if found is None:
            raise UnsupportedError(f"{self.node.op} without its input {index}")
        return found

    def tensors(self) -> list[Tensor]:
        """Return all inputs.

        Raises:
            UnsupportedError: One is omitted.
        """
        return [self.tensor(index) for index in range(len(self.inputs))]

    def known(self, index: int) -> bool:
        """Return whether the values of an input are known without running the graph, as those of a constant are."""
        return self.node.input(index) in self.numbers_of

    def numbers(self, index: int) -> list[Any]:
        """Return the values of an input as a list of Python numbers.

        Raises:
            UnsupportedError: They are computed from other values, and the walk is on the device "meta".
        """
        self.read.add(index)
        if not self.known(index) and self.device == "meta":
            raise UnsupportedError(f"{self.node.op} with an input {index} that is computed from values")
        values = self.numbers_of[self.node.input(index)] if self.known(index) else self.tensor(index)
        numbers: list[Any] = values.flatten().tolist()
        return numbers

    def operand(self, index: int) -> Tensor | float | int | bool:
        """Return an input, as a Python number if it is a constant of one element and not a weight.

        A number such as the scale 0.125 is then recorded as a number by the trace.
        """
        tensor, name = self.tensor(index), self.node.input(index)
        if self.as_numbers and name in self.numbers_of and name not in self.learned:
            value = self.numbers_of[name]
            if value.numel() == 1:
                number: float | int | bool = value.item()
                return number
        return tensor

    def attribute(self, name: str, default: Any) -> Any:
        """Return an attribute of the node; `default` if it is absent."""
        self.read.add(name)
        value = self.node.attributes.get(name)
        return default if value is None else value

    def listed(self, index: int, name: str, default: Any = None) -> Any:
        """Return integers that newer versions of an operator take as an input, and older ones as an attribute.

        Args:
            index: Index of the input.
            name: Name of the attribute.
            default: Returned if there is neither.
        """
        return self.numbers(index) if self.given(index) else self.attribute(name, default)

    def unread(self) -> Iterator[str]:
        """Yield the inputs and attributes that were not read although they may change the result."""
        from onnx import defs, helper

        node, opset, names = self.node, self.graph.opset, sorted({*self.node.attributes} - self.read - IDLE_ATTRIBUTES)
        schema = defs.get_schema(node.op, opset) if names and not node.domain and defs.has(node.op, opset) else None
        for name in names:
            # An attribute with its default value changes nothing.
            value, nothing = node.attributes[name], [0, -1, 0.0, b"", b"NONE", []]  # defaults of onnxruntime's own
            if schema is not None and name in schema.attributes:
                default = schema.attributes[name].default_value
                nothing = [helper.get_attribute_value(default)] if default.name else []
            plain = value.encode() if isinstance(value, str) else value
            if not any(type(plain) is type(one) and plain == one for one in nothing):
                yield f"{name} = {value[:40]}" if isinstance(value, str) else name
        yield from (f"its input {i}" for i, x in enumerate(self.inputs) if x is not None and i not in self.read)


def of_torch(function: Callable[..., Result], inputs: int = 1, **attributes: Any) -> Operation:
    """Return an operation that calls a torch function with the inputs and attributes of a node.

    Args:
        function: Called with the first `inputs` of the node, then the attributes, all by position.
        inputs: Number of inputs to pass. The first must be present, the others are None if omitted.
        **attributes: Names of attributes in the order of the function's parameters, with their defaults.
    """

    def run(step: OnnxStep) -> Result:
        tensors = (step.tensor(0), *(step.optional(index) for index in range(1, inputs)))
        return function(*tensors, *(step.attribute(name, default) for name, default in attributes.items()))

    return run


def binary(function: Callable[[Any, Any], Tensor], left: Any, right: Any) -> Any:
    """Return the function of two operands, of which one or both may be Python numbers.

    torch's functions take a number only on the right, so `1 - x` becomes `rsub(x, 1)`.

    Example:
        >>> binary(torch.sub, 1, torch.tensor([3.0])), binary(torch.sub, 1, 3)
        (tensor([-2.]), -2)
    """
    if not isinstance(left, Tensor) and not isinstance(right, Tensor):
        return function(torch.tensor(left), torch.tensor(right)).item()
    if not isinstance(left, Tensor):
        # 1 - x as rsub(x, 1), 2 * x as mul(x, 2): torch's functions take a number only on the right.
        if function is torch.sub:
            return torch.rsub(right, left)
        if function in (torch.add, torch.mul, torch.eq):
            return function(right, left)
        if function is not torch.pow:
            left = torch.full((), left, dtype=right.dtype, device=right.device)
    elif not isinstance(right, Tensor) and function in _ONLY_TENSORS:
        right = torch.full((), right, dtype=left.dtype, device=left.device)
    return function(left, right)
