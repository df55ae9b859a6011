"""The engine `pool`: new (spawned) processes of this machine, because torch's threads do not survive a fork."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool

import torch

from sqrtdk.engines._engine import AHEAD, RETRIES, Cell, Engine, Failure, Result, compute, failed, failure, named
from sqrtdk.errors import LabError

_Entry = tuple[int, Cell]
_Flying = dict["Future[Result | Failure]", _Entry]


class Pool:
    """The engine `pool`; its processes start with the first cell, as many as there is work for."""

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self._executor: ProcessPoolExecutor | None = None

    def results(self, function: Callable[[Cell], Result], items: Iterable[Cell]) -> Iterator[tuple[int, Result]]:
        """Yield each result when it is ready; cells of killed processes are given to new processes."""
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
                self.close(kill=True)

    def _fill(
        self,
        function: Callable[[Cell], Result],
        waiting: Iterator[_Entry],
        again: deque[_Entry],
        flying: _Flying[Result],
    ) -> None:
        while len(flying) < AHEAD * self.workers:
            entry = again.popleft() if again else next(waiting, None)
            if entry is None:
                return
            # created before _interrupts_held: it starts Python's resource tracker, which unblocks Ctrl-C
            if self._executor is None:
                context = multiprocessing.get_context("spawn")
                self._executor = ProcessPoolExecutor(self.workers, context, _begin)
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
        """End the processes; with `kill`, without waiting for the cells in progress."""
        executor, self._executor = self._executor, None
        if executor is None:
            return
        if kill:
            # the executor's own kill_workers() needs Python 3.14
            for process in list((executor._processes or {}).values()):
                process.kill()
        executor.shutdown(wait=True, cancel_futures=True)


def _died(cell: Cell, times: int) -> LabError:
    return LabError(
        f"the worker process ended {times} times while the cell {named(cell)} was handed out",
        hint="Memory may be short: take fewer workers. A script that opens a pool needs `if __name__ == '__main__':`.",
    )


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block Ctrl-C, so that processes started inside never receive it, not even in imports; this one ends them."""
    if not hasattr(signal, "pthread_sigmask"):
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


@contextlib.contextmanager
def pool(workers: int | None = None, address: str | None = None) -> Iterator[Engine]:
    """Yield an engine of processes of this machine: by default one for each CPU that this process may use."""
    engine = Pool(workers or cpus())
    try:
        yield engine
    except BaseException:
        engine.close(kill=True)
        raise
    engine.close()


def cpus() -> int:
    """Return the number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
