"""The real program in a process of its own: started afresh, or forked from one that has its imports behind it.

A fresh start spends seconds on importing torch and transformers. What a test says of arguments, files, streams and exit
codes is as true of the fork: it has its own descriptors, directory and exit code, and runs the same `main`.
It looks for the compiled kernel in its own environment, as a fresh one does at the end of its imports.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "default"}
DROPPED = ("NO_COLOR", "COLUMNS", "FORCE_COLOR", "SQRTDK_TRACEBACK", "PYTHONUNBUFFERED")
SECONDS = 120

AUDIT = (
    "sqrtdk.audit.check, sqrtdk.report.html, sqrtdk.report.json, sqrtdk.report.terminal, "
    "transformers.models.llama.modeling_llama"
)
SERVER = f"""
import json, os, resource, signal, sys, traceback
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
            os._exit(end.code)  # torch's own end takes a second
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


class Warm:
    """Runs `sqrtdk VERB` in forks of one process; stdout and stderr are files, unless they are told otherwise.

    Args:
        modules: what that process imports.
        variables: of its environment.
    """

    def __init__(self, modules: str = AUDIT, **variables: str) -> None:
        self._code, self._variables = f"import {modules}\n{SERVER}", variables

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
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Run `verb` to its end, with `variables` of the environment, and no file longer than `file_bytes`.

        The verb `-c` is that of `python -c`: code, and its arguments.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            order = {
                "arguments": [*verb.split(), *arguments],
                "cwd": str(cwd or Path.cwd()),
                "environment": variables,
                "stdout": stdout or out.name,
                "stderr": stderr or err.name,
                "file_bytes": file_bytes,
            }
            print(json.dumps(order), file=self._server.stdin, flush=True)
            code = int(self._server.stdout.readline())
            return subprocess.CompletedProcess(list(arguments), code, out.read(), err.read())
