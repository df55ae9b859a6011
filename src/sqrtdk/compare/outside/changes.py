"""Differences of a module and its partner outside attention: what they hold, their classes.

A difference is only a suspicion. It is proven if A's model with B's part gives B's output
(`sqrtdk.compare.outside.chain`). The rows that find it are `MODULE_CAUSE_ROWS` in `sqrtdk.compare.causes`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import get_args

from torch import nn

from sqrtdk.compare.causes import named_differences
from sqrtdk.compare.causes.parameters import differing_tensors
from sqrtdk.compare.causes.settings import differing_values
from sqrtdk.compare.outside.modules import KeptTensor
from sqrtdk.compare.outside.parts import LAYER_NUMBER, ModulePair, NamedDifference, NumberPair, OfCheckpoint, ShapePair
from sqrtdk.messages import Message

_MOST_CHANGES_NAMED = 3  # parts of one module that are named


@dataclass(frozen=True, slots=True, eq=False)
class ModuleChange:
    """Parts of B's module that are put into A's together.

    Attributes:
        parts: what A and B have, at least one.
        written: one of them stands in the code or a config, so it is more than a weight.
    """

    parts: tuple[NamedDifference, ...]
    written: bool

    @property
    def text(self) -> str:
        """Return what A and B have, as half a sentence: "`eps` is 1e-05 in A, 0.01 in B"."""
        texts = [part.text for part in self.parts]
        return reduce(lambda first, second: Message("outputs.module.also", first=first, second=second), texts)

    @property
    def of_checkpoint(self) -> OfCheckpoint | None:
        """Return what two whole checkpoints differ by: "other numbers", "rounded" or "not rounded"; None if neither."""
        kinds = [part.row.of_checkpoint for part in self.parts]
        return next((kind for kind in get_args(OfCheckpoint) if kind in kinds), None)

    @property
    def likeness(self) -> str:
        """Return a key that is equal for modules of other layers that change alike.

        It is `of_checkpoint`, or else the text with "#" for the numbers of layers.
        """
        return self.of_checkpoint or LAYER_NUMBER.sub("#", self.text)

    def edit(self, model: nn.Module, path: str) -> None:
        """Put B's parts into the module at a path of a copy of A, in place."""
        for part in self.parts:
            if part.found.edit is not None:
                part.found.edit(model, path)


def changes_of(both: ModulePair) -> Iterator[ModuleChange]:
    """Yield what two modules differ by, most specific first: tensors and values that they hold, then their classes.

    Example:
        >>> a, b = nn.LayerNorm(4), nn.LayerNorm(4, eps=0.01)
        >>> [(change.parts[0].row.name, change.text) for change in changes_of(ModulePair(a, b))]
        [('norm_eps', '`eps` is 1e-05 in A, 0.01 in B')]
    """
    tensors, values = _of_tensors(both), _of_values(both)
    # one alone may be the cause
    sets = [[*tensors, value] for value in values] if 1 < len(values) <= _MOST_CHANGES_NAMED else []
    for parts in (*sets, [*tensors, *values]):
        if 0 < len(parts) <= _MOST_CHANGES_NAMED:
            yield ModuleChange(tuple(parts), bool(values))
    for found in named_differences("module", both, both.kind):
        yield ModuleChange((found,), True)


def difference_of_numbers(
    numbers: tuple[KeptTensor, KeptTensor], known: Sequence[tuple[str, KeptTensor]]
) -> NamedDifference | None:
    """Return how B's numbers relate to A's, such as by a factor or an added tensor; None if by nothing simple.

    Args:
        numbers: the tensor of A and of B. If only some of their entries were kept, only the shapes are compared.
        known: tensors that both sides have, by what they are; they may be what one side adds.
    """
    shapes = ShapePair(*(kept.shape for kept in numbers))
    if (found := next(named_differences("shape", shapes), None)) is not None:
        return found
    if any(kept.stride != 1 or not kept.values.is_floating_point() for kept in numbers):
        return None
    a, b = (kept.values.double() for kept in numbers)
    before = [(name, kept.values.double()) for name, kept in known if kept.shape == numbers[0].shape]
    return next(named_differences("numbers", NumberPair(a, b, before)), None)


def is_alike(a: nn.Module, b: nn.Module, but: Collection[str] = ()) -> bool:
    """Return whether two modules hold the same parameters, buffers, numbers, texts and functions, up to rounding.

    Args:
        a: a module; its submodules are not compared.
        b: a module.
        but: names of parameters and buffers that are not compared.
    """
    both = ModulePair(a, b)
    return next(differing_values(both), None) is None and next(differing_tensors(both, but), None) is None


def _of_tensors(both: ModulePair) -> Sequence[NamedDifference]:
    found = (next(named_differences("tensor", part, both.kind), None) for part in differing_tensors(both))
    return [one for one in found if one is not None]


def _of_values(both: ModulePair) -> Sequence[NamedDifference]:
    found = (next(named_differences("value", part, both.kind), None) for part in differing_values(both))
    return [one for one in found if one is not None]
