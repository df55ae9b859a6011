"""Sizes that a graph leaves free: symbols, with the numbers that stand for them while its shapes are worked out."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sqrtdk.errors import ModelError

MASK = re.compile(r"(^|_)(attention|padding|pixel|input)_mask$")  # inputs that tell padding
MOST_NODES = 2**17  # operations that are walked: some 2 ms each with the trace


def refuse_many(count: int) -> None:
    """Refuse more operations than are walked.

    Raises:
        ModelError: there are more.
    """
    if count > MOST_NODES:
        raise ModelError(
            f"the graph has {count} operations; at most {MOST_NODES} are read", hint="Export a smaller part of it."
        )


def shown_sizes(sizes: Mapping[str, int]) -> str:
    """A sentence on sizes that are free.

    Example:
        >>> shown_sizes({"batch": 2, "tokens": 24})
        'sizes that the graph leaves free: batch, tokens (read at 2, 24)'
    """
    names = [name[:40] for name in sizes][:8]
    more = f" and {len(sizes) - 8} more" if len(sizes) > 8 else ""
    return (
        f"sizes that the graph leaves free: {', '.join(names)}{more} "
        f"(read at {', '.join(str(size) for size in [*sizes.values()][:8])})"
    )
