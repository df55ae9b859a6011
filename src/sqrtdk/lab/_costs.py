"""What a call costs: its time beside that of another call, and the memory that it holds at its peak."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sqrtdk.lab.figures import Figure, Place
from sqrtdk.lab.intervals import bootstrap

Call = Callable[[], Any]


@contextmanager
def one_thread() -> Iterator[None]:
    """Torch computes on one thread, so that CPU time is what the call takes and no more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def time_ratio(name: str, call: Call, other: Call, *, pairs: int, seed: int, **at: Place) -> Figure:
    """Median of the time of a call over that of another, with a bootstrap interval.

    The calls take turns, and which goes first alternates, so that a slow spell of the machine meets both. The clock is
    the CPU time of this thread: what other programs do in between is not counted.

    Args:
        name: of the figure.
        call: what is timed.
        other: what it is compared with.
        pairs: of calls, after two to warm up.
        seed: of the bootstrap.
        at: where it was measured.

    Example:
        >>> call = lambda: sum(range(1000))
        >>> 0.1 < time_ratio("ratio", call, call, pairs=9, seed=0).value < 10.0
        True
    """
    ratios = []
    with one_thread(), torch.no_grad():
        for index in range(-2, pairs):
            if index % 2:
                own, others = _seconds(call), _seconds(other)
            else:
                others, own = _seconds(other), _seconds(call)
            if index >= 0:
                ratios.append(own / others)
    return bootstrap(name, ratios, np.median, seed=seed, **at)


def _seconds(call: Call) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def peak_bytes(call: Call) -> int:
    """Most bytes alive at once in the tensors that the operations of a call made; inputs are not counted.

    What a kernel takes inside an operation and gives back before it ends is not seen.

    Example:
        >>> x = torch.ones(256)
        >>> peak_bytes(lambda: x + x + x)
        2048
    """
    alive = _Alive()
    with alive, torch.no_grad():
        call()
    return alive.peak


class _Alive(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until each is freed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = {id(storage) for storage in _storages((args, kwargs))}
        result = func(*args, **kwargs)
        for storage in _storages(result):
            if id(storage) not in given and id(storage) not in self._known:
                self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def freed(_: Any) -> None:
            self.bytes -= size
            del self._known[key]

        self._known[key] = weakref.ref(storage, freed)
        self.bytes += size
        self.peak = max(self.peak, self.bytes)


def _storages(tree: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]
