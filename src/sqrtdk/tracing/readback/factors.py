"""Reads factors: the number, or one number per head, by which an operation multiplies q, k or the logits.

On q and k a multiplication may be a scale, a norm's gain for each channel, a rotation e^ia, or a gate from the data.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.mixing import paired_axes
from sqrtdk.tracing.probe.norms import is_computed_gain
from sqrtdk.tracing.readback.rotations import after_decay, after_rotation, amplitude_of
from sqrtdk.tracing.readback.side import Follow, ProductSide
from sqrtdk.tracing.records import BY_ROW, FROM_DATA, Factor, Stage
from sqrtdk.tracing.tape.graph import ancestors, capacity, decided_by, evaluate, is_learned
from sqrtdk.tracing.tape.node import Node, origin

_FACTOR_FUNCTIONS = frozenset({"sqrt", "log", "sigmoid", "softplus", "tanh", "relu"})
_MOST_HEADS = 2**12  # a factor on the meta device is evaluated only if it has no more numbers than this


def read_factor(node: Node, position: int, where: str, heads_axis: int) -> Factor | None:
    """Return the factor by which a multiplication or division changes q, k or the logits.

    Args:
        node: node of the result.
        position: position of the factor among the arguments.
        where: "q", "k" or "logits".
        heads_axis: the axis, negative, along which there may be one number per head.

    Returns:
        The factor, inverted for a division; None if it is neither one number nor one number per head.
    """
    inverse = node.op == "div"
    arg = node.args[position]
    if isinstance(arg, Node):
        return tensor_factor(arg, node.operands.get(position), where, heads_axis, inverse=inverse)
    number = node.number(position)
    if number is None:
        return None
    return Factor(1 / number if inverse and number else number, where, "number")


def tensor_factor(
    arg: Node, value: Tensor | None, where: str, heads_axis: int, *, inverse: bool = False
) -> Factor | None:
    """Return the factor that a tensor holds: one number, or one per head, repeated or not; None for any other tensor.

    Args:
        arg: node of the tensor.
        value: values of the tensor; None if they are unknown.
        where: "q", "k", "logits", or "op".
        heads_axis: axis of the heads, negative: -3 for (B, H, L, E).
        inverse: True if the operation divides by the tensor.
    """
    shape, several, source, learned = arg.shape, capacity(arg), factor_source(arg, inverse=inverse), is_learned(arg)
    if several <= _MOST_HEADS and value is not None and value.is_meta:
        value = evaluate(arg)
    by_head = len(shape) >= -heads_axis and shape[heads_axis] == several and (heads_axis == -1 or shape[-1] == 1)
    if value is None or value.is_meta or value.is_complex() or not value.numel():
        alone = several == 1 or (by_head and several == math.prod(shape))
        return Factor(None, where, source, learned=learned) if alone else None
    if by_head and several > 1:
        each = _one_a_head(arg, value.movedim(heads_axis, 0).reshape(several, -1), where, inverse)
        if each is not None:
            return each
    number = float(value.flatten()[0])
    if several > 1 and (not number or not bool((value == number).all())):
        return None
    # A learned gain that is still 1 everywhere is at its initial value: its name would explain no scale.
    if several > 1 and (not learned or number == 1):
        source, learned = "tensor", False
    return Factor(1 / number if inverse and number else number, where, source, learned=learned)


def _one_a_head(arg: Node, repeated: Tensor, where: str, inverse: bool) -> Factor | None:
    """Return the factor with one number per head, or None if a head's row holds several numbers."""
    if not bool((repeated == repeated[:, :1]).all()):
        return None
    numbers = [1 / float(v) if inverse else float(v) for v in repeated[:, 0]]
    # Geometric mean: factors multiply.
    mean = math.exp(sum(math.log(abs(v)) for v in numbers) / len(numbers)) if all(numbers) else 0.0
    return Factor(mean, where, factor_source(arg, inverse=inverse), per_head=tuple(numbers), learned=is_learned(arg))


def factor_of_edges(arg: Node, value: Tensor | None, heads: int, *, inverse: bool) -> Factor | None:
    """Return the factor by which logits (edges, heads) of a graph are multiplied.

    Args:
        arg: node of the factor.
        value: its numbers; None if they are unknown.
        heads: the number of heads.
        inverse: whether it divides.

    Returns:
        The factor, without a value unless it is one number per head; None if it is not made of parameters alone.
    """
    if arg.act or not is_learned(arg):
        return None
    each = None
    if value is not None and not value.is_meta and value.shape[-1:] == (heads,):
        each = _one_a_head(arg, value.movedim(-1, 0).reshape(heads, -1), "logits", inverse)
    return each or Factor(None, "logits", factor_source(arg, inverse=inverse), learned=True)


