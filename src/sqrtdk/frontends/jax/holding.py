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
    """An operation whose result has a shape that torch's may broadcast to: a number, where JAX has an array of one."""

    operation: Callable[..., Any]
    shape: tuple[int, ...]

    def __call__(self, numbers: RunDtypes, *values: Any) -> Tensor:
        """Run it."""
        made = _single(self.operation(numbers, *values))
        return made if made.shape == self.shape else made.expand(self.shape)


@dataclass(frozen=True, slots=True, eq=False)
class UnsignedOperation:
    """An operation on unsigned integers, whose result is cut to their bits."""

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
    """An operation on whole numbers or keys that JAX computes."""

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
    """A `cond` or `switch`, whose first value says which branch runs."""

    branches: Sequence[FlatProgram]

    def __call__(self, numbers: RunDtypes, which: Any, *values: Any) -> list[Any]:
        """Run it."""
        at = min(max(int(which), 0), len(self.branches) - 1)
        return _tensors(self.branches[at].inline(numbers, *values))


@dataclass(frozen=True, slots=True, eq=False)
class WhileOperation:
    """A `while`: constants of the test, constants of the body, and the state."""

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
    """A scan of very many steps, run turn by turn."""

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
    """Return rows along a new first axis; some may be numbers."""
    return torch.stack([row if isinstance(row, Tensor) else torch.tensor(row) for row in rows])


def take_row(n: int, numbers: RunDtypes, x: Tensor) -> Tensor:
    """Return a row along the first axis."""
    return x[n]
