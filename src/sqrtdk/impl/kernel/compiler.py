"""The machine's C++ compiler: finding it, and running it within a time limit."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile

from sqrtdk.errors import UnsupportedError

COMPILE_S = 900.0  # half a minute is usual
COMPILER_HINT = "The compiler has to be GCC 11 or newer; CXX names another one."
ENDED_S = 10.0  # time in which a killed process must end
_MOST_READ = 2**20  # bytes of its output


def command() -> list[str]:
    """Return the command of the C++ compiler: that in CXX, which may have arguments, or GCC; [] if there is none."""
    named = os.environ.get("CXX", "").strip()
    commands = [[named]] if named else [["g++"], ["c++"]]
    with contextlib.suppress(ValueError):  # an unclosed quote
        commands += [shlex.split(named)] if named else []
    found = ((shutil.which(program), rest) for program, *rest in commands)
    return next(([path, *rest] for path, rest in found if path), [])


def why_no_compiler() -> str | None:
    """Return the reason why there is no compiler; None if there is one."""
    if command():
        return None
    named = os.environ.get("CXX", "").strip()
    if not named:
        return "there is no C++ compiler"
    return f"CXX names {named!r}, which is {'no program' if os.path.exists(named) else 'not found'}"


def compile_by(words: list[str]) -> None:
    """Run the compiler.

    Raises:
        UnsupportedError: It can't be started, fails, or does not end; with its first error.
    """
    code, stderr = run_program(words, COMPILE_S, f"the compiler {words[0]}", COMPILER_HINT)
    if code:
        errors = [line for line in stderr if "error:" in line] or stderr[-1:]
        raise UnsupportedError(f"the compiler failed: {errors[0] if errors else ending(code)}", hint=COMPILER_HINT)


def run_program(words: list[str], limit_s: float, name: str, hint: str) -> tuple[int, list[str]]:
    """Run a program without input.

    Args:
        words: The program and its arguments.
        limit_s: Seconds after which it is killed.
        name: What error messages call it.
        hint: Hint of the errors.

    Returns:
        Its exit status, and the lines of its stderr, in English if it supports that.

    Raises:
        UnsupportedError: It can't be started, or was killed after `limit_s` seconds.
    """
    with tempfile.TemporaryFile() as stderr:  # a file, as a pipe would stay open as long as any program it started
        variables = os.environ | {"LC_ALL": "C"}
        streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": stderr}
        try:
            process = subprocess.Popen(words, env=variables, start_new_session=True, **streams)  # type: ignore[call-overload]
        except OSError as error:
            raise UnsupportedError(f"{name} can't be started: {error.strerror or error}", hint=hint) from error
        try:
            code = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise UnsupportedError(f"{name} did not end within {limit_s:g} s", hint=hint) from None
        finally:  # also after Ctrl-C, which does not reach another process group
            _end(process)
        stderr.seek(0)
        lines = stderr.read(_MOST_READ).decode(errors="replace").splitlines()
        return code, [line for line in lines if line.strip()]


def ending(code: int) -> str:
    """Describe an exit status.

    Example:
        >>> ending(1), ending(-9)
        ('it exited with 1', 'it was killed by SIGKILL')
    """
    if code >= 0:
        return f"it exited with {code}"
    with contextlib.suppress(ValueError):  # a real-time signal has no name
        return f"it was killed by {signal.Signals(-code).name}"
    return f"it was killed by signal {-code}"


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, unless it has ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            if sys.platform == "win32":
                process.kill()
            else:
                os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(ENDED_S)