def heads_axis(factor: object, logits: Node) -> int:
    """Return the axis, negative, along which a factor on logits may have one number per head.

    Args:
        factor: the factor as an argument of the multiplication, a node or a number.
        logits: node of the logits.

    Returns:
        The axis; -3, as in (B, H, L, S), if the factor does not tell.
    """
    if not isinstance(factor, Node) or factor.act:  # a factor computed from the data has one number per sequence
        return -3
    if (several := capacity(factor)) <= 1 or factor.shape[-3:-2] == (several,):
        return -3
    axes = [axis for axis in range(-len(factor.shape), 0) if factor.shape[axis] == several]
    pairs = paired_axes(logits) if axes else None
    return -3 if pairs is None else next((axis for axis in axes if axis % len(logits.shape) not in pairs), -3)


def of_the_data(arg: object, factor: Factor | None) -> Factor | None:
    """Return the factor on the logits, marked `FROM_DATA` if it is computed from the data and the same for all keys.

    A tensor that descends from the logits themselves (their norm, their maximum) is a step of its own, no factor.

    Args:
        arg: what multiplies the logits, a node or a number.
        factor: the factor that was read of it; None if none was. It is returned if there is nothing to mark.
    """
    if not isinstance(arg, Node) or not arg.act or arg.products or arg.shape[-1:] not in ((), (1,)):
        return factor
    return replace(factor or Factor(None, "logits", FROM_DATA), source=FROM_DATA, learned=False)


def of_the_rows(node: Node, position: int, where: str) -> Factor | None:
    """Return a factor of the model with one number per row: `q * torch.arange(1, n + 1).log()[:, None]`.

    Args:
        node: node of the result.
        position: position of the factor among the arguments.
        where: "q", "k" or "logits".

    Returns:
        The factor, without a value; None if it is not such a factor. Zeros and ones hide rows and are none.
    """
    arg, value = node.args[position], node.operands.get(position)
    if not isinstance(arg, Node) or arg.act or arg.shape[-1:] != (1,) or node.shape[-1:] == (1,):
        return None
    rows = node.shape[-2]
    if len(arg.shape) < 2 or arg.shape[-2] != rows or rows < 2 or (node.op == "div" and position == 0):
        return None
    value = evaluate(arg) if value is not None and value.is_meta else value
    if value is not None and bool(((value == 0) | (value == 1)).all()):
        return None
    return Factor(None, where, BY_ROW, learned=is_learned(arg))


def factor_source(node: Node, *, inverse: bool = False) -> str:
    """Return where a factor comes from, as text.

    Args:
        node: node of the factor.
        inverse: whether it divides.

    Returns:
        "parameter NAME" if it is computed from a parameter or buffer, with a known function written out, "parameter
        exp(-attn.log_t)"; else "tensor", or "0-d tensor".
    """
    name = next((leaf.label for leaf in ancestors(node) if leaf.op in ("parameter", "buffer")), "")
    if name:
        return f"parameter {_function(node, inverse=inverse) or name}"
    return "tensor" if node.shape else "0-d tensor"


def _function(node: Node, *, inverse: bool) -> str | None:
    """Return a parameter in the functions that made a factor of it, or None if one of them is not known.

    Example: a temperature learned as `logits * torch.exp(-self.log_t)`, or `logits / self.log_t.exp()`.
    """
    node = origin(node)
    sign = "-" if inverse else ""
    if node.op in ("parameter", "buffer"):
        return f"1/{node.label}" if inverse else node.label
    parents = list(node.parents())
    if len(parents) != 1:
        return None
    inner, number = parents[0], next((arg for arg in node.args if isinstance(arg, (int, float))), None)
    if node.op in ("clamp", "clamp_min", "clamp_max"):
        return _function(inner, inverse=inverse)
    if node.op == "reciprocal":
        return _function(inner, inverse=not inverse)
    if node.op == "exp":
        negated = (below := origin(inner)).op == "neg"
        written = _function(next(below.parents()) if negated else inner, inverse=False)
        sign = "" if inverse == negated else "-"
        return None if written is None else f"exp({sign}{_bracketed(written) if sign else written})"
    written = _function(inner, inverse=False)
    if written is None:
        return None
    if node.op in _FACTOR_FUNCTIONS and number is None:
        return f"1/{node.op}({written})" if inverse else f"{node.op}({written})"
    if node.op == "mul" and isinstance(number, (int, float)) and not inverse:
        return written if number == 1 else f"{number:.4g} * {_bracketed(written)}"
    return None


