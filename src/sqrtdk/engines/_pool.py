"""The engine `pool`: processes of this machine by loky, which joblib brings.

loky notices a killed worker wherever it was, and ends workers with what they started. It gives up all cells then, so
those without a result are handed out anew here.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import torch

from sqrtdk import _extras
from sqrtdk.engines._engine import (
    CELLS_A_WORKER,
    RETRIES,
    Cell,
    Engine,
    Failure,
    Result,
    cell_label,
    compute,
    failed,
    failure,
)
from sqrtdk.errors import LabError

_Entry = tuple[int, Cell]
_Flying = dict["Future[Result | Failure]", _Entry]


class Pool:
    """The engine "pool": processes of this machine, which start with the first cell, at most one for each cell."""

    def __init__(self, workers: int, loky: Any) -> None:
        self.workers = workers
        self._loky = loky
        self._executor: Any = None

    def results(self, function: Callable[[Cell], Result], items: Iterable[Cell]) -> Iterator[tuple[int, Result]]:
        """Yield the index and the result of each cell as soon as it is ready, in any order.

        The cell of a process that was killed is given to a new process.

        Raises:
            LabError: A cell failed, or its process was killed again and again.
        """
        waiting = enumerate(items)
        again: deque[_Entry] = deque()
        deaths: Counter[int] = Counter()
        flying: _Flying[Result] = {}
        try:
            while True:
                self._fill(function, waiting, again, flying)
                if not flying:
                    return
                done, lost = self._ended(flying)
                broken = None
                for entry, outcome in done:
                    if isinstance(outcome, Failure):
                        broken = broken or failed(entry[1], outcome)
                    else:
                        yield entry[0], outcome
                if broken is not None:
                    raise broken
                for index, cell in lost:
                    deaths[index] += 1
                    if deaths[index] > RETRIES:
                        raise _died(cell, deaths[index])
                again.extend(lost)
        finally:
            if flying:
                _handed_over(flying)
                self.close(kill=True)

    def _fill(
        self,
        function: Callable[[Cell], Result],
        waiting: Iterator[_Entry],
        again: deque[_Entry],
        flying: _Flying[Result],
    ) -> None:
        """Submit cells until each worker has enough; start the processes if they don't run.

        Args:
            function: Computes a cell.
            waiting: Cells that were not submitted yet.
            again: Cells of processes that were killed; they come first.
            flying: Cells in progress, to which the submitted ones are added.
        """
        while len(flying) < CELLS_A_WORKER * self.workers:
            entry = again.popleft() if again else next(waiting, None)
            if entry is None:
                return
            # created before _interrupts_held: it starts Python's resource tracker, which unblocks Ctrl-C
            if self._executor is None:
                # loky's own way to start a process would not tell it when its parent ends
                context = multiprocessing.get_context("spawn")
                self._executor = self._loky.ProcessPoolExecutor(self.workers, context=context, initializer=_begin)
            with _interrupts_held():
                try:
                    flying[self._executor.submit(compute, function, entry[1])] = entry
                except BrokenProcessPool:  # the pool broke after the last check
                    again.appendleft(entry)
                    if flying:
                        return
                    self.close(kill=True)

    def _ended(self, flying: _Flying[Result]) -> tuple[list[tuple[_Entry, Result | Failure]], list[_Entry]]:
        """Remove the finished cells from `flying`; return their outcomes, and the cells that a broken pool lost."""
        ended = wait(flying, return_when=FIRST_COMPLETED).done
        if any(isinstance(future.exception(), BrokenProcessPool) for future in ended):
            ended = wait(flying).done  # a broken pool ends all cells
            self.close(kill=True)
        done: list[tuple[_Entry, Result | Failure]] = []
        lost: list[_Entry] = []
        for future in ended:
            entry, error = flying.pop(future), future.exception()
            if isinstance(error, BrokenProcessPool):
                lost.append(entry)
            elif error is not None:  # the cell or its result can't be pickled
                done.append((entry, failure(error)))
            else:
                done.append((entry, future.result()))
        return done, lost

    def close(self, kill: bool = False) -> None:
        """End the processes.

        Args:
            kill: Whether to end them at once, rather than after the cells that they compute.
        """
        executor, self._executor = self._executor, None
        if executor is not None:
            executor.shutdown(wait=True, kill_workers=kill)


def _handed_over(flying: Iterable[Future[Any]]) -> None:
    """Wait until loky's thread has put every cell into the workers' queue, at most ten seconds.

    It has room for all of them. Ended before, that thread looks for cells which its end has dropped, and dies of it.
    """
    until = time.monotonic() + 10
    while time.monotonic() < until and not all(future.running() or future.done() for future in flying):
        time.sleep(0.001)


def _died(cell: Cell, times: int) -> LabError:
    return LabError(
        f"the worker process ended {times} times while the cell {cell_label(cell)} was handed out",
        hint="Memory may be short: take fewer workers. A script that opens a pool needs `if __name__ == '__main__':`.",
    )


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block Ctrl-C, so that processes started inside never receive it, not even in imports; this one ends them."""
    if sys.platform == "win32":
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    """Start a worker process: it leaves Ctrl-C to its parent, and ends with the parent even if that is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        # sys.exit would end only this thread, and an orphan must not continue to compute.
        parent.join()
        os._exit(1)


def pool(workers: int | None = None, address: str | None = None) -> contextlib.AbstractContextManager[Engine]:
    """Return an engine of processes of this machine: by default one for each CPU that this process may use.

    Raises:
        MissingExtraError: at once, if joblib is not installed.
    """
    return _opened(Pool(workers or cpus(), _extras.load_extra("joblib.externals.loky", extra="watch")))


@contextlib.contextmanager
def _opened(engine: Pool) -> Iterator[Engine]:
    try:
        yield engine
    except BaseException:
        engine.close(kill=True)
        raise
    engine.close()


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
