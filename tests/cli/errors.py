"""What every known error of the command line looks like."""

from __future__ import annotations

import subprocess


def check_error(done: subprocess.CompletedProcess[str], error: str = "", hint: str = "") -> None:
    """Exit code 2, nothing on stdout, and an error that is sqrtdk's own with a hint on stderr: no traceback.

    Args:
        done: what ended.
        error: part of the error.
        hint: part of the hint.
    """
    assert (done.returncode, done.stdout) == (2, ""), done.stdout + done.stderr
    heads = [line.partition(" ")[0] for line in done.stderr.splitlines() if not line.startswith("  ")]
    assert heads == ["Error:", "Hint:"], done.stderr
    first, _, second = done.stderr.partition("\nHint: ")
    assert error in " ".join(first.split())
    assert hint in second
    assert "is not one of sqrtdk's own" not in second
