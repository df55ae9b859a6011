"""Reading the logits: from what entered the softmax back to the product of q and k, outermost step first.

What an operation means on the way is a row of `READERS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from sqrtdk.tracing.read.factors import of_the_data, read_factor
from sqrtdk.tracing.read.masks import HIDDEN, read_addend, read_overwritten
from sqrtdk.tracing.read.side import follow
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import Beside, Clamp, Hide, Offset, Scale, Sink, Softcap, Step, Unknown
from sqrtdk.tracing.steps.placed import Placed, to_softmax
from sqrtdk.tracing.steps.unknown import ZERO_ONE_FACTOR
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.constants import evaluate
from sqrtdk.tracing.watch.graph import Node

_FILL = -1e3  # written over logits, a number below this hides


@dataclass(frozen=True, slots=True)
class Fork:
    """Where logits of several products were put side by side: the node, and what follows it, innermost first."""

    node: Node
    steps: tuple[Step, ...]
    views: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """The steps, innermost (nearest to the product) first, and the views that lead from product to softmax.

    `fork` is where other products join, nearest to the softmax; the steps are then those of the first product.
    """

    product: Node | None
    steps: tuple[Step, ...] = ()
    views: tuple[Node, ...] = ()
    fork: Fork | None = None

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the operations that could not be followed."""
        return tuple(step.name for step in self.steps if isinstance(step, Unknown))


@dataclass(frozen=True, slots=True)
class _Link:
    """One operation on the way.

    Attributes:
        node: its result.
        main: the operand that carries the product.
        views: the views after it, innermost first.
        later: the steps after it, innermost first.
    """

    node: Node
    main: Node
    views: tuple[Node, ...]
    later: tuple[Step, ...]

    @property
    def position(self) -> int | None:
        """Of the first other operand that is a tensor."""
        return next((i for i, arg in enumerate(self.node.args) if isinstance(arg, Node) and arg is not self.main), None)


def read_chain(node: Node, steps: tuple[Step, ...] = (), views: tuple[Node, ...] = ()) -> Chain:
    """Walk from the softmax's input `node` back to the product.

    Args:
        node: what entered the softmax, or a tensor on the way to it.
        steps: those between it and the softmax.
        views: those between it and the softmax.
    """
    fork: Fork | None = None
    while node.product is None:
        main = node.main() if node.products else None
        if main is None:
            return Chain(None, steps, views, fork)
        if node.op == "overwrite" or (node.op == "cat" and sum(bool(p.products) for p in node.parents()) > 1):
            fork = fork or Fork(node, steps, views)
        if node.op in ops.VIEWS:
            views = (node, *views)
        elif node.op not in ops.SAME:
            read = READERS.get(node.op, _unknown)
            steps = (*reversed(read(_Link(node, main, views, steps))), *steps)
        if node.op == "cat":
            views = (node, *views)
        node = main
    steps = (*reversed(_beside_product(node, views)), *steps)
    return Chain(node, _fold_caps(steps), views, fork)


# -- one reader an operation: its steps, outermost first ---------------------------------------------------------------


def _unknown(link: _Link) -> tuple[Step, ...]:
    return (Unknown(link.node.op),)


def _multiplied(link: _Link) -> tuple[Step, ...]:
    node = link.node
    index = 1 if node.args[0] is link.main else 0
    factor = read_factor(node, index, "logits", heads_axis=-3)
    value = node.operands.get(index)
    value = evaluate(node.args[index]) if value is not None and value.is_meta else value
    if factor is None and node.op == "mul" and value is not None and _is_binary(value):
        # z * m before z + -1e4 * (1 - m) is the mask's first half; alone, it leaves hidden keys a logit of 0.
        return () if _hidden_later(value, link) else (Unknown(ZERO_ONE_FACTOR),)
    factor = of_the_data(node.args[index], factor)
    if factor is None or (node.op == "div" and index == 0):
        return (Unknown(f"{node.op} by a tensor"),)
    return (Scale(factor),)


def _negated(link: _Link) -> tuple[Step, ...]:
    return (Scale(Factor(-1.0, "logits", "number")),)


def _summed(link: _Link) -> tuple[Step, ...]:
    node, position = link.node, link.position
    if position is None:
        return ()  # a number added to every logit changes nothing
    other, value = node.args[position], node.operands.get(position)
    sign = -1.0 if node.op == "sub" else 1.0
    if _is_own_maximum(other, link.main):
        known = value is not None and not value.is_meta
        return (Offset(Placed(value * sign, link.views, node.shape) if known and value is not None else None),)
    return _addends(other, value, float(node.kwargs.get("alpha", 1)) * sign, link.views, node.shape)


def _tanh(link: _Link) -> tuple[Step, ...]:
    return (Softcap(),)


def _filled(link: _Link) -> tuple[Step, ...]:
    node = link.node
    condition = node.operands.get(1)
    return (read_overwritten(condition, node.args[1], node.number(2), link.views, node.shape, keep=False),)


def _selected(link: _Link) -> tuple[Step, ...]:
    node = link.node
    kept = node.args[1] is link.main
    fill = node.number(2 if kept else 1)
    return (read_overwritten(node.operands.get(0), node.args[0], fill, link.views, node.shape, keep=kept),)


def _written(link: _Link) -> tuple[Step, ...]:
    fill = link.node.number(2)
    return (Hide("bool", fill),) if fill is not None and fill < _FILL else _unknown(link)


