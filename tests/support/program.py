"""The program: called in this process, forked from one that has its imports behind it, or started afresh.

- `called` is for arguments, reports, errors and exit codes: it runs all of `main` but its hold on the process.
- A fork of `Warm` has its own descriptors, signals, directory and exit code, and runs the same `main`. It looks for the
  compiled kernel in its own environment, as a fresh one does at the end of its imports.
- `fresh` is for the start of the interpreter. It spends seconds on importing torch.

tests/cli/test_cli_streams.py holds the three against each other.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main

from sqrtdk import cli
from sqrtdk.cli import output
from sqrtdk.cli.errors import PlainMessages

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default"}
DROPPED = ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "SQRTDK_TRACEBACK", "PYTHONUNBUFFERED")
SECONDS = 300

AUDIT = "sqrtdk, sqrtdk.report.html, sqrtdk.report.json, sqrtdk.report.terminal"
FIRST = "sqrtdk.check('demo', seq_len=8)"  # imports in a second what each fork would import again
SERVER = f"""
import gc, json, os, resource, signal, sys, traceback
from sqrtdk.cli import main
from sqrtdk.impl.kernel.load import load_if_built

def code(text):
    try:
        exec(text, {{"__name__": "__main__"}})
        raise SystemExit(0)
    except Exception:
        traceback.print_exc()
        raise SystemExit(1)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()

gc.freeze()  # what is there is not looked through by each fork
for line in sys.stdin:
    order = json.loads(line)
    child = os.fork()
    if child == 0:
        signal.alarm({SECONDS})
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background of a shell ignores it
        resource.setrlimit(resource.RLIMIT_DATA, (8 * 2**30, 8 * 2**30))  # what has no end falls over soon
        os.chdir(order["cwd"])
        os.environ.update(order["environment"])
        for number, path in enumerate((os.devnull, order["stdout"], order["stderr"])):
            os.dup2(os.open(path, os.O_RDWR | os.O_NOCTTY), number)
        if order["file_bytes"] is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (order["file_bytes"],) * 2)
        load_if_built()
        sys.argv = ["sqrtdk", *order["arguments"]]
        try:
            if sys.argv[1:2] == ["-c"]:
                text, sys.argv = sys.argv[2], ["-c", *sys.argv[3:]]
                code(text)
            main()
        except SystemExit as end:
            if order["to_the_end"]:
                raise
            os._exit(end.code)  # the interpreter's own end takes a second
        os._exit(99)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def environment() -> dict[str, str]:
    """This process's environment without what changes the program's output."""
    return {name: value for name, value in os.environ.items() if name not in DROPPED} | ENVIRONMENT


def fresh(
    *arguments: str, cwd: Path | None = None, before: Callable[[], None] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run `python -m sqrtdk check` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "sqrtdk", "check", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        cwd=cwd,
        env=environment(),
        preexec_fn=before,
    )


def called(*arguments: object, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `sqrtdk ARGUMENTS` in this process, with `variables` of the environment.

    A working directory that is named is left again, and its modules are forgotten.
    """
    words = ["sqrtdk", *map(str, arguments)]
    out, err, modules = io.StringIO(), io.StringIO(), set(sys.modules)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        PlainMessages(),
    ):
        for name in DROPPED:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        patch.setattr(sys, "argv", words)
        patch.setattr(sys, "path", [*sys.path])
        patch.setattr(output, "_language", None)
        patch.setattr(typer.main, "get_command", _command)
        code = cli._exit_code()
        if cwd is not None:
            _forget(cwd.resolve(), sys.modules.keys() - modules)
    return subprocess.CompletedProcess(words, code, out.getvalue(), err.getvalue())


_command = functools.cache(typer.main.get_command)  # the tree of the verbs, which each call would build anew


def _forget(folder: Path, names: set[str]) -> None:
    """Take the modules of a folder out of those of these names: another folder's may be called the same."""
    files = {name: getattr(sys.modules[name], "__file__", None) for name in names}
    own = {name.partition(".")[0] for name, file in files.items() if file and folder in Path(file).parents}
    for name in names:
        if name.partition(".")[0] in own:
            del sys.modules[name]


@contextlib.contextmanager
def terminal() -> Iterator[tuple[str, Callable[[], str]]]:
    """A terminal: its path, and afterwards what was shown on it."""
    pty = pytest.importorskip("pty")
    primary, secondary = pty.openpty()
    shown = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # Linux ends a terminal so
            while part := os.read(primary, 65536):
                shown.extend(part)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield os.ttyname(secondary), shown.decode
    finally:
        os.close(secondary)
        reader.join()
        os.close(primary)


class Warm:
    """Runs `sqrtdk VERB` in forks of one process; stdout and stderr are files, unless they are told otherwise.

    Args:
        modules: what that process imports.
        first: what it runs once, before any fork.
        variables: of its environment.
    """

    def __init__(self, modules: str = AUDIT, first: str = "", **variables: str) -> None:
        self._code, self._variables = f"import {modules}\n{first}\n{SERVER}", variables

    def __enter__(self) -> Warm:
        command = [sys.executable, "-c", self._code]
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment() | self._variables
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def __call__(
        self,
        *arguments: str,
        verb: str = "check",
        cwd: Path | None = None,
        stdout: str | None = None,
        stderr: str | None = None,
        file_bytes: int | None = None,
        to_the_end: bool = False,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run `verb` with `variables` of the environment, and no file longer than `file_bytes`.

        The verb `-c` is that of `python -c`: code, and its arguments. The process ends at once with the exit code of
        `main`, or `to_the_end` as any Python does: with exit handlers, threads that stay, and last objects.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with (
            tempfile.NamedTemporaryFile("r", encoding="utf-8") as out,
            tempfile.NamedTemporaryFile("r", encoding="utf-8") as err,
        ):
            order = {
                "arguments": [*verb.split(), *arguments],
                "cwd": str(cwd or Path.cwd()),
                "environment": variables,
                "stdout": stdout or out.name,
                "stderr": stderr or err.name,
                "file_bytes": file_bytes,
                "to_the_end": to_the_end,
            }
            print(json.dumps(order), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(list(arguments), code, out.read(), err.read())


@functools.cache
def warm() -> Warm:
    """The one server of this process, which ends with it."""
    server = Warm(first=FIRST).__enter__()
    atexit.register(server.__exit__)
    return server
