"""Reading what mixes the heads of the logits: a linear layer, an einsum, a matrix product or a convolution."""

from __future__ import annotations

import torch
from torch import Tensor

from sqrtdk.tracing.classify.mixing import BY_DATA, CONVOLUTIONS, by_data, mixing_operands
from sqrtdk.tracing.steps import Mix, Step, Unknown
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, origin

_MIXING = CONVOLUTIONS | ops.CONTRACTIONS.keys()


def read_mixing(node: Node, main: Node) -> Step:
    """The step that mixes the heads of the logits `main` into those of `node`."""
    operands = mixing_operands(node)
    if operands is None:
        return Unknown(node.op)
    if by_data(node.args[operands[1]]):
        return Unknown(BY_DATA)
    if any(float(node.kwargs.get(name, 1)) != 1 for name in ("alpha", "beta")):
        return Unknown(node.op)
    position = operands[1]
    value = node.operands.get(position)
    return Mix(None if value is None or value.is_meta else _matrix(node, value.detach(), position))


def read_residual_mixing(node: Node) -> tuple[Step, Node] | None:
    """Logits to which their own mixing over the heads is added, z + M z: the step (1 + M), and z; None for others."""
    terms = [arg for arg in node.args if isinstance(arg, Node) and arg.products]
    if len(terms) != 2 or node.kwargs.get("alpha", 1) != 1:
        return None
    for whole, other in (terms, terms[::-1]):
        mixing = origin(other)
        main = mixing.main() if mixing.product is None and mixing.op in _MIXING else None
        if main is None or origin(main) is not origin(whole) or whole.shape != node.shape:
            continue
        step = read_mixing(mixing, main)
        if isinstance(step, Mix):
            matrix = step.matrix
            return Mix(None if matrix is None else matrix + torch.eye(len(matrix)).to(matrix)), whole
    return None


def _matrix(node: Node, value: Tensor, position: int) -> Tensor | None:
    """(H mixed, H), float64, of a matrix as the operation was given it; None where it is another one for each entry."""
    value = value.to(torch.float64)
    if node.op in CONVOLUTIONS:
        return value.flatten(1)
    if value.dim() == 3:
        if not bool((value == value[:1]).all()):
            return None
        value = value[0]
    return value if position == ops.CONTRACTIONS[node.op][0] else value.mT
