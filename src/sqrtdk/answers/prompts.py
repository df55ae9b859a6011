"""Prompts that tell edits apart: long enough for windows, with repeated passages for positions.

A difference that starts behind a window's width needs prompts longer than the window; one of positions is clearest
where a passage stands twice, because the second time every token looks back by one distance.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqrtdk.answers.rows import Prompt

PROMPTS = 3  # prompts
SHORTEST, LONGEST = 96, 512  # tokens of a prompt
BEYOND = 1.5  # times the widest window that a prompt is long, where that is possible


def prompt_length(windows: Sequence[int], positions: int | None) -> int:
    """Return how many tokens a prompt has: past every window, within what the model takes.

    Args:
        windows: widths of the model's windows.
        positions: largest number of positions that it takes; None if it does not say.

    Example:
        >>> prompt_length([], None), prompt_length([256], 2048), prompt_length([4096], 8192), prompt_length([], 64)
        (160, 384, 512, 64)
    """
    wanted = max([160, *(int(BEYOND * window) for window in windows)])
    return min(max(wanted, SHORTEST), LONGEST, positions or LONGEST)


def with_repeat(prompt: Prompt) -> Prompt:
    """Return a prompt of the same length whose first half stands twice.

    Example:
        >>> with_repeat((1, 2, 3, 4, 5))
        (1, 2, 1, 2, 1)
    """
    half = max(1, len(prompt) // 2)
    return (prompt[:half] * 3)[: len(prompt)]
