"""Leaves a model, and what it holds, as it was before it ran.

A forward pass may count its calls in a buffer, fill a cache, update a codebook, run a backward of its own. Whoever asks
questions of a model runs it many times, and none of that may stay. The state is put back once, at the end: in between,
a model that counts goes on counting, so that what depends on the count shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk.errors import INTERRUPTS
from sqrtdk.messages import Message, joined
from sqrtdk.models.held import MOST_HELD, Held, find_held
from sqrtdk.models.tensor_state import MemoryCopies, TensorState, stored_bytes, tensor_state

_MOST_STAYED_NAMED = 4  # of the things that stayed changed


class Snapshot:
    """The state of a model and of its inputs at one moment.

    Example:
        >>> module = nn.BatchNorm1d(3)
        >>> before = Snapshot(module)
        >>> _ = module(torch.randn(4, 3))
        >>> before.moved()
        ['running_mean', 'running_var', 'num_batches_tracked']
        >>> before.restore()
        >>> before.stayed, int(module.num_batches_tracked)
        ((), 0)

    Attributes:
        stayed: Sentences on what could not be put back, after `restore`.
    """

    def __init__(
        self, module: nn.Module | None, inputs: Any = None, *, most_copied: int | None = None, weights: bool = True
    ) -> None:
        self.stayed: tuple[str, ...] = ()
        self._module = module
        self._notes: list[str] = []
        self._shards = _shards(module)
        self._tensors: list[tuple[str, TensorState]] = []
        with _quietly():
            found = find_held({} if module is None else {"": module, "inputs": inputs})
            self._held = found.held
            copies = MemoryCopies() if most_copied is None else MemoryCopies(most_copied)
            # Small tensors first, because the memory for copies is limited: a counter gets a copy to restore from, and
            # a large weight only a checksum.
            for path, tensor in sorted(found.tensors, key=lambda entry: stored_bytes(entry[1])):
                try:
                    read = weights or not isinstance(tensor, nn.Parameter)
                    self._tensors.append((path, tensor_state(tensor, copies if read else None)))
                except INTERRUPTS:
                    raise
                except Exception:  # a subclass may refuse any operation
                    self._notes.append(Message("premises.unchanged.not_read", path=path, kind=type(tensor).__name__))
        self._notes += [Message("premises.unchanged.not_read", path=path, kind=kind) for path, kind in found.unread]
        # Back in the order of the model, in which `stayed` names them.
        order = {id(tensor): place for place, (_, tensor) in enumerate(found.tensors)}
        self._tensors.sort(key=lambda entry: order[id(entry[1].tensor)])
        self._not_held: set[str] = set()
        with _quietly(), suppress(Exception):  # a module that can't run: whoever runs it says so
            self._not_held = {path for path, state in self._states().items() if state is None}
        if not found.complete:
            self._notes.append(Message("premises.unchanged.too_much", count=MOST_HELD))

    def moved(self) -> list[str]:
        """Return the paths of the buffers and parameters that hold other numbers than before, or are other tensors."""
        with _quietly():
            states = self._states()
            return [path for path, state in states.items() if state is None or _answer(state.has_moved, True)]

    def _states(self) -> dict[str, TensorState | None]:
        """Return what is known of each buffer and parameter by path; None for another tensor than before.

        A parameter that could not be held is left out: a scripted module makes another object of it each time.
        """
        module = nn.Module() if self._module is None else self._module
        known = {id(state.tensor): state for _, state in self._tensors}
        named = chain(module.named_buffers(), module.named_parameters())
        return {path: known.get(id(x)) for path, x in named if path not in self._not_held}

    def restore(self) -> None:
        """Restore the module's attributes, buffers and parameters.

        `stayed` then has the notes on what could not be restored.
        """
        stayed: list[str] = []
        with _quietly():
            # First the shards, so that what is compared below are FSDP's own parameters and not what a forward
            # gathered.
            _shard_again(self._module, self._shards)
            for held in self._held:
                if not _answer(partial(_put_back, held), False):
                    stayed.append(held.path)
            stayed += [path for path, state in self._tensors if not _answer(state.restore, False)]
        notes = list(self._notes)
        if places := list(dict.fromkeys(stayed)):
            which: str = joined(places[:_MOST_STAYED_NAMED], "comma")
            if (more := len(places) - _MOST_STAYED_NAMED) > 0:
                which = Message("premises.unchanged.and_more", names=which, count=more)
            notes.append(Message("premises.unchanged.stayed", which=which))
        self.stayed = tuple(notes)


def _shards(module: nn.Module | None) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """Return the parameters that `fully_shard` has cut into shards, with their module and name."""
    try:
        parts = [] if module is None else list(module.modules())
    except INTERRUPTS:
        raise
    except Exception:  # no module that can run: whoever runs it says so
        return []
    if not any(_is_fully_sharded(part) for part in parts):
        return []
    named = ((part, name, x) for part in parts for name, x in part._parameters.items())
    return [(part, name, x) for part, name, x in named if x is not None and hasattr(x, "placements")]


def _shard_again(module: nn.Module | None, shards: list[tuple[nn.Module, str, nn.Parameter]]) -> None:
    """Let FSDP itself register the shards again: it keeps account of them, and its root stays whole after a forward."""
    if module is not None and any(part._parameters.get(name) is not x for part, name, x in shards):
        for part in filter(_is_fully_sharded, module.modules()):
            part.reshard()  # type: ignore[operator]


def _is_fully_sharded(part: nn.Module) -> bool:
    return callable(getattr(type(part), "reshard", None)) and callable(getattr(type(part), "unshard", None))


def _answer(ask: Callable[[], bool], otherwise: bool) -> bool:
    """Return an answer, or another one if what is asked raises: a user's __eq__, a subclass that refuses operations."""
    try:
        return ask()
    except INTERRUPTS:
        raise
    except Exception:
        return otherwise


def _put_back(held: Held) -> bool:
    """Return whether a thing is as it was, once it has been put back."""
    if not held.differs():
        return True
    if held.restore is None:
        return False
    held.restore()
    # Asked again: a property or a __setattr__ may have ignored the value.
    return not held.differs()


@contextmanager
def _quietly() -> Iterator[None]:
    """Keep these operations from every mode, from gradients, and from functions of a subclass."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunctionSubclass())
        stack.enter_context(torch.no_grad())
        yield


@contextmanager
def unchanged(
    model: Any, inputs: Any = None, *, most_copied: int | None = None, weights: bool = True
) -> Iterator[Snapshot]:
    """Return a context after which a user's module and its inputs are as they were before.

    A model that sqrtdk built from a name needs no such care: it is dropped afterwards.

    Args:
        model: A module, or a name.
        inputs: Its inputs.
        most_copied: Bytes of tensors that are copied, small ones first; a tensor beyond them stays changed. None takes
            2 GiB.
        weights: Whether the numbers of parameters are read, which takes two passes over all of them.

    Yields:
        The state before the block; its `stayed` says after the block what could not be restored.
    """
    module = model if isinstance(model, nn.Module) else None
    before = Snapshot(module, inputs, most_copied=most_copied, weights=weights)
    try:
        yield before
    finally:
        before.restore()
