"""Softmaxes of q and of k apart, and no product of the two: efficient attention (Shen et al., arXiv:1812.01243)."""

from __future__ import annotations

from sqrtdk.tracing.records import APART, ONE_PROJECTION
from sqrtdk.tracing.watch.graph import Node, origin
from sqrtdk.tracing.watch.marks import Weighing


def name(weighing: Weighing, value: Node) -> None:
    """Give two softmaxes their name, where the weights of the second meet what those of the first made of values.

    A second pooling of what a first one gave is none: its logits come from there.
    """
    start, entry = origin(value), weighing.entry
    first = None if start.root is None else start.root.pooled
    if first is None or first is entry or not {first.reason, entry.reason} <= {ONE_PROJECTION, APART}:
        return
    if not any(start.serial in root.root.lineage for root in weighing.node.roots if root.root is not None):
        first.reason = entry.reason = APART
