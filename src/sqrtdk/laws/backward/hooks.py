"""Gradients between an attention's output and its operands as they are before a user's hooks change them.

A hook is the user's own: `q.register_hook(lambda gradient: gradient.clamp(-1, 1))`. What the nodes of the graph hand on
is summed, and held against what the next node gets. On a module, `register_full_backward_hook` changes what a node of
torch's own hands on, whose function is the identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sqrtdk.laws.backward.case import QUERY_KEY_VALUE
from sqrtdk.laws.backward.graph import graph_place, nodes_inside
from sqrtdk.laws.backward.handles import Edge, Reached
from sqrtdk.laws.backward.passes import delivered_gradients

HOOKED_MODULE = "BackwardHookFunctionBackward"  # a node whose function is the identity
_PARTS_ROUNDINGS = 8.0  # by which a sum of gradients may differ from that of autograd, whose order is its own
_Slot = tuple[Any, int]  # a node, and the number of its output


class HooksWatched:
    """Gives the gradients of an attention's operands, and notes whether a hook changed one on the way.

    Attributes:
        on_the_way: Whether a hook stands at the output or between it and the operands, as of the last call.
    """

    def __init__(self, reached: Reached, edges: Mapping[str, Edge]) -> None:
        """Prepare for an attention.

        Args:
            reached: The attention, whose output is known.
            edges: Places of operands, by the names of their gradients.
        """
        self.on_the_way = False
        self._reached, self._edges = reached, edges
        self._handed: dict[_Slot, list[Tensor]] = {}

    def __call__(self, d_out: Tensor, d_lse: Tensor | None, strided: bool) -> dict[str, Tensor | None]:
        """Return what `delivered_gradients` does, before hooks at the operands."""
        self._handed, reached = {}, self._reached
        assert reached.output is not None
        places = {name: graph_place(edge) for name, edge in self._edges.items()}
        ends = {place.node for place in places.values()}
        starts = [graph_place(one.edge).node for one in (reached.output, reached.lse) if one is not None]
        hooks = []
        for node in nodes_inside(starts, ends):
            hooks += [
                node.register_hook(partial(self._hands_on, node, node in starts)),
                *([node.register_prehook(partial(self._reached_start, reached, d_out))] if node is starts[0] else []),
            ]
        try:
            found = delivered_gradients(reached, self._edges, d_out, d_lse, strided)
        finally:
            for hook in hooks:
                hook.remove()
        for name, place in places.items():
            parts = self._handed.get((place.node, place.output_nr), [])
            got = found[name]
            if got is None or not parts or name.startswith("factor "):
                continue
            own = sum(parts[1:], parts[0])
            own = reached.handles[name].back(own) if name in QUERY_KEY_VALUE else own
            if own.shape == got.shape:
                found[name] = own
        return found

    # A hook that returns None leaves the gradients as they are.

    def _reached_start(self, reached: Reached, d_out: Tensor, gradients: Sequence[Tensor | None]) -> None:
        output = reached.output
        assert output is not None
        got = gradients[graph_place(output.edge).output_nr]
        if got is not None:
            self.on_the_way |= not torch.equal(output.back(got), d_out.to(got.dtype))

    def _hands_on(self, node: Any, starts: bool, gave: Sequence[Tensor | None], got: Sequence[Tensor | None]) -> None:
        for number, gradient in enumerate(got):
            if not starts and gradient is not None:
                self.on_the_way |= _differs(gradient, self._handed.get((node, number), []))
        if node.name() == HOOKED_MODULE:
            self.on_the_way |= changed_on_a_module(gave, got)
        for (earlier, number), gradient in zip(node.next_functions, gave, strict=True):
            if earlier is not None and gradient is not None:  # a copy: a hook may write over it
                self._handed.setdefault((earlier, number), []).append(gradient.detach().clone())


def changed_on_a_module(gave: Sequence[Tensor | None], got: Sequence[Tensor | None]) -> bool:
    """Return whether a hook on a module changed what the node of a module's inputs, or outputs, hands on."""
    pairs = zip(gave, got, strict=False)
    return any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs)


def _differs(whole: Tensor, parts: Sequence[Tensor]) -> bool:
    """Return whether a gradient is another than the sum of its parts; parts of another shape are summed by torch."""
    if not parts or any(part.shape != whole.shape for part in parts):
        return False
    exact = [part.to(torch.float64) for part in parts]
    sizes, unit = sum(part.abs() for part in exact), torch.finfo(whole.dtype)
    off = (whole.to(torch.float64) - sum(exact)).abs()
    return bool((off > _PARTS_ROUNDINGS * unit.eps * sizes + unit.tiny).any())
