"""A function of one pair as the operations that it ran, which then run over many pairs at once by broadcasting.

    lambda score, b, h, q_idx, kv_idx: score * torch.sigmoid(score - slopes[h])
        sub(score, index(slopes, [h]));  sigmoid(...);  mul(score, ...)

`torch.vmap` gives the same numbers, but takes up to half a millisecond for a run of a few operations, whatever the
number of pairs. Operations kept here take microseconds, so that they can run over blocks that stay in the cache, and
over the few blocks of a mask that hide some of their pairs and show others.

Every operation must be elementwise or read a table by an index for each of its dimensions: then what it makes of
tensors that broadcast is what it makes of each pair. Whatever the function does beside that leaves it without a
program.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

if TYPE_CHECKING:
    from jaxtyping import Shaped

aten = torch.ops.aten
# Elementwise operations without torch's tag, and those that make a number for each pair.
_WITHOUT_GRADIENT = (aten.detach, aten.full_like, aten.zeros_like, aten.ones_like)
_ALSO_ELEMENTWISE = (aten.floor_divide, aten._to_copy, aten.alias, aten.clone, aten.masked_fill, *_WITHOUT_GRADIENT)


@dataclass(frozen=True, slots=True)
class Slot:
    """A value that is known only when a program runs, in the arguments of a step.

    Attributes:
        place: Its index among the function's arguments, followed by the results of the steps.
    """

    place: int


@dataclass(frozen=True, slots=True, eq=False)
class PairStep:
    """One operation.

    Attributes:
        function: the operation.
        args, kwargs: its arguments, with a `Slot` in place of what depends on the pair.
        dtype: of its result.
        read: the places of these slots.
        last: the places whose value no later step reads.
    """

    function: Callable[..., Tensor]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    dtype: torch.dtype
    read: frozenset[int]
    last: frozenset[int] = frozenset()

    def run(self, values: Sequence[Any], **options: Tensor) -> Tensor:
        """Return the result of the operation.

        Args:
            values: The function's arguments, followed by the results of the steps before.
            options: Further keyword arguments of the operation, such as `out`.
        """
        return self.function(*_filled(self.args, values), **_filled(self.kwargs, values), **options)


@dataclass(frozen=True, slots=True, eq=False)
class PairProgram:
    """The operations of a function of one pair of row and key, which also run on tensors of many pairs at once.

    Attributes:
        inputs: Number of arguments of the function.
        steps: The operations in order; the last one gives the function's result.
    """

    inputs: int
    steps: tuple[PairStep, ...]

    def __call__(self, *pair: Shaped[Tensor, "..."], out: Tensor | None = None) -> Shaped[Tensor, "..."]:
        """Return the function's results for pairs, whose arguments broadcast; the shape may lack dimensions on which
        nothing depends.

        Args:
            pair: the arguments.
            out: where the results go, of their shape and dtype, if the last operation can write there.
        """
        values: list[Any] = list(pair)
        for step in self.steps[:-1]:
            values.append(step.run(values))
            for place in step.last:
                values[place] = None
        last = self.steps[-1]
        if out is None or self.writing is None:
            return last.run(values)
        return replace(last, function=self.writing).run(values, out=out)

    @property
    def writing(self) -> Callable[..., Tensor] | None:
        """The variant of the last operation that writes its result into a tensor `out`; None if there is none."""
        function: Any = self.steps[-1].function
        name = function._overloadname  # mul.Tensor writes as mul.out, pow.Tensor_Scalar as pow.Tensor_Scalar_out
        found: Any = getattr(function.overloadpacket, f"{name}_out", None)
        return (
            getattr(function.overloadpacket, "out", None) if found is None and name in ("Tensor", "default") else found
        )


class PairRecording:
    """A recording of the torch operations that a function runs on tensors without dimensions.

    Attributes:
        learns: Whether gradients were enabled when it began.
        ran: For each operation: the operation, its positional and keyword arguments, and its result.
    """

    def __init__(self) -> None:
        self.learns = torch.is_grad_enabled()
        self.ran: list[tuple[Any, Any, Any, Any]] = []

    def add(self, function: Any, args: Any, kwargs: Any, found: Any) -> None:
        """Add an operation that has run.

        Args:
            function: The operation.
            args: Its positional arguments. The recording holds them, so that no other tensor gets the same `id`.
            kwargs: Its keyword arguments.
            found: Its result.
        """
        self.ran.append((function, args, kwargs, found))

    def program(self, pair: Sequence[Tensor], result: Tensor) -> PairProgram | None:
        """Return the recorded operations as a program; None if some of them can't run on many pairs at once.

        Args:
            pair: The tensors that the function was called with.
            result: The tensor that it returned.
        """
        with torch.no_grad(), _disable_current_modes():
            return self._program(pair, result)

    def _program(self, pair: Sequence[Tensor], result: Tensor) -> PairProgram | None:
        places = {id(tensor): place for place, tensor in enumerate(pair)}
        storages = {_storage(tensor) for tensor in pair}
        values = [tensor.detach().reshape(1, 1, 1, 1) for tensor in pair]
        steps: list[PairStep] = []
        for function, args, kwargs, found in self.ran:
            operands = list(operands_of((args, kwargs)))
            # x.data is another tensor over the numbers of x, made without an operation
            if any(id(operand) not in places and _storage(operand) in storages for operand in operands):
                return None
            if not any(id(operand) in places for operand in operands):
                continue  # the same for all pairs
            if not _maps_pairs(function, args, places) or not isinstance(found, Tensor) or found.ndim:
                return None
            if self.learns and _has_own_gradient(function, operands, found):
                return None
            step = _step(function, args, kwargs, places, values, found.dtype)
            if step is None:
                return None
            places[id(found)] = len(values)
            storages.add(_storage(found))
            values.append(step.run(values))
            steps.append(step)
        if places.get(id(result)) != len(values) - 1 or not steps:
            return None
        return PairProgram(len(pair), _with_last_reads(steps, len(pair)))


def _storage(tensor: Tensor) -> int:
    place: int = tensor.untyped_storage()._cdata
    return place


def operands_of(values: Any) -> list[Tensor]:
    """Return the tensors in a value, or in nested lists, tuples and dict values, in order."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = list(values.values())
    if isinstance(values, list | tuple):
        return [tensor for value in values for tensor in operands_of(value)]
    return []


