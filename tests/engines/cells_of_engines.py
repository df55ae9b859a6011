"""Cells for the tests of the engines and sweeps: a module of its own, so that other processes can import it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from sqrtdk.errors import InvalidValueError


def square(cell: Mapping[str, Any]) -> dict[str, Any]:
    return {"x": cell["x"], "square": cell["x"] ** 2, "pid": os.getpid(), "threads": torch.get_num_threads()}


def slow_square(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Leave a line when it starts and one when it ends."""
    log = Path(cell["folder"]) / f"{cell['x']}.log"
    with open(log, "a", encoding="utf-8") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(cell.get("seconds", 0.3))
    with open(log, "a", encoding="utf-8") as file:
        file.write("ended\n")
    return square(cell)


def fails_at_three(cell: Mapping[str, Any]) -> dict[str, Any]:
    if cell["x"] == 3:
        raise ValueError("three is not to be had")
    return square(cell)


def refuses(cell: Mapping[str, Any]) -> dict[str, Any]:
    raise InvalidValueError(f"x is odd; got {cell['x']}", hint="Take another.")


def leaves(cell: Mapping[str, Any]) -> dict[str, Any]:
    raise SystemExit(0)


def dies(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Its process ends under it, every time."""
    if cell["x"] == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return square(cell)


def not_picklable(cell: Mapping[str, Any]) -> Any:
    return {"lock": threading.Lock()}


def not_importable() -> dict[str, str]:
    """In a worker: an error; here: nothing."""
    if threading.current_thread() is threading.main_thread() and "pytest" in sys.modules:
        return {"sqrtdk": "1"}
    raise ModuleNotFoundError("no module of that name")


def product(cell: Mapping[str, Any]) -> dict[str, Any]:
    """A sum whose last bits depend on the order of its terms."""
    a = torch.randn(300, 300, generator=torch.Generator().manual_seed(cell["x"]))
    return {"sum": float((a @ a).sum())}
