"""Cells for the tests of `sqrtdk_lab.cells`: a module of its own, so that other processes can import it."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def square(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Square, and leave a trace of having run."""
    if "folder" in cell:
        with open(Path(cell["folder"]) / f"{cell['x']}.log", "a", encoding="utf-8") as log:
            log.write(f"{os.getpid()}\n")
    return {"square": cell["x"] ** 2, "pair": (1, 2), "lost": math.nan}


def fail_at_three(cell: Mapping[str, Any]) -> dict[str, Any]:
    if cell["x"] == 3:
        raise ValueError("three is not to be had")
    return square(cell)
