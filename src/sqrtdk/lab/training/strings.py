"""A string task that only cross attention can solve: give the letters back in reverse, and leave the noise out.

The source mixes letters with noise symbols at random places, so that the place of a letter in the target says little
about its place in the source: the decoder has to look for it. Every letter is drawn on its own; whoever does not look
at the source loses log 16 nats a letter.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
