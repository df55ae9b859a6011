"""What the models learn: to go on with text, and a string task that only cross attention can solve.

The text is the bytes of Python's standard library, real text that is on every machine. The string task is to give the
letters of a source back in reverse, and to leave the noise out. The source mixes letters with noise symbols at random
places, so that the place of a letter in the target says little about its place in the source: the decoder has to look
for it. Every letter is drawn on its own, so that a model that ignores the source loses log 16 nats a letter.
"""

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


LETTERS, NOISE = 16, 10
START = LETTERS + NOISE  # what the decoder reads first
SYMBOLS = START + 1


def letters_in(length: int) -> int:
    """Letters among the symbols of a source: three of four."""
    return length * 3 // 4


def strings(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Sources and their targets.

    Args:
        rows: strings.
        length: symbols of a source, 4 or more.
        generator: of the strings.

    Returns:
        Sources (rows, length), integers below `START`; targets (rows, letters_in(length)), integers below `LETTERS`.

    Example:
        >>> source, target = strings(1, 8, torch.Generator().manual_seed(0))
        >>> source[source < LETTERS].flip(0).equal(target[0])
        True
    """
    count = letters_in(length)
    letters = torch.randint(LETTERS, (rows, count), generator=generator)
    source = torch.randint(LETTERS, START, (rows, length), generator=generator)
    places = torch.rand(rows, length, generator=generator).argsort(1)[:, :count].sort(1).values
    return source.scatter(1, places, letters), letters.flip(1)
