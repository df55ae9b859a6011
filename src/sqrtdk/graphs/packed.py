"""q, k and v where an attention's operator takes them: each by itself, or all in one tensor."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from sqrtdk.graphs.graph import Node

Arrange = Callable[[Tensor], Tensor]


def sources(node: Node) -> tuple[str, str, str] | None:
    """Names of the tensors that hold q, k and v, one name three times where they are packed; None: not read.

    onnxruntime's operator of grouped heads is the one that takes them packed on a CPU.
    """
    query, key, value = (node.input(index) for index in range(3))
    if key and value:
        return query, key, value
    return (query, query, query) if not key and not value and node.op == "GroupQueryAttention" else None


def arrangements(node: Node, heads: int, key_heads: int) -> tuple[Arrange, Arrange, Arrange]:
    """What makes of each source its part as (B, H, L, E); packed they are (B, L, (Hq + 2 H) E), q first."""
    if node.input(1):
        return by_heads(heads), by_heads(key_heads), by_heads(key_heads)
    total = heads + 2 * key_heads
    return (
        _heads_from(0, heads, total),
        _heads_from(heads, key_heads, total),
        _heads_from(heads + key_heads, key_heads, total),
    )


def by_heads(heads: int) -> Arrange:
    """(B, L, H E) as (B, H, L, E); (B, H, L, E) stays."""
    return lambda tensor: tensor if tensor.dim() == 4 else tensor.reshape(*tensor.shape[:2], heads, -1).transpose(1, 2)


def _heads_from(first: int, count: int, total: int) -> Arrange:
    """Heads `first` to `first` + `count` of (B, L, total E)."""
    return lambda tensor: tensor.reshape(*tensor.shape[:2], total, -1)[:, :, first : first + count].transpose(1, 2)
