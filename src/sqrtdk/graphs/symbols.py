"""Sizes that a graph leaves free: symbols, with the numbers that stand for them while its shapes are worked out."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sqrtdk.errors import ModelError

MASK = re.compile(r"(^|_)(attention|padding|pixel|input)_mask$")  # inputs that tell padding
_MOST_TERMS = 8  # of a sum of sizes
MOST_NODES = 2**15  # operations that are walked: some 10 ms each, with all walks and the trace


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


def number_for(axis: int, sizes: Mapping[str, int], larger: bool) -> int:
    """A number for a size that has none yet: small for a batch, else one that no head has."""
    if axis == 0:
        return 3 if larger else 2
    return (53 if larger else 37) + 2 * sum(1 for size in sizes.values() if size > 3)


def shape_of(value: Any, sizes: dict[str, int], larger: bool = False) -> list[int]:
    """Sizes of an input of an ONNX graph, a `ValueInfoProto`, with numbers for those that it leaves free."""
    return [
        int(d.dim_value) if d.HasField("dim_value") else size_of(d.dim_param, value.name, axis, sizes, larger)
        for axis, d in enumerate(value.type.tensor_type.shape.dim)
    ]


def size_of(symbol: str, of: str, axis: int, sizes: dict[str, int], larger: bool) -> int:
    """A number for a size that is free; kept in `sizes` by its name.

    Args:
        symbol: its name; "" where it has none.
        of: the input.
        axis: of the input.
        sizes: those that have a number already.
        larger: choose other numbers than otherwise.

    Example:
        >>> sizes = {}
        >>> size_of("batch", "ids", 0, sizes, False), size_of("past", "k", 2, sizes, False)
        (2, 0)
        >>> size_of("tokens", "ids", 1, sizes, False), size_of("past + tokens", "mask", 1, sizes, False)
        (37, 37)
    """
    name = symbol or f"{of}.{axis}"
    terms = [term.strip() for term in name.split("+")]
    if 1 < len(terms) <= _MOST_TERMS:
        return sum(_term(term, of, sizes, larger) for term in terms)
    if name not in sizes:
        cached = "past" in name or (not symbol and "past" in of and axis == 2)
        sizes[name] = 0 if cached else number_for(axis, sizes, larger)
    return sizes[name]


def _term(term: str, of: str, sizes: dict[str, int], larger: bool) -> int:
    return int(term) if term.isdecimal() and len(term) < 9 else size_of(term, of, 1, sizes, larger)
