"""Softmaxes of q and of k apart, and no product of the two: efficient attention (Shen et al., arXiv:1812.01243)."""

from __future__ import annotations

from sqrtdk.tracing.records import APART, ONE_PROJECTION
from sqrtdk.tracing.watch.events import SoftmaxEntry
from sqrtdk.tracing.watch.graph import Node, origin


def name(entry: SoftmaxEntry, value: Node) -> None:
    """Give two softmaxes their name, where the weights of the second meet what those of the first made of values."""
    start = origin(value).root
    first = None if start is None else start.pooled
    if first is not None and first is not entry and {first.reason, entry.reason} <= {ONE_PROJECTION, APART}:
        first.reason = entry.reason = APART
