"""Operations of a walked jaxpr that hold something: a shape, bits, a branch, the body of a loop, a primitive of JAX.

Each is called as every operation is: with the dtypes of the run, and the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sqrtdk.frontends.jax.arrays import held_dtype, to_jax, to_torch
from sqrtdk.frontends.program import FlatProgram, RunDtypes


@dataclass(frozen=True, slots=True, eq=False)
class ShapedOperation:
    """An operation whose result is expanded to the shape that it has in JAX.

    torch may give a number where JAX has an array.

    Attributes:
        operation: Called with the dtypes of the run and the values; returns one tensor or number.
        shape: Shape of the result in JAX.
    """

    operation: Callable[..., Any]
    shape: tuple[int, ...]

    def __call__(self, numbers: RunDtypes, *values: Any) -> Tensor:
        """Run it."""
        made = _single(self.operation(numbers, *values))
        return made if made.shape == self.shape else made.expand(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class UnsignedOperation:
    """An operation on unsigned integers that are held in wider signed ones; the result is cut to their bits.

    Attributes:
        operation: Called with the dtypes of the run and the values; returns one tensor or number.
        most: Largest number of the unsigned dtype, with which the result is combined by a bitwise "and".
        shape: Shape of the result in JAX, to which it is expanded; None leaves it.
    """

    operation: Callable[..., Any]
    most: int
    shape: tuple[int, ...] | None

    def __call__(self, numbers: RunDtypes, *values: Any) -> Tensor:
        """Run it."""
        made = _single(self.operation(numbers, *values))
        made = made.to(torch.int64 if self.most > 2**16 else torch.int32) & self.most
        return made if self.shape is None or made.shape == self.shape else made.expand(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class JaxOperation:
    """An operation on whole numbers or random keys that JAX itself computes.

    For tensors on "meta" the results are empty tensors of the right shapes.

    Attributes:
        primitive: The JAX primitive.
        params: Its parameters.
        takes: Abstract values (shape and dtype) of its arguments.
        gives: Abstract values of its results.
    """

    primitive: Any
    params: Mapping[str, Any]
    takes: Sequence[Any]
    gives: Sequence[Any]

    def __call__(self, numbers: RunDtypes, *values: Any) -> Any:
        """Run it."""
        if any(isinstance(value, Tensor) and value.is_meta for value in values):
            made = [torch.empty(aval.shape, dtype=held_dtype(aval.dtype), device="meta") for aval in self.gives]
        else:
            arrays = [to_jax(value, aval) for value, aval in zip(values, self.takes, strict=True)]
            results = self.primitive.bind(*arrays, **self.params)
            made = list(map(to_torch, results if self.primitive.multiple_results else [results]))
        return made if len(made) > 1 else made[0]


@dataclass(frozen=True, slots=True, eq=False)
class BranchOperation:
    """A `cond` or `switch`: its first value is the index of the branch that runs on the other values.

    An index beyond the ends runs the nearest branch, as in JAX.

    Attributes:
        branches: The branches.
    """

    branches: Sequence[FlatProgram]

    def __call__(self, numbers: RunDtypes, which: Any, *values: Any) -> list[Any]:
        """Run it."""
        at = min(max(int(which), 0), len(self.branches) - 1)
        return _tensors(self.branches[at].inline(numbers, *values))


@dataclass(frozen=True, slots=True, eq=False)
class WhileOperation:
    """A `while_loop`: the values are constants of the test, constants of the body, and the first state, in this order.

    Attributes:
        test: Returns whether the loop goes on, from its constants and the state.
        body: Returns the next state, from its constants and the state.
        test_fixed: Number of constants of the test.
        body_fixed: Number of constants of the body.
    """

    test: FlatProgram
    body: FlatProgram
    test_fixed: int
    body_fixed: int

    def __call__(self, numbers: RunDtypes, *values: Any) -> list[Any]:
        """Run it."""
        first, second = self.test_fixed, self.test_fixed + self.body_fixed
        state = list(values[second:])
        while bool(self.test.inline(numbers, *values[:first], *state)[0]):
            state = self.body.inline(numbers, *values[first:second], *state)
        return _tensors(state)


@dataclass(frozen=True, slots=True, eq=False)
class ScanOperation:
    """A `scan` with many steps, which is run as a loop; the values are constants, the first state, and what is scanned.

    The results are the last state and, stacked along a new first axis, what each step gave.

    Attributes:
        body: One step, from constants, state and one row of each scanned value to the state and the step's results.
        fixed: Number of constants.
        carried: Number of values of the state.
        length: Number of steps.
        reverse: Whether the last row is scanned first.
        gives: Abstract values (shape and dtype) of the results.
    """

    body: FlatProgram
    fixed: int
    carried: int
    length: int
    reverse: bool
    gives: Sequence[Any]

    def __call__(self, numbers: RunDtypes, *values: Any) -> list[Any]:
        """Run it."""
        state, xs = list(values[self.fixed : self.fixed + self.carried]), values[self.fixed + self.carried :]
        rows: list[list[Any]] = [[]] * self.length
        for n in reversed(range(self.length)) if self.reverse else range(self.length):
            made = self.body.inline(numbers, *values[: self.fixed], *state, *(x[n] for x in xs))
            state, rows[n] = made[: self.carried], made[self.carried :]
        return _tensors([*state, *(stack_rows(numbers, *column) for column in zip(*rows, strict=True))])


def _single(made: Any) -> Tensor:
    """Return the result of an operation that gives one here: `sort` of one array gives a tuple."""
    result: Tensor = made[0] if isinstance(made, tuple | list) else made
    return result


def _tensors(values: Sequence[Any]) -> list[Any]:
    return [value if isinstance(value, Tensor) else torch.tensor(value) for value in values]


def stack_rows(numbers: RunDtypes, *rows: Any) -> Tensor:
    """Return tensors or numbers stacked along a new first axis.

    Args:
        numbers: The dtypes of the run, which every operation receives; not used.
        rows: Tensors of one shape, or numbers.
    """
    return torch.stack([row if isinstance(row, Tensor) else torch.tensor(row) for row in rows])


def take_row(n: int, numbers: RunDtypes, x: Tensor) -> Tensor:
    """Return `x[n]`, a row along the first axis.

    Args:
        n: Index of the row.
        numbers: The dtypes of the run, which every operation receives; not used.
        x: A tensor with one or more dimensions.
    """
    return x[n]
