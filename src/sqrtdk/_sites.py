"""Paths of modules that differ in one integer, shown as one path: "layers.0-31.attn"."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")

ROOT_NAME = "(root)"  # display name of the root module, whose path is ""

_INTEGER_IN_SITE = re.compile(r"([0-9]{1,18})")  # a longer number is no layer's
_MOST_RANGES = 3


def fold_sites(sites: Iterable[str]) -> tuple[str, ...]:
    """Fold the sites that differ in one integer; each is named once.

    Example:
        >>> fold_sites(["h.0.attn", "h.1.attn", "pool", "h.1.attn"])
        ('h.0-1.attn', 'pool')
    """
    return tuple(site for site, _ in fold(dict.fromkeys(sites), lambda site: site, lambda _: None))


def range_list(integers: Sequence[int]) -> str:
    """Show integers as ranges.

    Example:
        >>> range_list([0, 1, 2, 3]), range_list([4]), range_list([0, 2, 4, 6]), range_list([0, 1, 3, 4])
        ('0-3', '4', '0,2,..,6', '0-1,3-4')
        >>> range_list([0, 1, 3, 4, 6, 7, 9])
        '0-1,3-4,..,9'
    """
    ordered = sorted(set(integers))
    steps = {after - before for before, after in itertools.pairwise(ordered)}
    if len(ordered) > 3 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]},{ordered[1]},..,{ordered[-1]}"
    runs: list[list[int]] = []
    for integer in ordered:
        if runs and integer == runs[-1][1] + 1:
            runs[-1][1] = integer
        else:
            runs.append([integer, integer])
    shown = [str(low) if low == high else f"{low}-{high}" for low, high in runs]
    if len(shown) > _MOST_RANGES:
        shown = [*shown[: _MOST_RANGES - 1], "..", shown[-1]]
    return ",".join(shown)


def fold(items: Iterable[T], site_of: Callable[[T], str], shown: Callable[[T], Hashable]) -> list[tuple[str, list[T]]]:
    """Group equal items at similar sites; a group varies the integer that gathers most sites. Order is kept.

    Args:
        items: anything that has a site.
        site_of: the site of an item.
        shown: what else must be equal.

    Returns:
        Each group with its site, in which differing integers are ranges.
    """
    remaining = list(items)
    buckets: dict[tuple[Hashable, Hashable], list[int]] = {}
    keys: list[list[tuple[Hashable, Hashable]]] = []
    for position, item in enumerate(remaining):
        parts = _INTEGER_IN_SITE.split(site_of(item))
        same = shown(item)
        holes = [(*parts[:hole], None, *parts[hole + 1 :]) for hole in range(1, len(parts), 2)] or [tuple(parts)]
        keys.append([(same, hole) for hole in holes])
        for key in keys[-1]:
            buckets.setdefault(key, []).append(position)
    taken: set[int] = set()
    folded: list[tuple[str, list[T]]] = []
    for position in range(len(remaining)):
        if position in taken:
            continue
        group = max(([p for p in buckets[key] if p not in taken] for key in keys[position]), key=len)
        taken.update(group)
        folded.append((common_label([site_of(remaining[p]) for p in group]), [remaining[p] for p in group]))
    return folded


def common_label(sites: Sequence[str]) -> str:
    """Return the common name of sites that differ only in integers.

    Example:
        >>> common_label(["h.0.attn", "h.1.attn"])
        'h.0-1.attn'
    """
    if len(set(sites)) == 1:
        return sites[0]
    columns = list(zip(*(_INTEGER_IN_SITE.split(site) for site in sites), strict=True))
    return "".join(
        column[0] if len(set(column)) == 1 else range_list([int(part) for part in column]) for column in columns
    )


def site_name(site: str, index: int = 0) -> str:
    """Return the name of an attention as readers see it.

    Args:
        site: Module path; "" is the model itself.
        index: Which of the module's attentions it is, from 0.

    Example:
        >>> site_name("h.0"), site_name("h.0", 1), site_name("")
        ('h.0', 'h.0 #1', '(root)')
    """
    return f"{site or ROOT_NAME}{f' #{index}' if index else ''}"


def site_shape(site: str) -> str:
    """Return the site without its integers; sites of one shape can share a label.

    Example:
        >>> site_shape("h.12.attn")
        'h.#.attn'
    """
    return _INTEGER_IN_SITE.sub("#", site)
