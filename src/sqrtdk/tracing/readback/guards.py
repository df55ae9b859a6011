"""Reads the guards of a softmax in blocks: what keeps a row at 0 whose keys are all hidden."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from sqrtdk.tracing.steps import Hide, Step
from sqrtdk.tracing.steps.placed import StepTensor
from sqrtdk.tracing.tape.node import Exponential, Node, origin

_FAR_BELOW = -9e3  # a logit below it belongs to a hidden key
_TESTS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "gt": torch.gt, "ge": torch.ge, "lt": torch.lt, "le": torch.le, "ne": torch.ne, "eq": torch.eq,
}  # fmt: skip


def guard_of(
    node: Node, exponential: Exponential, logits: Callable[[Exponential, tuple[()]], Tensor | None]
) -> Step | None:
    """Return the mask of an operation that zeroes the exp where the logits are far below all that are seen.

    `exp(z - m) * (z > -1e29)` and `torch.where(z > -1e29, exp(z - m), 0)` keep a row at 0 whose keys are all hidden.

    Args:
        node: The operation.
        exponential: The exp that it takes.
        logits: Gives what entered the exp.
    """
    tests = [one for parent in node.parents() if (one := origin(parent)).op in _TESTS]
    if len(tests) != 1 or node.shape != exponential.shape:
        return None
    (test,) = tests
    bound, kept = test.number(1), _kept_if(node, test)
    if bound is None or bound > _FAR_BELOW or kept is None or test.args[0] is not exponential.node:
        return None
    entered = logits(exponential, ()) if exponential.logits is not None or exponential.power is not None else None
    if entered is None or entered.is_meta:
        return Hide("bool", -math.inf)
    visible = _TESTS[test.op](entered / math.log(exponential.base), bound)
    visible = visible if kept else ~visible
    return Hide("bool", -math.inf, StepTensor(visible, (), exponential.shape)) if bool(visible.any()) else None


def _kept_if(node: Node, test: Node) -> bool | None:
    """Return the result of a test for which an operation leaves the exp as it is; None if it does not zero the rest."""

    def is_test(position: int) -> bool:
        arg = node.args[position] if position < len(node.args) else None
        return isinstance(arg, Node) and origin(arg) is test

    def is_zero(position: int) -> bool:
        arg = node.args[position]
        return node.number(position) == 0 or (
            isinstance(arg, Node) and (arg.op == "zeros_like" or (arg.op == "scalar_tensor" and arg.number(0) == 0))
        )

    if node.op == "mul":
        return True
    if node.op == "masked_fill":
        return False if is_test(1) and is_zero(2) else None
    if node.op == "where" and is_test(0):
        return True if is_zero(2) else False if is_zero(1) else None
    return None