def _clamped(link: _Link) -> tuple[Step, ...]:
    """A clamp that can bite; one at finfo.min only keeps infinities out."""
    node = link.node
    low, high = (node.number(1), node.number(2)) if node.op == "clamp" else (None, None)
    if node.op in ("clamp_min", "maximum"):
        low = node.number(1)
    elif node.op in ("clamp_max", "minimum"):
        high = node.number(1)
    bounds = [f"{bound:.4g}" if bound is not None and abs(bound) < -HIDDEN else "" for bound in (low, high)]
    return (Clamp(", ".join(bounds)),) if any(bounds) else ()


def _joined(link: _Link) -> tuple[Step, ...]:
    """A column of sinks beside the logits, or logits of another product, whose scale must be the same."""
    others = [p for p in link.node.parents() if p is not link.main and p.products]
    if not others:
        return (Sink(),)
    scales = [_scale_of(branch) for branch in (link.main, *others)]
    if None in scales or any(abs(s - scales[0]) > 1e-3 * abs(scales[0]) for s in scales if s and scales[0]):
        return (Unknown("logits of products with unlike scales side by side"),)
    return (Beside(len(scales)),)


def _heads_mixed(link: _Link) -> tuple[Step, ...]:
    return (Unknown("heads mixed"),)


READERS: dict[str, Callable[[_Link], tuple[Step, ...]]] = {
    "mul": _multiplied,
    "div": _multiplied,
    "neg": _negated,
    "add": _summed,
    "sub": _summed,
    "rsub": _summed,
    "tanh": _tanh,
    "masked_fill": _filled,
    "where": _selected,
    "index_put": _written,
    "cat": _joined,
    "bmm": _heads_mixed,
    "convolution": _heads_mixed,
    "_convolution": _heads_mixed,
    **dict.fromkeys(ops.CLAMPS, _clamped),
}


# -- what they look at -------------------------------------------------------------------------------------------------


def _addends(
    other: Node, value: Tensor | None, alpha: float, views: tuple[Node, ...], shape: tuple[int, ...]
) -> tuple[Step, ...]:
    return read_addend(other, value, alpha, views, shape)[::-1]


def _scale_of(branch: Node) -> float | None:
    """Product of the factors on the way to one of several products; None where it can't be followed."""
    chain = read_chain(branch)
    if chain.product is None or chain.unknown:
        return None
    operands = [arg for arg in chain.product.args if isinstance(arg, Node)][-2:]
    sides = [follow(operand, where) for operand, where in zip(operands, "qk", strict=True)]
    factors = [factor for side in sides for factor in side.factors]
    factors += [step.factor for step in chain.steps if isinstance(step, Scale)]
    if any(side.unknown for side in sides) or any(factor.value is None for factor in factors):
        return None
    return math.prod(factor.value for factor in factors if factor.value is not None)


def _hidden_later(factor: Tensor, link: _Link) -> bool:
    """Whether the steps after the multiplication hide every key that the 0/1 `factor` sets to 0."""
    try:
        zeros = to_softmax((factor == 0).expand(link.node.shape), link.views)
        for step in link.later:
            if isinstance(step, Hide) and step.visible is not None:
                zeros = zeros & step.visible.at_softmax()
    except RuntimeError:
        return False
    return not bool(zeros.any())


def _is_binary(value: Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _is_own_maximum(other: Node, main: Node) -> bool:
    """Z - max(z): the softmax does not see it."""
    while other.op in ops.VIEWS | ops.SAME | {"masked_fill", "maximum"}:
        parent = other.main()
        if parent is None:
            return False
        other = parent
    return other.op in ("amax", "max", "logsumexp") and bool(other.products & main.products)


def _beside_product(node: Node, views: tuple[Node, ...]) -> tuple[Step, ...]:
    """What baddbmm and addmm do besides the product, outermost first."""
    if node.op not in ("baddbmm", "addmm", "addbmm"):
        return ()
    alpha, beta = float(node.kwargs.get("alpha", 1)), float(node.kwargs.get("beta", 1))
    steps: tuple[Step, ...] = ()
    if beta:
        steps = _addends(node.args[0], node.operands.get(0), beta, views, node.shape)
    return steps if alpha == 1 else (*steps, Scale(Factor(alpha, "logits", f"{node.op} alpha")))


def _fold_caps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """X / c, tanh, times c is one softcap; what does not cancel stays a scale."""
    folded: list[Step] = []
    used: set[int] = set()
    for i, step in enumerate(steps):
        if i in used:
            continue
        if not isinstance(step, Softcap):
            folded.append(step)
            continue
        after = next((j for j in range(i + 1, len(steps)) if isinstance(steps[j], Scale)), None)
        cap = _value(steps[after]) if after is not None else 1.0
        if after is not None:
            used.add(after)
        inner = _value(folded[-1]) if folded else None
        if cap and inner and abs(inner * cap - 1) < 1e-3:
            folded.pop()
        elif cap != 1.0:
            # c tanh(f x) has slope f c and is capped at c: written c tanh((f c x) / c).
            folded.append(Scale(Factor(cap, "logits", "softcap")))
        folded.append(Softcap(cap))
    return tuple(folded)


def _value(step: Step) -> float | None:
    return step.factor.value if isinstance(step, Scale) else None
