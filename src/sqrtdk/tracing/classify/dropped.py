"""Dropout of the weights, by its operator or by hand: a rate, and what the rest of the weights is multiplied by."""

from __future__ import annotations

from collections.abc import Callable

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.constants import evaluate
from sqrtdk.tracing.watch.graph import Node

# What keeps an entry: a uniform random number beyond a bound; the rate from the bound.
_COMPARED: dict[str, Callable[[float], float]] = {
    **dict.fromkeys(("gt", "ge"), lambda bound: bound),
    **dict.fromkeys(("lt", "le"), lambda bound: 1 - bound),
}
_UNIFORM = frozenset({"rand", "rand_like", "uniform"})


def dropped(node: Node) -> tuple[float, float] | None:
    """(rate, gain) of the dropout that `node` applies, where one of its operands is a random mask; None without one."""
    if node.op == "native_dropout":
        rate = float(node.args[1]) if node.args[2] else 0.0
        return (rate, 1 / (1 - rate)) if 0 < rate < 1 else None
    if node.op != "mul":
        return None
    return next((kept for parent in node.parents() if not parent.act and (kept := _kept(parent)) is not None), None)


def _kept(mask: Node) -> tuple[float, float] | None:
    gain = 1.0
    while mask.op in ops.VIEWS | ops.SAME | {"div", "mul"}:
        number = number_of(mask, 1) if mask.op in ("div", "mul") else 1.0
        parent = mask.main()
        if not number or parent is None:
            return None
        gain *= 1 / number if mask.op == "div" else number
        mask = parent
    rate = _rate(mask)
    return None if rate is None else (rate, gain)


def _rate(mask: Node) -> float | None:
    """Of entries that a random mask sets to 0."""
    if mask.op == "bernoulli":
        kept = number_of(mask, 1) if len(mask.args) > 1 else _default(mask) or _uniform(mask.args[0])
        return None if kept is None else 1 - kept
    bound = number_of(mask, 1)
    if bound is None or mask.op not in _COMPARED or mask.args[0].op not in _UNIFORM:
        return None
    return _COMPARED[mask.op](bound)


def _default(mask: Node) -> float | None:
    """The probability that `x.bernoulli_()` takes without one; `torch.bernoulli(x)` has its own in x."""
    arguments = () if mask.func is None else mask.func._schema.arguments
    return next((float(x.default_value) for x in arguments if x.name == "p" and x.has_default_value()), None)


def _uniform(probabilities: Node) -> float | None:
    value = evaluate(probabilities)
    known = value is not None and value.numel() and bool((value == value.flatten()[0]).all())
    return float(value.flatten()[0]) if known and value is not None else None


def number_of(node: Node, position: int) -> float | None:
    """The argument at `position` as a number, also where the model's code made a tensor of it."""
    arg = node.args[position] if position < len(node.args) else None
    if isinstance(arg, Node):
        value = evaluate(arg)
        return float(value) if value is not None and value.numel() == 1 else None
    return node.number(position)
