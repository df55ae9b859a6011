"""Bytes of Python's standard library: real text that is on every machine, and windows of it to train on."""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor

from sqrtdk.errors import LabError

SKIP = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__", "encodings"}
BYTES = 256


def stdlib_text() -> tuple[Tensor, Tensor]:
    """Bytes for training and, from every 20th file, for the held-out loss; files in the order of their names.

    Raises:
        LabError: this Python has no source files.
    """
    root = Path(sysconfig.get_path("stdlib"))
    names = [path.relative_to(root) for path in root.rglob("*.py")]
    names = sorted((name for name in names if not SKIP & set(name.parts)), key=Path.as_posix)
    if len(names) < 20:
        raise LabError(
            f"the text to train on is Python's standard library; {root} holds {len(names)} source files",
            hint="Use a Python that has its library as .py files.",
        )
    train, held_out = bytearray(), bytearray()
    for index, name in enumerate(names):
        (held_out if index % 20 == 10 else train).extend((root / name).read_bytes())
    return torch.frombuffer(train, dtype=torch.uint8), torch.frombuffer(held_out, dtype=torch.uint8)


def batch(text: Tensor, rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows and the same windows one byte later, both (rows, length)."""
    start = torch.randint(len(text) - length, (rows,), generator=generator)
    window = text[start[:, None] + torch.arange(length + 1)].long()
    return window[:, :-1], window[:, 1:]


def learning_rate(step: int, steps: int, peak: float, warm_up: int) -> float:
    """Linear warm-up, then a cosine down to a tenth of the peak."""
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * (0.55 + 0.45 * math.cos(math.pi * done))
