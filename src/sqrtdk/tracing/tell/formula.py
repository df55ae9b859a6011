"""Writing the formula that reached the softmax the way a person would: `softmax(0.125 * rope(q).rope(k) + causal)`.

Also of an attention that could not be followed to its end, up to the point where it was lost, and of one that has no
softmax: linear, sigmoid, ReLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sqrtdk.tracing.lower.contract import WITHOUT_SOFTMAX
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.spine import chain
from sqrtdk.tracing.spine.eager import read_eager
from sqrtdk.tracing.spine.lineage import follow, unasked
from sqrtdk.tracing.spine.masks import pattern
from sqrtdk.tracing.spine.reading import Reading
from sqrtdk.tracing.spine.side import Side
from sqrtdk.tracing.steps import Expression, Hide, Scale, Sink, Step, Unknown
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.node import Node, SoftmaxEntry, Weighing
from sqrtdk.tracing.tape.recorder import Operands, Unweighted
from sqrtdk.tracing.tell.sight import look

Lost = Weighing | Unweighted | Operands
_WRITTEN = ("norm", "rope", "xpos", "decay", "permuted")


def write(reading: Reading, steps: Iterable[Step]) -> str:
    """The whole formula.

    Args:
        reading: the score, and the factors on q and k.
        steps: from the product outwards, the masks with their names.
    """
    softmax = f"softmax({_logits(reading, steps)})"
    return f"mask * {softmax}" if reading.carried.remasked else softmax


def _logits(reading: Reading, steps: Iterable[Step]) -> str:
    """What enters the softmax."""
    if reading.distance is None:
        scored = f"{reading.score}(q, k)" if reading.score else _product(reading.query, reading.key)
        expression = _scaled(scored, (*reading.query.factors, *reading.key.factors))
    else:
        sides = f"{_operand(reading.query, 'q')} - {_operand(reading.key, 'k')}"
        expression = Expression(f"|{sides}|" + ("^2" if reading.distance == 2 else ""))
    sinks = []
    for step in steps:
        if not isinstance(step, Unknown):
            expression.settle()
        step.write(expression)
        sinks += ["sinks"] if isinstance(step, Sink) else []
    return expression.text(sinks)


def _product(query: Side, key: Side) -> str:
    """`q.k`, `rope(q).rope(k)`."""
    return f"{_side(query, 'q')}.{_side(key, 'k')}"


def _operand(side: Side, name: str) -> str:
    """`0.125 * rope(q)`: one operand of an operation, its factors included."""
    return _scaled(_side(side, name), side.factors).text()


def _scaled(text: str, factors: Iterable[Factor]) -> Expression:
    expression = Expression(text)
    for factor in factors:
        expression.scale(factor)
    return expression


def _side(side: Side, letter: str) -> str:
    """`q`, `rms(q)`, `rope(q)`, `rope(l2(q))`, with unknown operations named."""
    text = letter
    names = [stage.detail if stage.name == "norm" else stage.name for stage in side.stages if stage.name in _WRITTEN]
    for name in dict.fromkeys(names):
        text = f"{name or 'norm'}({text})"
    if side.unknown:
        text = f"unknown({', '.join(dict.fromkeys(side.unknown))})({text})"
    return text


def unknown_of(reading: Reading) -> tuple[str, ...]:
    """Operations that could not be followed, each once."""
    on_logits = [step.name for step in reading.steps if isinstance(step, Unknown)]
    on_weights = [f"{name} on the weights" for name in reading.carried.changes]
    return tuple(dict.fromkeys([*reading.query.unknown, *reading.key.unknown, *on_logits, *on_weights]))


# -- what was lost on the way ------------------------------------------------------------------------------------------


def tell_lost(seen: Lost) -> str | None:
    """The formula of what was seen; None if there is no score of q and k in it.

    `softmax(0.125 * q.k)` of a softmax, `0.125 * q.k + causal` of logits that met values as they are,
    `attend(0.125 * q, rope(k), v)` of an operation whose computation is not seen.
    """
    with unasked():
        if isinstance(seen, Operands):
            operands = (_operand(follow(node, name), name) for name, node in seen.nodes.items())
            return f"{seen.name}({', '.join(operands)})"
        if isinstance(seen, Weighing):
            logits = seen
        else:
            entry, x = SoftmaxEntry("", tuple(seen.logits.shape), ""), seen.logits
            logits = Weighing(seen.node, x, x, -1, "", entry, flex=False, stored=x.dtype)
        try:
            reading = read_eager(logits, logits.weights, logits.weights, heads_hint=None)
        except Exception:  # a reading that fails is one of the ways to be lost
            return _by_names(seen.node)
        if isinstance(reading, str) or (reading.operands is None and reading.score != "additive"):
            return None
        return (_logits if isinstance(seen, Unweighted) else write)(reading, look(reading).steps)


def _by_names(node: Node) -> str | None:
    """The operations between the product and the softmax by their names alone."""
    names: list[str] = []
    while node.product is None:
        main = node.main() if node.products else None
        if main is None:
            return None
        names += [] if node.op in ops.PASSING else [node.op]
        node = main
    return f"softmax(unknown({', '.join(dict.fromkeys(reversed(names)))})(q.k))"


# -- what has no softmax: by its name, as there is no scale to judge ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Curve(Step):
    """A curve in the place of the softmax."""

    name: str

    def write(self, expression: Expression) -> None:
        expression.wrap(self.name)


_CURVES = ("sigmoid", "relu", "erf", "gelu", "silu", "softplus")
_NAMES = {
    ("sigmoid",): "sigmoid attention",
    ("relu",): "ReLU attention",
    ("relu", "square"): "squared-ReLU attention",
    ("erf",): "Laplace attention",
    (): "linear attention",
}


def without_softmax(seen: Unweighted) -> tuple[str, str | None]:
    """What an attention is whose weights, made without a softmax, met values, and their formula, where it has one."""
    with unasked():
        way = chain.read_chain(seen.node, _READERS)
        curves = tuple(step.name for step in way.steps if isinstance(step, _Curve))
        name = _NAMES.get(curves)
        if way.product is None or name is None:
            return WITHOUT_SOFTMAX, None
        operands = [arg for arg in way.product.args if isinstance(arg, Node)][-2:]
        query, key = (follow(node, where) for node, where in zip(operands, "qk", strict=True))
    factors = [*query.factors, *key.factors]
    if curves:
        expression = _scaled(_product(query, key), factors)
        for step in way.steps:
            if isinstance(step, Hide) and step.visible is not None:
                visible = step.visible.at_softmax()
                step = replace(step, name=pattern(visible if seen.keys == -1 else visible.mT))
            step.write(expression)
        return f"{name}: {WITHOUT_SOFTMAX}", expression.text()
    # which of q, k and v met first can't be told: the scale alone is
    if not all(isinstance(step, (Scale, Hide)) for step in way.steps):
        return WITHOUT_SOFTMAX, None
    factors += [step.factor for step in way.steps if isinstance(step, Scale)]
    known = [] if query.unknown or key.unknown else [f.value for f in factors if f.value not in (None, 1.0)]
    scaled = f", scaled by {' and '.join(f'{value:.4g}' for value in known)}" if known else ""
    return f"{name}: {WITHOUT_SOFTMAX}{scaled}", None


def _curved(link: chain.Link) -> tuple[Step, ...]:
    return (_Curve(link.node.op),)


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


_READERS: dict[str, Callable[[chain.Link], tuple[Step, ...]]] = {
    **chain.READERS,
    **dict.fromkeys(_CURVES, _curved),
    "pow": _raised,
    "mul": _multiplied,
    "div": _multiplied,
}
