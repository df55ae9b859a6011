"""The process: what Ctrl-C does at any moment, and how the process ends with the right exit code."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from sqrtdk.cli.output import end_stdout, show_cursor
from sqrtdk.errors import EXIT_INTERRUPTED, ModelError
from sqrtdk.messages import Message

if TYPE_CHECKING:
    from sqrtdk.ranks.group import RankGroup

EXIT_FAILED = 2  # usage, configuration or input/output error
_end_at_once = os._exit
_RESEND_INTERRUPT_S = 0.05  # seconds until a swallowed Ctrl-C is sent again


class _Interrupts:
    """The handler of SIGINT. The first Ctrl-C raises KeyboardInterrupt; a second, or one behind the result, exits.

    Only one exception is ever raised, so its handlers are not interrupted, and the process never dies of the signal.
    """

    def __init__(self) -> None:
        self.came = False
        self.code: int | None = None  # set when the result is out; a later Ctrl-C must not change it

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.code is not None:
            _end_at_once(self.code)
        if self.came:
            _leave_children()
            show_cursor()
            _end_at_once(EXIT_INTERRUPTED)
        self.came = True
        raise KeyboardInterrupt


_interrupts = _Interrupts()
_owned = False  # whether this process is the program, and not a caller of its functions


@contextlib.contextmanager
def ranks_started() -> Iterator[RankGroup | None]:
    """Join the ranks that torchrun started, or yield None in a process that is alone.

    An error within the block reaches all ranks.
    """
    if "RANK" not in os.environ or os.environ.get("WORLD_SIZE", "") in ("", "1"):
        yield None
        return
    from sqrtdk.ranks.group import started

    with started() as ranks:
        if ranks is None:
            yield None
            return
        ranks.together = True
        with ranks.shared_errors():
            yield ranks


def said_once(ranks: RankGroup | None, say: Callable[[], int]) -> int:
    """Print or write something on the first rank alone, and return its exit code on all.

    Args:
        ranks: The ranks; None: this process is alone.
        say: Function that prints or writes, and returns the exit code.
    """

    def said() -> int:
        code = say()
        # torchrun ends all ranks once one has ended with findings: the report would stay in the buffer.
        with contextlib.suppress(OSError, ValueError):  # a closed stdout, which `end_stdout` deals with
            sys.stdout.flush()
        return code

    return say() if ranks is None else ranks.first_says(said)


def handle_interrupts() -> None:
    """Handle Ctrl-C, unless the caller ignores it (`nohup`, a background job of a script)."""
    global _owned
    _owned = True
    atexit.register(_last)  # registered first, so it runs after the model's own exit handlers
    # nohup and background jobs have SIG_IGN here, which stays
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupts)


def is_program() -> bool:
    """Return whether this process runs the program alone, so that it may be forked."""
    return _owned


@contextlib.contextmanager
def exit_refused() -> Iterator[None]:
    """Let `os._exit` raise while a model's code may run: a check that it ends with 0 would look like a good one.

    A child process still ends by it. Code in C that ends the process is not caught.

    Raises:
        ModelError: From the call of `os._exit`.
    """
    own = os.getpid()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != own:
            _end_at_once(status)
        raise ModelError(Message("errors.model.ended", code=status), hint=Message("errors.hint.ended"))

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = _end_at_once


def interrupted() -> bool:
    """Return whether Ctrl-C was pressed, even if a library turned it into another error."""
    return _interrupts.came


def swallowed() -> None:
    """Send a Ctrl-C again that Python ignored, because it was raised in a finaliser or a callback from C."""
    if _interrupts.code is None:
        _interrupts.came = False
        if sys.platform == "win32":  # os.kill would end the process at once
            threading.Timer(_RESEND_INTERRUPT_S, signal.raise_signal, (signal.SIGINT,)).start()
        else:
            threading.Timer(_RESEND_INTERRUPT_S, os.kill, (os.getpid(), signal.SIGINT)).start()


def end(code: int) -> NoReturn:
    """End the process with an exit code, which a later Ctrl-C can't change."""
    _interrupts.code = code
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):  # reset by the model
        signal.signal(signal.SIGINT, _interrupts)
    end_stdout()
    sys.exit(code)


def _last() -> None:
    """Prevent the interpreter's shutdown from changing the exit code by a signal or a stream that can't be flushed."""
    if signal.getsignal(signal.SIGINT) is _interrupts:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except Exception:  # a full disk, or an object that the model put there
            setattr(sys, name, None)


def _leave_children() -> None:
    """Terminate an engine's processes, which `os._exit` would leave behind."""
    if "multiprocessing" in sys.modules:
        with contextlib.suppress(Exception):
            for child in sys.modules["multiprocessing"].active_children():
                child.terminate()
