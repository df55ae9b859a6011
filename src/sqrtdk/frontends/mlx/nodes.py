"""One primitive of an MLX graph, as `mx.export_function` gives it to its callback, and how operations are written.

Every operation is a function of the dtypes of the run, the node, and the values: tensors, or Python numbers where the
graph has a scalar constant. The walk converts the result to the dtype that the node names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.frontends.arrays import DTYPES_OF_BOTH, LARGEST_UNSIGNED
from sqrtdk.frontends.mlx.arrays import dtype_name
from sqrtdk.frontends.program import RunDtypes


@dataclass(frozen=True, slots=True)
class Aval:
    """Shape and dtype of an array.

    Attributes:
        ref: its name in the graph.
        shape: its shape.
        dtype: name of its dtype in MLX.
    """

    ref: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def held(self) -> torch.dtype:
        """Dtype of the tensors that stand for it."""
        return DTYPES_OF_BOTH[self.dtype]


@dataclass(frozen=True, slots=True)
class Primitive:
    """One primitive.

    Attributes:
        name: its name, as "Matmul".
        args: what it holds beside arrays, in the order of MLX.
        takes: what it reads.
        gives: what it makes.
    """

    name: str
    args: tuple[Any, ...]
    takes: tuple[Aval, ...]
    gives: tuple[Aval, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of its first result."""
        return self.gives[0].shape


Operation = Callable[..., Any]


def primitive_of(record: Any) -> Primitive:
    """Return a node from a record of the callback."""
    takes, gives = (
        tuple(Aval(ref, tuple(shape), dtype_name(dtype)) for ref, shape, dtype in record[side])
        for side in ("inputs", "outputs")
    )
    return Primitive(record["name"], tuple(record.get("arguments") or ()), takes, gives)


def on_one(function: Callable[[Tensor], Any]) -> Operation:
    """Return an operation on one tensor."""
    return lambda numbers, node, x: function(x)


def on_two(function: Callable[[Any, Any], Any]) -> Operation:
    """Return an operation on two values, of which one may be a number."""
    return lambda numbers, node, a, b: function(a, b)


@dataclass(frozen=True, slots=True, eq=False)
class PrimitiveOperation:
    """An operation bound to its node: called with the dtypes of the run and the values.

    Results of unsigned dtypes that are held in wider ones are cut to their bits.

    Attributes:
        operation: The operation.
        node: The node.
    """

    operation: Operation
    node: Primitive

    def __call__(self, numbers: RunDtypes, *values: Any) -> Any:
        """Run it."""
        made = self.operation(numbers, self.node, *values)
        if len(self.node.gives) > 1:
            return [self._result(each, aval) for each, aval in zip(made, self.node.gives, strict=True)]
        return self._result(made, self.node.gives[0])

    def _result(self, made: Any, aval: Aval) -> Tensor:
        made = made if isinstance(made, Tensor) else torch.tensor(made)
        if (most := LARGEST_UNSIGNED.get(aval.dtype)) is not None:
            made = made.to(torch.int64 if most > 2**16 else torch.int32) & most
        whole: Tensor = made if tuple(made.shape) == aval.shape else made.expand(aval.shape)
        return whole
