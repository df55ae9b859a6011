"""Writes the formula of an attention as a person would: `softmax(0.125 * rope(q).rope(k) + causal)`.

It also covers attentions that could not be followed to their end, up to the point where they were lost, and attentions
without a softmax: linear, sigmoid, ReLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from sqrtdk.masks.band import mask_pattern
from sqrtdk.messages import Message, joined
from sqrtdk.tracing.calls.visible_keys import combined_masks
from sqrtdk.tracing.readback import chain
from sqrtdk.tracing.readback.eager import read_eager
from sqrtdk.tracing.readback.lineage import follow_side, unprobed
from sqrtdk.tracing.readback.reading import Reading
from sqrtdk.tracing.readback.side import ProductSide
from sqrtdk.tracing.records import CallFault, Factor, NotMeasuredCode
from sqrtdk.tracing.steps import Expression, Hide, LearnedSinks, Scale, Step, Unknown
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.node import Node, SoftmaxEntry, SoftmaxRun, back
from sqrtdk.tracing.tape.recorder import Operands, Unweighted

Lost = SoftmaxRun | Unweighted | Operands
_MOST_FORMULA_STEPS = 24  # steps that a formula writes; the deepest chain of a released model has half as many
_WRITTEN = ("norm", "rope", "xpos", "decay", "permuted")


def write_formula(reading: Reading, steps: Iterable[Step]) -> str:
    """Return the whole formula.

    Args:
        reading: Supplies the score and the factors on q and k.
        steps: Steps from the product outwards, with named masks.
    """
    softmax = f"softmax({_logits(reading, steps)})"
    return f"mask * {softmax}" if reading.weight_steps.remasked else softmax


def _logits(reading: Reading, steps: Iterable[Step]) -> str:
    """Return the formula of the logits."""
    if reading.distance is None:
        scored = f"{reading.score}(q, k)" if reading.score else _product(reading.query, reading.key)
        expression = _scaled(scored, (*reading.query.factors, *reading.key.factors))
    else:
        sides = f"{_operand(reading.query, 'q')} - {_operand(reading.key, 'k')}"
        expression = Expression(f"|{sides}|{reading.distance.text}")
    sinks, steps = [], list(steps)
    middle = (
        range(_MOST_FORMULA_STEPS // 2, len(steps) - _MOST_FORMULA_STEPS // 2)
        if len(steps) > _MOST_FORMULA_STEPS
        else range(0)
    )
    for i, step in enumerate(steps):
        if i in middle:  # a recurrence on the logits: z = decay * z + update, once per token
            if i == middle[0]:
                expression.wrap("...")
            continue
        if not isinstance(step, Unknown):
            expression.settle()
        step.write(expression)
        sinks += ["sinks"] if isinstance(step, LearnedSinks) else []
    return expression.text(sinks)


def _product(query: ProductSide, key: ProductSide) -> str:
    """Return the product, such as `q.k` or `rope(q).rope(k)`."""
    return f"{_side(query, 'q')}.{_side(key, 'k')}"


def _operand(side: ProductSide, name: str) -> str:
    """Return one operand with its factors, such as `0.125 * rope(q)`."""
    return _scaled(_side(side, name), side.factors).text()


def _scaled(text: str, factors: Iterable[Factor]) -> Expression:
    expression = Expression(text)
    for factor in factors:
        expression.scale(factor)
    return expression


def _side(side: ProductSide, letter: str) -> str:
    """Return one operand without factors: `q`, `rms(q)`, `rope(l2(q))`, `unknown(sort)(q)`."""
    text = letter
    names = [stage.detail if stage.name == "norm" else stage.name for stage in side.stages if stage.name in _WRITTEN]
    for name in dict.fromkeys(names):
        text = f"{name or 'norm'}({text})"
    if side.unknown:
        text = f"unknown({', '.join(dict.fromkeys(side.unknown))})({text})"
    return text


def unknown_of(reading: Reading) -> tuple[str, ...]:
    """Return the names of the operations that could not be followed, each once.

    They are those on q, on k and on the logits, and those that change the weights after the softmax.
    """
    on_logits = [step.name for step in reading.steps if isinstance(step, Unknown)]
    on_weights = [Message("trace.step.on_weights", name=change.name) for change in reading.weight_steps.changes]
    return tuple(dict.fromkeys([*reading.query.unknown, *reading.key.unknown, *on_logits, *on_weights]))


def faults_of(reading: Reading) -> tuple[CallFault, ...]:
    """Return the codes of what is wrong with the operations of `unknown_of`, each once; () if nothing is."""
    faults: list[CallFault] = ["skewed"] if reading.query.skewed or reading.key.skewed else []
    codes = (step.code for step in reading.steps if isinstance(step, Unknown))
    faults += [code for code in codes if code is not None and code != "zero_one_factor"]
    faults += ["other_sum"] if reading.weight_steps.has("other_sum") else []
    return tuple(dict.fromkeys(faults))


# -- what was lost on the way ------------------------------------------------------------------------------------------


def lost_formula(lost: Lost) -> str | None:
    """Return the formula up to the point of loss, or None if it contains no score of q and k.

    The result is `softmax(0.125 * q.k)` for a softmax, `0.125 * q.k + causal` for logits that were multiplied by the
    values without one, and `attend(0.125 * q, rope(k), v)` for an opaque operation.
    """
    with unprobed():
        if isinstance(lost, Operands):
            operands = (_operand(follow_side(node, name), name) for name, node in lost.nodes.items())
            return f"{lost.name}({', '.join(operands)})"
        if isinstance(lost, SoftmaxRun):
            logits = lost
        else:
            entry, x = SoftmaxEntry("", tuple(lost.logits.shape)), lost.logits
            logits = SoftmaxRun(lost.node, x, x, -1, "", entry, flex=False, stored=x.dtype)
        try:
            reading = read_eager(logits, logits.weights, logits.weights, heads_hint=None)
        except Exception:  # a reading may fail for the same reason for which the attention was lost
            return _by_names(lost.node)
        if isinstance(reading, str) or (reading.score or "").startswith("unknown"):
            return None
        if reading.operands is None and reading.score != "additive":
            return None
        return (_logits if isinstance(lost, Unweighted) else write_formula)(reading, combined_masks(reading).steps)


def _by_names(node: Node) -> str | None:
    """Return a formula that only names the operations between the product and the softmax."""
    names: list[str] = []
    for at in back(node, None):
        if at.product is not None:
            return f"softmax(unknown({', '.join(dict.fromkeys(reversed(names)))})(q.k))"
        if not at.products:
            return None
        names += [] if at.op in ops.PASSING else [at.op]
    return None


# -- what has no softmax: by its name, as there is no scale to judge ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Curve(Step):
    """A function applied to the logits in place of the softmax: `sigmoid(q @ k.mT) @ v`."""

    name: str

    def write(self, expression: Expression) -> None:
        expression.wrap(self.name)


_WEIGHT_FUNCTIONS = ("sigmoid", "relu", "erf", "gelu", "silu", "softplus")
# With z = scale * q @ k.mT: sigmoid(z) @ v, relu(z) @ v, relu(z)**2 @ v, (1 + erf(z)) / 2 @ v and z @ v.
_WEIGHT_FUNCTION_NAMES = {
    ("sigmoid",): "trace.without_softmax.sigmoid",
    ("relu",): "trace.without_softmax.relu",
    ("relu", "square"): "trace.without_softmax.squared_relu",
    ("erf",): "trace.without_softmax.laplace",
    (): "trace.without_softmax.linear",
}


def without_softmax(weights: Unweighted) -> tuple[NotMeasuredCode | None, Message, str | None]:
    """Return what is known of an attention without a softmax: (code, kind, formula).

    Returns:
        The code of the reason why it was not measured, "picks_keys", "without_softmax" or another, or None; a text that
        names the kind of attention; and the formula of its weights, None if it could not be read.
    """
    picks, named = Message("trace.without_softmax.picks"), "trace.without_softmax.named"
    code: NotMeasuredCode | None = "picks_keys" if weights.picks else None
    unnamed = picks if weights.picks else Message("trace.without_softmax.unnamed")
    with unprobed():
        way = chain.read_chain(weights.node, _UNNORMALISED_READERS)
        curves = tuple(step.name for step in way.steps if isinstance(step, _Curve))
        name_id = _WEIGHT_FUNCTION_NAMES.get(curves)
        if way.product is None or name_id is None:
            return code, unnamed, None
        # (q @ k.mT) @ v equals q @ (k.mT @ v), so which of q, k and v met first is unknown: only the scale is reported.
        # Asked before q and k are followed, as those of a recurrence are long: z = decay * z + update, once per token.
        if not curves and not all(isinstance(step, (Scale, Hide)) for step in way.steps):
            return code, unnamed, None
        operands = [arg for arg in way.product.args if isinstance(arg, Node)][-2:]
        query, key = (follow_side(node, where) for node, where in zip(operands, "qk", strict=True))
    factors, name = [*query.factors, *key.factors], Message(name_id)
    if curves:
        expression = _scaled(_product(query, key), factors)
        for step in way.steps:
            if isinstance(step, Hide) and step.visible is not None:
                visible = step.visible.at_softmax()
                step = replace(step, name=mask_pattern(visible if weights.keys == -1 else visible.mT))
            step.write(expression)
        return code or "without_softmax", picks if weights.picks else Message(named, name=name), expression.text()
    factors += [step.factor for step in way.steps if isinstance(step, Scale)]
    known = [] if query.unknown or key.unknown else [f.value for f in factors if f.value not in (None, 1.0)]
    if not known:
        return "without_softmax", Message(named, name=name), None
    scale = joined([f"{value:.4g}" for value in known], "and")
    return "without_softmax", Message("trace.without_softmax.scaled", name=name, scale=scale), None


def _curved(link: chain.Link) -> tuple[Step, ...]:
    return (_Curve(link.node.op),)


def _raised(link: chain.Link) -> tuple[Step, ...]:
    return (_Curve("square" if link.node.number(1) == 2 else "power"),)


def _multiplied(link: chain.Link) -> tuple[Step, ...]:
    """Reads `z * z` as a square and ignores `z / z.sum(-1, keepdim=True)`; else reads the operation as on logits."""
    node = link.node
    other = node.args[1 if node.args[0] is link.main else 0]
    if node.op == "mul" and other is link.main:
        return (_Curve("square"),)
    if node.op == "div" and isinstance(other, Node) and other.products & link.main.products:
        return ()
    return chain.READERS[node.op](link)


_UNNORMALISED_READERS: dict[str, Callable[[chain.Link], tuple[Step, ...]]] = {
    **chain.READERS,
    **dict.fromkeys(_WEIGHT_FUNCTIONS, _curved),
    "pow": _raised,
    "mul": _multiplied,
    "div": _multiplied,
}
