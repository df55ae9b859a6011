"""What every known error of the command line looks like."""

from __future__ import annotations

from typer.testing import Result


def check_error(done: Result, error: str, hint: str) -> None:
    """Exit code 2, nothing on stdout, and two lines on stderr: no traceback.

    Args:
        done: what ended.
        error: part of the first line.
        hint: part of the second one.
    """
    assert done.exit_code == 2
    assert done.stdout == ""
    first, second = done.stderr.strip().splitlines()
    assert first.startswith("Error: ")
    assert error in first
    assert second.startswith("Hint: ")
    assert hint in second
