"""The calls of modules in a run, and where two runs first part.

A module that runs inside another one ends first. So the first call, in the order of ending, whose outputs differ
although its inputs agree is that of the innermost module to blame:

    block(x)           its outputs differ, but it ends after its parts
      attn(norm(x))    its inputs agree and its outputs differ: the first place
      mlp(norm(x))     its inputs differ already
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import nn

CallPlace = tuple[str, int]  # path of a module, and how many of its calls had ended before
# They return what replaces the arguments (args, kwargs), or the output; None leaves it.
Begins = Callable[[CallPlace, tuple[Any, ...], dict[str, Any]], Any]
Ends = Callable[[CallPlace, tuple[Any, ...], dict[str, Any], Any], Any]

Noted = TypeVar("Noted")
Call = TypeVar("Call")


@contextmanager
def hooked(modules: Mapping[str, nn.Module], begins: Begins | None = None, ends: Ends | None = None) -> Iterator[None]:
    """Call `begins` and `ends` around every call of the modules during the `with` block.

    Args:
        modules: the modules by path. TorchScript modules take no hooks and are left out.
        begins: called as `begins(place, args, kwargs)` before the forward pass; what it returns is passed on to
            PyTorch's forward pre-hook.
        ends: called as `ends(place, args, kwargs, output)` after it, unless the call raises. It returns None, or an
            output to put in place of the module's.

    A place is (path, number of calls of this module that have ended).
    """
    ended: Counter[str] = Counter()

    def before(path: str, begins: Begins) -> Callable[..., Any]:
        return lambda _, args, kwargs: begins((path, ended[path]), args, kwargs)

    def after(path: str) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            place = path, ended[path]
            ended[path] += 1
            return None if ends is None else ends(place, args, kwargs, output)

        return hook

    handles = []
    try:
        for path, module in modules.items():
            if not isinstance(module, torch.jit.ScriptModule):
                if begins is not None:
                    handles.append(module.register_forward_pre_hook(before(path, begins), with_kwargs=True))
                handles.append(module.register_forward_hook(after(path), with_kwargs=True))
        yield
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class EndedCall(Generic[Noted]):
    """The order of a call that ended.

    Attributes:
        number: serial number, in the order in which calls begin.
        parent: serial number of the enclosing call; -1 for the outermost.
        earlier: how many calls had ended when it began.
        noted: what was noted when it began.
    """

    number: int
    parent: int
    earlier: int
    noted: Noted


class OpenCalls(Generic[Noted]):
    """The calls that have begun and not ended, in one run; a module is known by its path or by its id.

    `begins` takes a value to note, such as the inputs, which `ends` gives back.
    """

    def __init__(self) -> None:
        self._open: list[tuple[str | int, int, int, Noted]] = []
        self._begun = self._ended = 0

    def begins(self, module: str | int, noted: Noted) -> None:
        """Record that a call of a module begins, inside the calls that are open.

        Args:
            module: path or id of the module.
            noted: any value, returned by `ends` as `EndedCall.noted`.
        """
        self._open.append((module, self._begun, self._ended, noted))
        self._begun += 1

    def ends(self, module: str | int) -> EndedCall[Noted] | None:
        """Record that the innermost open call of a module ends, and return its order; None if none is open.

        Calls inside it that are still open have raised, as in `try: self.fast(x)`, and are dropped.
        """
        while self._open:
            one, number, earlier, noted = self._open.pop()
            if one == module:
                self._ended += 1
                return EndedCall(number, self._open[-1][1] if self._open else -1, earlier, noted)
        return None


def first_apart(calls: Iterable[Call], agree: Callable[[Call], bool], differ: Callable[[Call], bool]) -> Call | None:
    """Return the first call of two runs whose inputs agree and whose outputs differ; None if there is none.

    Args:
        calls: what is known of a call in both runs, in the order of ending.
        agree: whether the inputs agree.
        differ: whether the outputs differ.
    """
    return next((call for call in calls if differ(call) and agree(call)), None)
