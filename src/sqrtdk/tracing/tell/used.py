"""What met in an attention, beside what its reading has."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.recorder import KernelCall


@dataclass(frozen=True, slots=True, eq=False)
class Used:
    """What met in the attention, beside what its reading has.

    Attributes:
        value: v, as it met the weights.
        node: its node.
        weights: as they met it; None of a kernel.
        lse: that a kernel gave.
        query_node: of a kernel.
        key_node: of a kernel.
        sinks: of a kernel.
        query: of a kernel, as it was given it.
    """

    value: Tensor
    node: Node
    weights: Tensor | None = None
    lse: Tensor | None = None
    query_node: Node | None = None
    key_node: Node | None = None
    sinks: Tensor | None = None
    query: Tensor | None = None


def of_kernel(call: KernelCall) -> Used | None:
    """What met in a kernel whose arguments have the names of SDPA's; None of any other."""
    nodes = [call.nodes.get(name) for name in ("query", "key", "value")]
    query, key, value = nodes
    if query is None or key is None or value is None:
        return None
    sinks = call.arguments.get("sinks")
    lse = None if sinks is not None else call.lse  # theirs is among the sums, and can't be taken off again exactly
    return Used(call.arguments["value"], value, None, lse, query, key, sinks, call.arguments["query"])
