"""Rotations by a table of matrices, 2 x 2 for each pair of channels or one for all of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.tracing.classify.vectors import holds_angles
from sqrtdk.tracing.read.amplitude import Amplitude, table_positions
from sqrtdk.tracing.read.rotary import turned
from sqrtdk.tracing.records import Factor, Stage
from sqrtdk.tracing.watch.constants import evaluate
from sqrtdk.tracing.watch.graph import Node

if TYPE_CHECKING:
    from sqrtdk.tracing.read.side import Side

    Follow = Callable[[Node, str], Side]

_SQUARE = 1e-3  # how far from a multiple of the identity R^T R may be


def turned_by_matrix(node: Node, where: str, follow: Follow) -> Side | None:
    """The side of a product with rotation matrices; None where they are none."""
    vector, matrix = node.branches[0][0], node.args[0]
    side = _turned(vector, matrix, node.operands[0], where, follow)
    if side is None and node.operands[0].is_meta and math.prod(matrix.shape[:-2]) > 1:
        before = follow(vector, where)
        if before.factors or before.rope:
            return before.lost(where, node.op, "a product with matrices of unknown values")
    return side


def turned_by_sum(node: Node, main: Node, where: str, follow: Follow) -> Side | None:
    """The same where the product is a multiplication and a sum: `(R * x[..., None, :]).sum(-1)`."""
    tables = table_positions(main) if main.op == "mul" else []
    vector = main.main()
    last = len(main.shape) - 1
    if not tables or vector is None or list(node.args[1]) not in ([-1], [last]) or vector.shape[-2:-1] != (1,):
        return None
    table = main.args[tables[0]]
    if table.shape[-1] != table.shape[-2] or len(node.shape) != len(main.shape) - 1:
        return None
    side = _turned(vector, table, main.operands.get(tables[0]), where, follow)
    if side is None or side.basis is None:
        return side
    return replace(side, basis=side.basis.squeeze(-2))


def _turned(vector: Node, table: Node, values: Tensor | None, where: str, follow: Follow) -> Side | None:
    amplitude, moves = _orthogonal(table, values)
    if amplitude is None:
        return None
    side = follow(vector, where)
    if moves:
        return turned(side, Amplitude(amplitude), where)
    side = side.then(Stage(where, "rotation", "one for all positions"))
    return side.times(Factor(amplitude, where, "rotation matrix")) if abs(amplitude - 1) > _SQUARE else side


def _orthogonal(table: Node, values: Tensor | None) -> tuple[float | None, bool]:
    """How long the matrices make a vector, None where they are no rotations, and whether they differ."""
    if values is not None and values.is_meta:
        values = evaluate(table)
    if values is None:  # of cosines and sines, by its structure
        return (1.0 if holds_angles(table.args[0] if table.op == "table" else table) else None), True
    matrices = values.detach().reshape(-1, *values.shape[-2:]).to(torch.float64)
    if not matrices.numel():
        return None, False
    squares = matrices.mT @ matrices
    size = float(squares.diagonal(dim1=-2, dim2=-1).mean())
    identity = size * torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
    rounding = _SQUARE + 8 * torch.finfo(values.dtype).eps
    if size <= 0 or float((squares - identity).abs().max()) > rounding * size:
        return None, False
    return math.sqrt(size), bool((matrices != matrices[0]).any())
