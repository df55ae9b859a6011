"""Attentions that are one operator."""

from __future__ import annotations

from sqrtdk.graphs.calls import Plan
from sqrtdk.graphs.graph import Graph, Node

OPERATORS: dict[tuple[str, str], str] = {}


def plan_operator(graph: Graph, node: Node) -> Plan:
    """What is needed of an attention that is one operator."""
    raise NotImplementedError
