"""A program: the compiled kernel of the package on the path, judged by the battery until something is found wrong.

Prints what it found and exits with 1; with 0 where nothing is wrong.
"""

from __future__ import annotations

import sys

import torch

from tests.attention.cases import CASES, LONG_CASES
from tests.attention.judging import expect, judge

SOON = 80  # small cases, in which most errors are found, before the long ones


def main() -> int:
    """Judge all cases; the exit code."""
    torch.set_num_threads(2)
    small = [case for case in CASES if case.cpu_can]
    for case in [*small[:SOON], *LONG_CASES, *small[SOON:]]:
        try:
            found = judge(case, "cpu", expect(case))
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        if found:
            print(f"{case.id}: {found[0]}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