def _bracketed(text: str) -> str:
    return f"({text})" if " " in text or "/" in text else text


# -- a multiplication of q or k ----------------------------------------------------------------------------------------


def multiplied(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    """Return q or k after a multiplication or a division.

    The other operand may be a factor, a norm's gain, a rotation of complex points, a decay by position, or a gate. For
    any other the operation becomes unknown.

    Args:
        node: node of the result.
        main: node of the operand that q or k goes through.
        where: "q" or "k".
        follow: reads q or k up to a node.
    """
    side = follow(main, where)
    position = 1 if node.args[0] is main else 0
    other = node.args[position]
    if isinstance(other, Node) and (other.act or decided_by(other, main)):
        return side.lost(where, node.op)
    # q * gate(x): `without_tables_and_gates` has made the gate a constant of its own kind, with one number per vector.
    if isinstance(other, Node) and other.op == "gate":
        gate = Factor(None, where, FROM_DATA)
        return side.times(gate, Stage(where, "scale", gate.text()))
    value = node.operands.get(position)
    if value is not None and value.is_complex():  # view_as_complex(q) * e^ia: a rotation of points
        amplitude = amplitude_of(main, node)
        if amplitude is None:
            return side.lost(where, Message("trace.step.rotary_table"))
        return after_rotation(side, amplitude, where)
    if isinstance(other, Node) and is_computed_gain(other, node):
        return _gained(side, node, other, value, where)
    if side.norm and isinstance(other, Node) and _is_gain(other, node, side):
        return replace(side, basis=_with_gain(node.op, side.basis, value), norm_gain=True)
    spread = len(node.shape) > 4 and node.shape[-2] == 1  # einsum adds an axis of size 1 behind the heads
    factor = read_factor(node, position, where, heads_axis=-4 if spread else -3)
    decay = _decay(other, value, node) if factor is None and isinstance(other, Node) else None
    if decay is not None:
        return after_decay(side, decay, where)
    factor = factor or of_the_rows(node, position, where)
    if factor is None:
        shape = tuple(other.shape) if isinstance(other, Node) else ""
        return side.lost(where, node.op, Message("trace.step.by_shape", name=node.op, shape=str(shape)))
    if side.norm == "l2" and not side.factors and factor.value is not None and _is_sqrt_width(node, factor.value):
        # F.normalize(q, dim=-1) * sqrt(E): unit length times sqrt(width) is a root mean square of 1.
        stages = (*side.stages[:-1], replace(side.stages[-1], detail="rms"))
        basis = None if side.basis is None else side.basis * factor.value
        return replace(side, norm="rms", stages=stages, basis=basis)
    return side.times(factor, Stage(where, "scale", factor.text()))


def _gained(side: ProductSide, node: Node, gain: Node, value: Tensor | None, where: str) -> ProductSide:
    """Return the side after a gain for each channel; the gain's root mean square counts as a factor."""
    known = value is not None and not value.is_meta and bool(value.numel())
    size = float(value.detach().double().square().mean().sqrt()) if known and value is not None else None
    if size is not None and node.op == "div":
        size = 1 / size if size else None
    basis = _with_gain(node.op, side.basis, value) if size else None
    side = replace(side, basis=None if basis is None or not size else basis / size, norm_gain=side.norm is not None)
    factor = Factor(size, where, factor_source(gain), learned=True)
    return side.times(factor, Stage(where, "scale", factor.text()))


def _is_gain(other: Node, node: Node, side: ProductSide) -> bool:
    """Whether a tensor with one number per channel is the gain of the normalisation before it.

    After a factor only a learned tensor is: a constant may be another part of the scale.
    """
    if other.shape[-1:] > (1,):
        return not side.factors or is_learned(other)
    turned = len(other.shape) > 1 and other.shape[-2] == node.shape[-2] == side.normed and node.shape[-1] != side.normed
    return turned and is_learned(other)


def _decay(other: Node, value: Tensor | None, node: Node) -> Tensor | None:
    """Return positive constants, one or more per row (float64), or None for any other tensor."""
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
