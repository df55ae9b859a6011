"""A backward pass between the output of an attention and its operands, for a gradient of the output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from sqrtdk.laws.backward.case import QUERY_KEY_VALUE
from sqrtdk.laws.backward.handles import Edge, Handle, Reached, key_of


def delivered_gradients(
    reached: Reached, edges: Mapping[str, Edge], d_out: Tensor, d_lse: Tensor | None, strided: bool
) -> dict[str, Tensor | None]:
    """Return the gradients that autograd gives between an attention's output and the edges.

    Args:
        reached: The attention, whose output is known.
        edges: Places of operands, by the names of their gradients.
        d_out: The gradient of the output, (B, H, L, E).
        d_lse: That of lse, (B, H, L); None for none.
        strided: Whether `d_out` lies in memory as a transposed output does.

    Returns:
        The gradients by name, those of q, k and v in (B, H, L, E); None where none arrives.
    """
    return operand_gradients(reached, edges, *cotangents_of(reached, d_out, d_lse, strided))


def cotangents_of(
    reached: Reached, d_out: Tensor, d_lse: Tensor | None, strided: bool
) -> tuple[list[Edge], list[Tensor]]:
    """Return the places of an attention's output and lse, and their gradients in the layout of the run.

    Args:
        reached: The attention, whose output is known.
        d_out: The gradient of the output, (B, H, L, E).
        d_lse: That of lse, (B, H, L); None for none.
        strided: Whether `d_out` lies in memory as a transposed output does.
    """
    output = reached.output
    assert output is not None
    outputs, cotangents = [output.edge], [in_layout(output, d_out, strided=strided)]
    if d_lse is not None and reached.lse is not None:
        outputs.append(reached.lse.edge)
        cotangents.append(in_layout(reached.lse, d_lse[..., None]))
    return outputs, cotangents


def operand_gradients(
    reached: Reached, edges: Mapping[str, Edge], outputs: Sequence[Edge], cotangents: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    """Return what `delivered_gradients` does, for gradients of the output and of lse as autograd has them.

    Hooks let no gradient pass q, k, v and biases: an earlier layer may read the same bias, and one of them may be
    computed from another, as a bias of relative positions from q. A learned factor on q or k lies before them.
    """
    factors = {name: edge for name, edge in edges.items() if name.startswith("factor ")}
    others = {name: edge for name, edge in edges.items() if name not in factors}
    hooks = [
        edge.node.register_prehook(partial(_stopped, edge.output_nr))
        for edge in {key_of(edge): edge for name, edge in others.items() if name != "sinks"}.values()
        if isinstance(edge, GradientEdge)  # nothing passes a parameter
    ]
    try:
        found = gradients_between(outputs, others, cotangents)
    finally:
        for hook in hooks:
            hook.remove()
    arrived = {
        name: gradient
        if gradient is None or name not in QUERY_KEY_VALUE
        else reached.handles[name].back(gradient.detach())
        for name, gradient in found.items()
    }
    return arrived | gradients_between(outputs, factors, cotangents)


def _stopped(number: int, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    stopped = gradients[number]
    return (
        *gradients[:number], None if stopped is None else torch.zeros_like(stopped), *gradients[number + 1 :]
    )  # fmt: skip


def gradients_between(
    outputs: Sequence[Edge], edges: Mapping[str, Edge], cotangents: Sequence[Tensor]
) -> dict[str, Tensor | None]:
    """Return the gradients of some places for those of others, and keep the graph; None where none arrives."""
    if not edges:
        return {}
    with torch.enable_grad():
        ends: Any = [*edges.values()]  # torch takes tensors and places side by side, and its types do not
        starts: Any = [*outputs]
        found = torch.autograd.grad(starts, ends, cotangents, retain_graph=True, allow_unused=True)
    return dict(zip(edges, found, strict=True))


def in_layout(handle: Handle, gradient: Tensor, *, strided: bool = False) -> Tensor:
    """Return a gradient (B, H, L, E) in the layout of a handle.

    Args:
        handle: The tensor whose gradient it is.
        gradient: (B, H, L, E).
        strided: An output (B, H, L, E) is transposed before it is merged: give the strides of (B, L, H, E).
    """
    empty = torch.empty(handle.sizes, dtype=handle.dtype, device=handle.device)
    if strided and handle.sizes == handle.shape:
        empty = empty.transpose(1, 2).contiguous().transpose(1, 2)
    handle.back(empty).copy_(gradient)
    return empty
