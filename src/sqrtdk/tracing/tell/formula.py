"""Writing the formula that reached the softmax the way a person would: `softmax(0.125 * rope(q).rope(k) + causal)`."""

from __future__ import annotations

from collections.abc import Iterable

from sqrtdk.tracing.read.reading import Reading
from sqrtdk.tracing.read.side import Side
from sqrtdk.tracing.steps import Expression, Sink, Step, Unknown


def write(reading: Reading, steps: Iterable[Step]) -> str:
    """The whole formula.

    Args:
        reading: the score, and the factors on q and k.
        steps: from the product outwards, the masks with their names.
    """
    softmax = f"softmax({logits(reading, steps)})"
    return f"mask * {softmax}" if reading.carried.remasked else softmax


def logits(reading: Reading, steps: Iterable[Step]) -> str:
    """What enters the softmax."""
    expression = Expression(_scored(reading))
    for factor in (*reading.query.factors, *reading.key.factors) if reading.distance is None else ():
        expression.scale(factor)
    sinks = []
    for step in steps:
        if not isinstance(step, Unknown):
            expression.settle()
        step.write(expression)
        sinks += ["sinks"] if isinstance(step, Sink) else []
    return expression.text(sinks)


def _scored(reading: Reading) -> str:
    if reading.score:
        return f"{reading.score}(q, k)"
    if reading.distance is None:
        return product(reading.query, reading.key)
    sides = []
    for side, letter in ((reading.query, "q"), (reading.key, "k")):
        expression = Expression(_side(side, letter))
        for factor in side.factors:
            expression.scale(factor)
        sides.append(expression.text())
    return f"|{' - '.join(sides)}|" + ("^2" if reading.distance == 2 else "")


def product(query: Side, key: Side) -> str:
    """`q.k`, `rope(q).rope(k)`."""
    return f"{_side(query, 'q')}.{_side(key, 'k')}"


def operand(side: Side, name: str) -> str:
    """`0.125 * rope(q)`: one operand of an operation, its factors included."""
    expression = Expression(_side(side, name))
    for factor in side.factors:
        expression.scale(factor)
    return expression.text()


def _side(side: Side, letter: str) -> str:
    """`q`, `rms(q)`, `rope(q)`, `rope(l2(q))`, with unknown operations named."""
    text = letter
    names = [stage.detail if stage.name == "norm" else stage.name for stage in side.stages if stage.name in _WRITTEN]
    for name in dict.fromkeys(names):
        text = f"{name or 'norm'}({text})"
    if side.unknown:
        text = f"unknown({', '.join(dict.fromkeys(side.unknown))})({text})"
    return text


_WRITTEN = ("norm", "rope", "xpos", "decay")
