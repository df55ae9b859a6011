"""The interface of an engine, the parts that all engines share (computing a cell, naming a failed one), and `local`."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from sqrtdk.errors import INTERRUPTS, InvalidValueError, LabError, SqrtdkError, add_note, kind_and_text, said_by
from sqrtdk.messages import Message

Cell = Mapping[str, Any]
Result = TypeVar("Result")

RETRIES = 3  # attempts to repeat a cell whose worker process ended while it computed
CELLS_A_WORKER = 2  # cells handed to each worker: one that it computes, and one that waits for it
_LONGEST_NAME = 300


class Engine(Protocol):
    """The interface of an engine, which computes cells: the runs of a sweep, or the checkpoints of a run."""

    @property
    def workers(self) -> int:
        """Number of cells that are computed at once."""

    def results(self, function: Callable[[Cell], Result], items: Iterable[Cell]) -> Iterator[tuple[int, Result]]:
        """Yield (index of the item, result) as each ends, in no particular order.

        Args:
            function: function of a module, so that other processes can import it; its result depends only on its
                argument.
            items: picklable mappings; read as workers become free, so that there may be millions.

        Raises:
            LabError: the function raised, or the worker processes of a cell ended repeatedly; the message names the
                cell.
        """


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a cell as text; the exception itself may not survive pickling between processes.

    Attributes:
        message: its class and text.
        hint: of an error of sqrtdk.
        trace: its traceback.
    """

    message: str
    hint: str = ""
    trace: str = ""


def compute(function: Callable[[Cell], Result], cell: Cell) -> Result | Failure:
    """Return the result of a function for a cell, or the exception as a `Failure`; this runs in a worker process.

    It runs on one thread, so that sums are added in the same order on every machine.
    """
    torch.set_num_threads(1)
    try:
        return function(cell)
    except INTERRUPTS:
        raise
    except BaseException as error:  # a SystemExit must not end the worker
        return failure(error, "".join(traceback.format_exception(error)))


def failure(error: BaseException, trace: str = "") -> Failure:
    """Return an exception as text.

    Args:
        error: The exception.
        trace: Its traceback as text.
    """
    if isinstance(error, SqrtdkError):
        return Failure(said_by(error), error.hint, trace)
    return Failure(kind_and_text(error), str(getattr(error, "hint", "")), trace)


def failed(cell: Cell, failure: Failure) -> LabError:
    """Return the error to raise for a cell that failed.

    It names the cell and the reason, and has the traceback of the worker as a note.
    """
    error = LabError(
        Message("errors.engine.failed", cell=cell_label(cell), why=failure.message),
        hint=failure.hint or Message("errors.engine.traceback"),
    )
    if failure.trace:
        add_note(error, failure.trace.rstrip())
    return error


def cell_label(cell: Cell) -> str:
    """Return the cell's parameters as one line.

    Example:
        >>> cell_label({"d_k": 64, "scale": "none"})
        '(d_k=64, scale=none)'
    """
    text = ", ".join(f"{name}={value}" for name, value in cell.items())
    return f"({text if len(text) <= _LONGEST_NAME else text[: _LONGEST_NAME - 3] + '...'})"


class Local:
    """The engine "local": this process computes the cells one after the other."""

    workers = 1

    def results(self, function: Callable[[Cell], Result], items: Iterable[Cell]) -> Iterator[tuple[int, Result]]:
        """Yield the index and the result of each cell, in the order of the cells.

        Raises:
            LabError: A cell failed.
        """
        for index, cell in enumerate(items):
            yield index, self._result(function, cell)

    def _result(self, function: Callable[[Cell], Result], cell: Cell) -> Result:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # as in the other engines, for the same order of addition
        try:
            return function(cell)
        except INTERRUPTS:
            raise
        except BaseException as error:
            raise failed(cell, failure(error)) from error
        finally:
            torch.set_num_threads(threads)


def local_engine(workers: int | None = None, address: str | None = None) -> AbstractContextManager[Engine]:
    """Return the engine of this process.

    Raises:
        InvalidValueError: at once, for more than one worker.
    """
    if workers not in (None, 1):
        raise InvalidValueError(
            f"the engine 'local' is this process alone; got {workers} workers", hint="Take the engine 'pool'."
        )
    return nullcontext(Local())
