"""Weights that are made while the model runs: W + s B A of low-rank adapters (Hu et al. 2021, arXiv:2106.09685)."""

from __future__ import annotations

from sqrtdk.tracing.watch.graph import Node, origin


def is_adapted_weight(op: str, right: Node) -> bool:
    """Whether the right operand of a product of two matrices is a weight with a product of parameters added to it."""
    weight = origin(right)
    if op not in ("mm", "addmm") or not weight.learned or weight.op not in ("add", "sub"):
        return False
    raw = [parent for parent in weight.parents() if origin(parent).op == "parameter" and parent.shape == weight.shape]
    return len(raw) == 1 and all(parent.learned for parent in weight.parents() if parent is not raw[0])
