"""The engine `local`: this process, one cell after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

import torch

from sqrtdk.engines._engine import Cell, Engine, Result, failed, failure
from sqrtdk.errors import INTERRUPTS, InvalidValueError


class Local:
    """See the module."""

    workers = 1

    def results(self, function: Callable[[Cell], Result], items: Iterable[Cell]) -> Iterator[tuple[int, Result]]:
        """In the order of the items."""
        for index, cell in enumerate(items):
            yield index, self._result(function, cell)

    def _result(self, function: Callable[[Cell], Result], cell: Cell) -> Result:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the other engines
        try:
            return function(cell)
        except INTERRUPTS:
            raise
        except BaseException as error:
            raise failed(cell, failure(error)) from error
        finally:
            torch.set_num_threads(threads)


def local(workers: int | None = None, address: str | None = None) -> AbstractContextManager[Engine]:
    """This process.

    Raises:
        InvalidValueError: at once: more than one worker.
    """
    if workers not in (None, 1):
        raise InvalidValueError(
            f"the engine 'local' is this process alone; got {workers} workers", hint="Take the engine 'pool'."
        )
    return nullcontext(Local())
