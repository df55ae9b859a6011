"""Checks several models in a child process, so that one that ends its process does not cost the others their reports.

The child is forked before torch is imported, and imports it once for all models. It writes each finished report into a
folder. If it dies of a signal, or a model's code ends it, the parent names the model and forks another child, which
reads the finished reports and goes on behind that model. A system without fork runs all in one process.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from sqrtdk.cli.errors import fail, words_of
from sqrtdk.cli.output import tell_reader
from sqrtdk.cli.process import is_program
from sqrtdk.errors import EXIT_INTERRUPTED, ModelError
from sqrtdk.messages import Message
from sqrtdk.report.plain import plain

if TYPE_CHECKING:
    from sqrtdk.audit.several import CheckedModel

_ENDED = "ended"  # file of a child that checked the last model: what follows is the report
_STOP = "stop"  # file of a parent that was asked to end: what is not checked by now is not checked
_QUIT = "quit"  # file of a parent that was asked twice: there is no report
_STOPPING_S = 5.0  # seconds until a child that does not react to a signal is killed


@dataclass(frozen=True, slots=True)
class Kept:
    """The finished reports of a child, as files; without a folder nothing is kept.

    Attributes:
        folder: Holds `N.started` and `N.done` or `N.lost` for the N-th model.
    """

    folder: Path | None = None

    def begin(self, number: int) -> None:
        """Note that the model of this number is being checked."""
        if self.folder is not None:
            (self.folder / f"{number}.started").touch()

    def finish(self, number: int, model: CheckedModel | None) -> None:
        """Keep what was found in it; None for a file that is no config of a model."""
        if self.folder is None:
            return
        with contextlib.suppress(Exception):  # a report that can't be kept is made again
            content = pickle.dumps(model)
            part = self.folder / f"{number}.part"
            part.write_bytes(content)
            part.replace(self.folder / f"{number}.done")

    def finished(self, number: int, name: str) -> tuple[CheckedModel | None] | None:
        """Return what an earlier child found in a model, or how it died of it; None if it has not been checked."""
        if self.folder is None:
            return None
        done, lost = (self.folder / f"{number}.{ending}" for ending in ("done", "lost"))
        if done.is_file():
            return (pickle.loads(done.read_bytes()),)  # a file of this program's own, in a folder that it made
        if lost.is_file():
            from sqrtdk.audit.several import CheckedModel

            message, hint = words_of(_end_of(name, int(lost.read_text())))
            return (CheckedModel(name, error=message, hint=hint),)
        return None

    @property
    def stopped(self) -> bool:
        """Whether the models that are left are not to be checked."""
        return self.folder is not None and (self.folder / _STOP).is_file()

    def end(self) -> None:
        """Note that the last model was checked."""
        if self.folder is not None:
            (self.folder / _ENDED).touch()


NOTHING_KEPT = Kept()


def _end_of(name: str, status: int) -> ModelError:
    """Return what is said of a model whose process ended: `status` is its exit code, negative for a signal."""
    if status >= 0:
        return ModelError(Message("errors.model.ended", code=status), hint=Message("errors.hint.ended"))
    try:
        killer = signal.Signals(-status).name
    except ValueError:
        killer = str(-status)
    hint = Message("errors.hint.killed" if killer == "SIGKILL" else "errors.hint.crashed", model=shlex.quote(name))
    return ModelError(Message("errors.model.killed", signal=killer), hint=hint)


def kept_apart(models: Sequence[str], check: Callable[[Kept], int]) -> int:
    """Run `check` in a child, and in another one each time that a model ended it, and return its exit code.

    Args:
        models: Their names, in the order in which they are checked.
        check: Checks the models that `Kept` does not have yet, writes the report and returns the exit code. In the
            child this function returns what it returns, and the program ends as it always does.
    """
    if sys.platform != "win32" and is_program():  # Windows has no fork; callers in Python may have threads
        return _in_children(models, check)
    return check(NOTHING_KEPT)


def _died_at(folder: Path) -> int | None:
    """Return the number of the model at which a child died; None if it had checked them all, or none."""
    if (folder / _ENDED).is_file():
        return None
    files = [file for file in folder.iterdir() if file.suffix in (".started", ".done", ".lost")]
    over = {file.stem for file in files if file.suffix != ".started"}
    return max((int(file.stem) for file in files if file.stem not in over), default=None)


if sys.platform != "win32":

    def _in_children(models: Sequence[str], check: Callable[[Kept], int]) -> int:
        folder, parent, stopped = Path(tempfile.mkdtemp(prefix="sqrtdk-")), os.getpid(), False
        try:
            while True:
                sys.stdout.flush()
                sys.stderr.flush()
                child = os.fork()
                if not child:
                    return check(Kept(folder))
                status = _waited(child, folder)
                number = _died_at(folder)
                if (folder / _QUIT).is_file():
                    return EXIT_INTERRUPTED
                if number is None or stopped:
                    return status if status >= 0 else 128 - status
                stopped = (folder / _STOP).is_file()  # then the next child reports, and checks nothing
                if not stopped:
                    name = models[number - 1]
                    tell_reader(Message("progress.not_checked", file=plain(name)))
                    fail(_end_of(name, status))
                    (folder / f"{number}.lost").write_text(str(status))
        finally:
            if os.getpid() == parent:
                shutil.rmtree(folder, ignore_errors=True)

    def _waited(child: int, folder: Path) -> int:
        """Wait for a child, and return its exit code, negative for a signal.

        A signal that would end this process interrupts the child instead, so that it shows what it has. One that does
        not react, as its model waits in C, is killed. A second signal kills it at once.
        """
        until = math.inf
        with _passed_on(child, folder) as asked:
            while True:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    return os.waitstatus_to_exitcode(status)
                if asked and until == math.inf:
                    until = time.monotonic() + _STOPPING_S
                if time.monotonic() > until and not (folder / _ENDED).is_file():
                    os.kill(child, signal.SIGKILL)
                time.sleep(0.02)

    @contextlib.contextmanager
    def _passed_on(child: int, folder: Path) -> Iterator[list[int]]:
        """Pass SIGINT, SIGTERM and SIGHUP on as one SIGINT, and yield a list that they are put in."""
        asked: list[int] = []

        def passes(number: int, frame: FrameType | None) -> None:
            # a terminal sends Ctrl-C to both, and a second one would end the child before it shows what it has
            with contextlib.suppress(ProcessLookupError):
                if asked:
                    os.kill(child, signal.SIGKILL)
                elif not (number == signal.SIGINT and _in_foreground()):
                    os.kill(child, signal.SIGINT)
            (folder / (_QUIT if asked else _STOP)).touch()
            asked.append(number)

        numbers = [
            one for one in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(one) != signal.SIG_IGN
        ]
        before = {number: signal.signal(number, passes) for number in numbers}
        try:
            yield asked
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _in_foreground() -> bool:
        with contextlib.suppress(OSError):
            return os.tcgetpgrp(2) == os.getpgrp()
        return False
