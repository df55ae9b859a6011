"""Reading a factor: what number, or what number a head, a multiplication puts on q, k, or the logits."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from sqrtdk.tracing.classify.mixing import paired_axes
from sqrtdk.tracing.records import DATA, ROWS, Factor
from sqrtdk.tracing.watch.constants import evaluate
from sqrtdk.tracing.watch.graph import Node, ancestors, capacity, is_learned

_MOST_HEADS = 2**12  # of a factor whose values are worked out where there are none


def read_factor(node: Node, position: int, where: str, heads_axis: int) -> Factor | None:
    """The factor that `node` multiplies by; None when it is no single number and no number a head."""
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
    """The factor that a tensor is: one number, or one a head, however often it was repeated.

    Args:
        arg: its node.
        value: its values; None where they are not known.
        where: "q", "k", "logits", or "op".
        heads_axis: counted from the end.
        inverse: it divides.
    """
    shape, several = arg.shape, capacity(arg)
    value = evaluate(arg) if several <= _MOST_HEADS and value is not None and value.is_meta else value
    known = value is not None and not value.is_meta and not value.is_complex() and value.numel() > 0
    if several == 1:
        if not known:
            return Factor(None, where, source_of(arg), learned=is_learned(arg))
        assert value is not None
        number = float(value.flatten()[0])
        return Factor(1 / number if inverse and number else number, where, source_of(arg), learned=is_learned(arg))
    keys = shape[-1:] != (1,) and heads_axis != -1
    if keys or len(shape) < -heads_axis or shape[heads_axis] != several:
        return _uniform(arg, value, where, inverse)
    if not known:
        return Factor(None, where, source_of(arg), learned=is_learned(arg)) if several == math.prod(shape) else None
    assert value is not None
    repeated = value.movedim(heads_axis, 0).reshape(several, -1)
    return _one_a_head(arg, repeated, where, inverse) or _uniform(arg, value, where, inverse)


def _one_a_head(arg: Node, repeated: Tensor, where: str, inverse: bool) -> Factor | None:
    """The factor of a row for each head; None where a row holds several numbers."""
    if not bool((repeated == repeated[:, :1]).all()):
        return None
    numbers = [1 / float(v) if inverse else float(v) for v in repeated[:, 0]]
    mean = math.exp(sum(math.log(abs(v)) for v in numbers) / len(numbers)) if all(numbers) else 0.0
    return Factor(mean, where, source_of(arg), per_head=tuple(numbers), learned=is_learned(arg))


def factor_of_edges(arg: Node, value: Tensor | None, heads: int, *, inverse: bool) -> Factor | None:
    """A factor on (edges, heads) of parameters alone: one number a head, else of a value that is not told."""
    if arg.act or not is_learned(arg):
        return None
    each = None
    if value is not None and not value.is_meta and value.shape[-1:] == (heads,):
        each = _one_a_head(arg, value.movedim(-1, 0).reshape(heads, -1), "logits", inverse)
    return each or Factor(None, "logits", source_of(arg), learned=True)


def heads_axis(factor: object, logits: Node) -> int:
    """The axis, counted from the end, along which a factor of `logits` may have one number a head."""
    if not isinstance(factor, Node) or factor.act:  # one of the data is one a sequence
        return -3
    if (several := capacity(factor)) <= 1 or factor.shape[-3:-2] == (several,):
        return -3
    axes = [axis for axis in range(-len(factor.shape), 0) if factor.shape[axis] == several]
    pairs = paired_axes(logits) if axes else None
    return -3 if pairs is None else next((axis for axis in axes if axis % len(logits.shape) not in pairs), -3)


def of_the_data(arg: object, factor: Factor | None) -> Factor | None:
    """The factor on the logits, marked where it is computed from the data: one a sequence, head or row, none a key.

    What descends from the logits themselves (their size, their maximum) is a step of their own, and no factor.
    """
    if not isinstance(arg, Node) or not arg.act or arg.products or arg.shape[-1:] not in ((), (1,)):
        return factor
    return replace(factor or Factor(None, "logits", DATA), source=DATA, learned=False)


def of_the_rows(node: Node, position: int, where: str) -> Factor | None:
    """The factor of the model's own that has one number for each row, as log n of the keys that it sees has.

    Zeros and ones hide rows: they are no factor.
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
    return Factor(None, where, ROWS, learned=is_learned(arg))


def _uniform(arg: Node, value: Tensor | None, where: str, inverse: bool) -> Factor | None:
    """A tensor that holds one number everywhere is that number."""
    if value is None or value.is_meta or value.is_complex() or not value.numel():
        return None
    low, high = (float(v) for v in torch.aminmax(value))
    if low != high or not low:
        return None
    learned = low != 1 and is_learned(arg)  # one of 1 is as it was made: it explains nothing
    return Factor(1 / low if inverse else low, where, source_of(arg) if learned else "tensor", learned=learned)


def source_of(node: Node) -> str:
    """Where a factor comes from: the name of a parameter that it is computed of, or what it is."""
    name = _leaf_name(node)
    if name:
        return f"parameter {name}"
    return "0-d tensor" if not node.shape else "tensor"


def _leaf_name(node: Node) -> str:
    return next((leaf.label for leaf in ancestors(node) if leaf.op in ("parameter", "buffer")), "")
