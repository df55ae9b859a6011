"""A multiplication of q or k: by a scale, a norm's gain for each channel, points of the circle, a gate of the data."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.tracing.probe.norms import is_computed_gain
from sqrtdk.tracing.read.factors import of_the_rows, read_factor, source_of
from sqrtdk.tracing.read.rotations import amplitude_of_points, decayed, turned
from sqrtdk.tracing.records import DATA, Factor, Stage
from sqrtdk.tracing.watch.constants import evaluate
from sqrtdk.tracing.watch.graph import Node, is_learned

if TYPE_CHECKING:
    from sqrtdk.tracing.read.side import Side


def multiplied(node: Node, main: Node, where: str, follow: Callable[[Node, str], Side]) -> Side:
    """The side after a product or a quotient."""
    side = follow(main, where)
    position = 1 if node.args[0] is main else 0
    other = node.args[position]
    if isinstance(other, Node) and other.act:
        return side.lost(where, node.op)
    if isinstance(other, Node) and other.op == "gate":
        gate = Factor(None, where, DATA)
        return side.times(gate, Stage(where, "scale", gate.text()))
    value = node.operands.get(position)
    if value is not None and value.is_complex():
        amplitude = amplitude_of_points(node, position)
        if amplitude is None:
            return side.lost(where, "rotary table of varying amplitude")
        return turned(side, amplitude, where)
    if isinstance(other, Node) and is_computed_gain(other, node):
        return _gained(side, node, other, value, where)
    if side.norm and isinstance(other, Node) and _is_gain(other, node, side):
        return replace(side, basis=_with_gain(node.op, side.basis, value), norm_gain=True)
    spread = len(node.shape) > 4 and node.shape[-2] == 1  # an axis that einsum adds
    factor = read_factor(node, position, where, heads_axis=-4 if spread else -3)
    decay = _decay(other, value, node) if factor is None and isinstance(other, Node) else None
    if decay is not None:
        return decayed(side, decay, where)
    factor = factor or of_the_rows(node, position, where)
    if factor is None:
        shape = tuple(other.shape) if isinstance(other, Node) else ""
        return side.lost(where, node.op, f"{node.op} by a tensor of shape {shape}")
    if side.norm == "l2" and not side.factors and factor.value is not None and _is_sqrt_width(node, factor.value):
        # Unit length times sqrt(width) is unit root mean square.
        stages = (*side.stages[:-1], replace(side.stages[-1], detail="rms"))
        basis = None if side.basis is None else side.basis * factor.value
        return replace(side, norm="rms", stages=stages, basis=basis)
    return side.times(factor, Stage(where, "scale", factor.text()))


def _gained(side: Side, node: Node, gain: Node, value: Tensor | None, where: str) -> Side:
    """The side after a gain for each channel, whose root mean square is a factor of all."""
    known = value is not None and not value.is_meta and bool(value.numel())
    size = float(value.detach().double().square().mean().sqrt()) if known and value is not None else None
    if size is not None and node.op == "div":
        size = 1 / size if size else None
    basis = _with_gain(node.op, side.basis, value) if size else None
    side = replace(side, basis=None if basis is None or not size else basis / size, norm_gain=side.norm is not None)
    factor = Factor(size, where, source_of(gain), learned=True)
    return side.times(factor, Stage(where, "scale", factor.text()))


def _is_gain(other: Node, node: Node, side: Side) -> bool:
    """Whether a tensor belongs to the normalisation before it: a number for each channel.

    Behind a factor only what is learned does: a constant may be another part of the scale.
    """
    if other.shape[-1:] > (1,):
        return not side.factors or is_learned(other)
    turned = len(other.shape) > 1 and other.shape[-2] == node.shape[-2] == side.normed and node.shape[-1] != side.normed
    return turned and is_learned(other)


def _decay(other: Node, value: Tensor | None, node: Node) -> Tensor | None:
    """Positive numbers of the model's own, one or more for each row; None of anything else."""
    value = evaluate(other) if value is not None and value.is_meta else value
    if value is None or value.dim() < 2 or value.shape[-2] != node.shape[-2] or is_learned(other):
        return None
    if node.shape[-2] < 2 or not value.is_floating_point() or not bool((value > 0).all()):
        return None
    value = value.detach().to(torch.float64)
    return value.reciprocal() if node.op == "div" else value


def _with_gain(op: str, basis: Tensor | None, value: Tensor | None) -> Tensor | None:
    if basis is None or value is None or value.is_meta:
        return None
    return basis / value if op == "div" else basis * value


def _is_sqrt_width(node: Node, value: float) -> bool:
    return any(abs(value / math.sqrt(n) - 1) < 1e-3 for n in node.shape[-2:] if n > 1)