def _maps_pairs(function: Any, args: Any, places: dict[int, int]) -> bool:
    """Return whether the operation makes of tensors that broadcast what it makes of each pair."""
    if function is aten.index.Tensor:
        table, indices = args
        whole = len(indices) == table.ndim and all(isinstance(index, Tensor) and not index.ndim for index in indices)
        return whole and id(table) not in places and all(index.dtype == torch.int64 for index in indices)
    return torch.Tag.pointwise in function.tags or function.overloadpacket in _ALSO_ELEMENTWISE


def _has_own_gradient(function: Any, operands: Sequence[Tensor], found: Tensor) -> bool:
    """Return whether autograd did not record the operation, as under no_grad or in a function with its own gradient."""
    if not found.is_floating_point() or function.overloadpacket in _WITHOUT_GRADIENT:
        return False
    return found.requires_grad is not any(operand.requires_grad for operand in operands)


def _step(
    function: Any, args: Any, kwargs: Any, places: dict[int, int], values: Sequence[Tensor], dtype: torch.dtype
) -> PairStep | None:
    """Return the operation as a step whose result has the dtype, or None."""
    read = frozenset(places[id(tensor)] for tensor in operands_of((args, kwargs)) if id(tensor) in places)
    # A captured number without dimensions is of less weight in the promotion of dtypes than a tensor with some, as all
    # pairs have here, so that one or the other gives the dtype of one pair.
    for widened in (False, True):

        def placed(tensor: Tensor, widened: bool = widened) -> Any:
            if id(tensor) in places:
                return Slot(places[id(tensor)])
            return _widened(tensor) if widened and not tensor.ndim else tensor

        step = PairStep(function, _mapped(args, placed), _mapped(kwargs, placed), dtype, read)
        try:
            found = step.run(values)
        except Exception:  # an operation that takes no dimensions: masked_fill with a value of the pair, for one
            continue
        if found.dtype == dtype and found.numel() == 1:
            return step
    return None


def _widened(number: Tensor) -> Tensor:
    with torch.set_grad_enabled(number.requires_grad):
        return number.reshape(1)


def _mapped(values: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, dict):
        return {name: _mapped(value, change) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)([_mapped(value, change) for value in values])
    return values


def _filled(values: Any, given: Sequence[Any]) -> Any:
    if isinstance(values, Slot):
        return given[values.place]
    if isinstance(values, dict):
        return {name: _filled(value, given) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)([_filled(value, given) for value in values])
    return values


def _with_last_reads(steps: Sequence[PairStep], inputs: int) -> tuple[PairStep, ...]:
    """Return the steps, each with the places that no later one reads."""
    later: set[int] = set()
    done = []
    for place, step in reversed(list(enumerate(steps, inputs))):
        own = step.read | {place} if place < inputs + len(steps) - 1 else step.read
        done.append(replace(step, last=frozenset(own - later)))
        later |= step.read
    return tuple(reversed(done))
