"""Attention without a softmax, by its name: linear, sigmoid, ReLU; it has no softmax whose scale could be judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from sqrtdk.tracing.classify.contract import WITHOUT_SOFTMAX
from sqrtdk.tracing.read import chain
from sqrtdk.tracing.read.patterns import pattern
from sqrtdk.tracing.read.side import follow, unasked
from sqrtdk.tracing.steps import Expression, Hide, Scale, Step
from sqrtdk.tracing.tell.formula import product
from sqrtdk.tracing.watch.graph import Node


@dataclass(frozen=True, slots=True)
class _Curve(Step):
    """A curve in the place of the softmax."""

    name: str

    def write(self, expression: Expression) -> None:
        expression.wrap(self.name)


_CURVES = {"sigmoid": "sigmoid", "relu": "relu", "erf": "erf", "gelu": "gelu", "silu": "silu", "softplus": "softplus"}
_NAMES = {
    ("sigmoid",): "sigmoid attention",
    ("relu",): "ReLU attention",
    ("relu", "square"): "squared-ReLU attention",
    ("erf",): "Laplace attention",
    (): "linear attention",
}


def without_softmax(weights: Node) -> tuple[str, str | None]:
    """What an attention is whose `weights`, made without a softmax, met values, and their formula, where it has one."""
    with unasked():
        return _named_attention(weights)


def _named_attention(weights: Node) -> tuple[str, str | None]:
    way = chain.read_chain(weights, READERS)
    curves = tuple(step.name for step in way.steps if isinstance(step, _Curve))
    name = _NAMES.get(curves)
    if way.product is None or name is None:
        return WITHOUT_SOFTMAX, None
    operands = [arg for arg in way.product.args if isinstance(arg, Node)][-2:]
    query, key = (follow(node, where) for node, where in zip(operands, "qk", strict=True))
    factors = [*query.factors, *key.factors]
    if not curves:  # which of q, k and v met first can't be told: the scale alone is
        if not all(isinstance(step, (Scale, Hide)) for step in way.steps):
            return WITHOUT_SOFTMAX, None
        factors += [step.factor for step in way.steps if isinstance(step, Scale)]
        known = [] if query.unknown or key.unknown else [f.value for f in factors if f.value not in (None, 1.0)]
        scaled = f", scaled by {' and '.join(f'{value:.4g}' for value in known)}" if known else ""
        return f"{name}: {WITHOUT_SOFTMAX}{scaled}", None
    expression = Expression(product(query, key))
    for factor in factors:
        expression.scale(factor)
    for step in way.steps:
        _named(step).write(expression)
    return f"{name}: {WITHOUT_SOFTMAX}", expression.text()


def _named(step: Step) -> Step:
    if not isinstance(step, Hide) or step.visible is None:
        return step
    return replace(step, name=pattern(step.visible.at_softmax()))


# -- what stands in the place of the softmax ---------------------------------------------------------------------------


def _curved(link: chain.Link) -> tuple[Step, ...]:
    return (_Curve(_CURVES[link.node.op]),)


def _raised(link: chain.Link) -> tuple[Step, ...]:
    return (_Curve("square" if link.node.number(1) == 2 else "power"),)


def _multiplied(link: chain.Link) -> tuple[Step, ...]:
    """A square written as z * z, the division by a row's sum; else what it is among logits."""
    node = link.node
    other = node.args[1 if node.args[0] is link.main else 0]
    if node.op == "mul" and other is link.main:
        return (_Curve("square"),)
    if node.op == "div" and isinstance(other, Node) and other.products & link.main.products:
        return ()
    return chain.READERS[node.op](link)


READERS: dict[str, Callable[[chain.Link], tuple[Step, ...]]] = {
    **chain.READERS,
    **dict.fromkeys(_CURVES, _curved),
    "pow": _raised,
    "mul": _multiplied,
    "div": _multiplied,
}
