"""Reading logits that were written part by part: blocks of a product in a larger tensor, keys that a number hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.tracing.steps import Bias, Hide, Sink, Step, Unknown
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.watch.constants import block, evaluate, part, written
from sqrtdk.tracing.watch.graph import Node

_HIDES = -1e3  # a number below it hides what it is written over
_ZEROS = frozenset({"zeros", "zeros_like", "new_zeros"})
_FULL = {"full": 1, "full_like": 1, "new_full": 2}  # position of the number


@dataclass(frozen=True, slots=True)
class Written:
    """What logits were written over or into.

    Attributes:
        main: where the logits come from.
        steps: what the rest of the tensor is to them.
        placed: they are a part of the tensor.
        blocks: logits of other products beside them.
        own: the write that put a part of the logits back, with something done to it.
    """

    main: Node
    steps: tuple[Step, ...] = ()
    placed: bool = False
    blocks: tuple[Node, ...] = ()
    own: Node | None = None


def read_written(node: Node, views: tuple[Node, ...]) -> Written | None:
    """What the writes that made `node` come to; None where no logits were written.

    Args:
        node: the tensor after the last write.
        views: from it to the softmax, innermost first.
    """
    base, writes = written(node)
    blocks = [source for write in writes if (source := block(write)) is not None]
    if base.products:
        own = writes[0] if block(writes[0]) is not None else None
        numbers = writes if own is None else writes[1:]
        return Written(base, (_hidden(node, numbers, views),) if numbers else (), own=own)
    if not blocks:
        return None
    if len(blocks) > 1:
        return Written(blocks[0], placed=True, blocks=tuple(blocks[1:]))
    return Written(blocks[0], _around(node, base, writes, views), placed=True)


def put_back(steps: Sequence[Step], write: Node, node: Node, views: tuple[Node, ...]) -> tuple[Step, ...]:
    """What was done to a part of the logits before `write` put it back, as steps of the whole.

    Args:
        steps: from the part that was taken to the part that was put back.
        write: the operation that did.
        node: the whole.
        views: from it to the softmax, innermost first.
    """

    def whole(placed: Placed, elsewhere: float) -> Placed:
        value = placed.at_softmax()
        every = value.new_full(node.shape, elsewhere)
        part(write, every).copy_(value)
        return Placed(every, views, node.shape)

    told: list[Step] = []
    for step in steps:
        if isinstance(step, Bias):
            told.append(replace(step, addend=None if step.addend is None else whole(step.addend, 0.0)))
        elif isinstance(step, Hide) and step.visible is not None:
            told.append(replace(step, visible=whole(step.visible, 1.0)))
        else:
            return (Unknown("overwrite"),)
    return tuple(told)


def _hidden(node: Node, writes: tuple[Node, ...], views: tuple[Node, ...]) -> Step:
    """Numbers that were written over logits hide their keys; anything else can't be followed."""
    visible = torch.ones(node.shape, dtype=torch.bool)
    lowest = 0.0
    for write in writes:
        number = _fill(write)
        if number is None or number >= _HIDES:
            return Unknown("overwrite")
        part(write, visible).fill_(False)
        lowest = min(lowest, number)
    return Hide("bool", lowest, Placed(visible, views, node.shape))


def _around(node: Node, base: Node, writes: tuple[Node, ...], views: tuple[Node, ...]) -> tuple[Step, ...]:
    """The steps that the numbers around a block of logits are: hidden keys, a column of sinks, or nothing."""
    around, inside = _numbers(base, node.shape), torch.zeros(node.shape, dtype=torch.bool)
    for write in writes:
        is_block, number = block(write) is not None, _fill(write)
        if around is None or (number is None and not is_block):
            return (Unknown("overwrite"),)
        part(write, inside).fill_(is_block)
        if number is not None:
            part(write, around).fill_(number)
    numbers = torch.zeros(0) if around is None else around[~inside]
    if not numbers.numel():
        return ()
    if bool((numbers < _HIDES).all()):
        return (Hide("float", float(numbers.max()), Placed(inside, views, node.shape)),)
    column = bool(inside[..., :-1].all()) and not bool(inside[..., -1].any()) and not bool(numbers.isnan().any())
    return (Sink(),) if column else (Unknown("overwrite"),)


def _numbers(base: Node, shape: tuple[int, ...]) -> Tensor | None:
    """The values of a tensor before it was written to; NaN where they are not known."""
    if base.op in _ZEROS:
        return torch.zeros(shape)
    number = base.number(_FULL[base.op]) if base.op in _FULL else None
    if number is not None:
        return torch.full(shape, number)
    known = evaluate(base)
    if known is not None and known.shape == shape and "empty" not in base.op:
        return known.to(torch.float32).cpu().clone()
    return torch.full(shape, torch.nan) if "empty" in base.op else None


def _fill(write: Node) -> float | None:
    """The number that a write put everywhere; None for any other write."""
    if write.op == "zero":
        return 0.0
    if write.op not in ("fill", "copy") or len(write.args) < 2:
        return None
    if (number := write.number(1)) is not None:
        return number
    value = evaluate(write.args[1]) if isinstance(write.args[1], Node) else None
    known = value is not None and value.numel() and bool((value == value.flatten()[0]).all())
    return float(value.flatten()[0]) if known and value is not None else None
