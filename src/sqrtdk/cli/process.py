"""The process: what Ctrl-C does at any moment, how it ends, and children that come back out of the model's code."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import NoReturn

from sqrtdk.cli.output import end_stdout, show_cursor

FAILED = 2  # usage, configuration or input/output error
INTERRUPTED = 130
_AGAIN = 0.05  # seconds until a swallowed Ctrl-C comes again


class _Interrupts:
    """The handler of Ctrl-C: the first raises KeyboardInterrupt; another one, or one at the end, leaves at once.

    Only one is ever raised, so what catches it isn't itself interrupted; and the process never dies of the signal.
    """

    def __init__(self) -> None:
        self.came = False
        self.code: int | None = None  # once the result is out

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.code is not None:
            os._exit(self.code)
        if self.came:
            _leave_children()
            show_cursor()
            os._exit(INTERRUPTED)
        self.came = True
        raise KeyboardInterrupt


_interrupts = _Interrupts()


def begin() -> None:
    """Take over Ctrl-C, unless the caller has it ignored (`nohup`, a script's background)."""
    atexit.register(_last)  # registered first, it runs after the model's own exit handlers
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupts)


def interrupted() -> bool:
    """Say whether Ctrl-C came, also where a library made another error of it."""
    return _interrupts.came


def swallowed() -> None:
    """Let a Ctrl-C come again that was raised where Python can only ignore it: in a finaliser, or a callback from C."""
    if _interrupts.code is None:
        _interrupts.came = False
        threading.Timer(_AGAIN, os.kill, (os.getpid(), signal.SIGINT)).start()


def end(code: int) -> NoReturn:
    """End the process with an exit code that no later Ctrl-C changes."""
    _interrupts.code = code
    if signal.getsignal(signal.SIGINT) in (signal.SIG_DFL, signal.default_int_handler):  # the model put it back
        signal.signal(signal.SIGINT, _interrupts)
    end_stdout()
    sys.exit(code)


def _last() -> None:
    """Leave nothing to the interpreter's end that changes the exit code: no signal, no stream that can't be flushed."""
    if signal.getsignal(signal.SIGINT) is _interrupts:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except Exception:  # a full disk, or whatever the model put there
            setattr(sys, name, None)


def _leave_children() -> None:
    """Stop the processes of an engine, which an exit without handlers would leave behind."""
    if "multiprocessing" in sys.modules:
        with contextlib.suppress(Exception):
            for child in sys.modules["multiprocessing"].active_children():
                child.terminate()
