"""The costs of a call: its time relative to another call, and its peak memory."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sqrtdk.extending import EagerMode
from sqrtdk_lab.figures import Figure, Place
from sqrtdk_lab.intervals import mean

Call = Callable[[], Any]
WARM_UP = 2  # timings that are discarded


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch compute on one thread, so that CPU time is the time of the call alone."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def time_ratio(name: str, call: Call, other: Call, *, blocks: int, calls: int, **at: Place) -> Figure:
    """Measure the time of a call over that of another: mean over blocks of the median of each, with Student's t
    interval.

    The calls alternate, and so does their order, so that a slow spell of the machine affects both. The clock is the CPU
    time of this thread, which excludes other programs. See `typical` for the blocks.

    Args:
        name: of the figure.
        call: the timed call.
        other: the call it is compared with.
        blocks: number of blocks, two or more.
        calls: pairs of calls per block, after a warm-up.
        at: where it was measured.

    Example:
        >>> call = lambda: sum(range(1000))
        >>> 0.1 < time_ratio("ratio", call, call, blocks=3, calls=3).value < 10.0
        True
    """
    turn = cycle((True, False))

    def ratio() -> float:
        if next(turn):
            others, own = _seconds(other), _seconds(call)
        else:
            own, others = _seconds(call), _seconds(other)
        return own / others

    return typical(name, ratio, blocks=blocks, calls=calls, **at)


def typical(name: str, timing: Callable[[], float], *, blocks: int, calls: int, **at: Place) -> Figure:
    """Measure the mean of the medians of blocks of timings, with Student's t interval.

    Consecutive timings share the machine's slow spells and are not independent samples. The medians of blocks nearly
    are, and a median ignores calls that were held up. The first timings, which fill caches, are discarded.

    Args:
        name: of the figure.
        timing: makes and times one call, on one thread and without gradients.
        blocks: number of blocks, two or more.
        calls: per block.
        at: where it was measured.

    Example:
        >>> print(typical("time", lambda: 2.0, blocks=3, calls=3))
        2 [2, 2]
    """
    with one_thread(), torch.no_grad():
        for _ in range(WARM_UP):
            timing()
        medians = [median(timing() for _ in range(calls)) for _ in range(blocks)]
    return mean(name, medians, **at)


def _seconds(call: Call) -> float:
    begin = time.thread_time()
    call()
    return time.thread_time() - begin


def peak_bytes(call: Call) -> int:
    """Return the most bytes alive at once in tensors made by the operations of a call; inputs are not counted.

    Memory that a kernel allocates and frees within one operation is not seen.

    Example:
        >>> x = torch.ones(256)
        >>> peak_bytes(lambda: x + x + x)
        2048
    """
    alive = _Alive()
    with alive, torch.no_grad():
        call()
    return alive.peak


class _Alive(EagerMode):
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
