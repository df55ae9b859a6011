"""Reading the logits: from what entered the softmax back to the product of q and k, outermost step first."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from sqrtdk.trace import ops
from sqrtdk.trace.constants import evaluate
from sqrtdk.trace.factors import describe, of_the_data, read_factor
from sqrtdk.trace.graph import Node, replay
from sqrtdk.trace.lineage import follow
from sqrtdk.trace.masks import BESIDES_MASK, HIDDEN, Addend, read_addend
from sqrtdk.trace.records import Factor, Stage


@dataclass(slots=True)
class Step:
    """One step from product to softmax: exactly one of the fields is set beside `kind`."""

    # "scale", "bias", "mask", "softcap", "sinks", "joined" (other products beside), "clamp", "offset" (a row's own
    # maximum), "unknown"
    kind: str
    factor: Factor | None = None
    addend: Addend | None = None
    cap: float | None = None
    name: str = ""


@dataclass(slots=True)
class Chain:
    """The steps, innermost (nearest to the product) first, and the views that lead from product to softmax."""

    product: Node | None
    steps: list[Step] = field(default_factory=list)
    views: list[Node] = field(default_factory=list)

    @property
    def unknown(self) -> list[str]:
        """Names of the operations that could not be followed."""
        return [step.name for step in self.steps if step.kind == "unknown"]

    def stages(self) -> list[Stage]:
        """The steps as stages of a record."""
        stages = []
        for step in self.steps:
            if step.kind != "offset":
                stages.append(Stage("logits", step.kind, _detail(step)))
            if step.kind == "bias" and step.addend is not None and step.addend.kind.endswith(BESIDES_MASK):
                stages.append(Stage("logits", "mask", "in the same tensor"))
        return stages


def _detail(step: Step) -> str:
    if step.factor is not None:
        return describe(step.factor)
    if step.addend is not None:
        return step.addend.kind.removesuffix(BESIDES_MASK)
    return f"{step.cap:.4g}" if step.cap is not None else step.name


def read_chain(node: Node) -> Chain:
    """Walk from the softmax's input `node` back to the product."""
    steps: list[Step] = []
    views: list[Node] = []
    while not node.is_product:
        if not node.products:
            return Chain(None, steps[::-1], views[::-1])
        main = node.main()
        if main is None:
            return Chain(None, steps[::-1], views[::-1])
        if node.op in ops.VIEWS:
            views.append(node)
        elif node.op not in ops.SAME:
            steps.extend(_read_step(node, main, views, steps))
        if node.op == "cat":
            views.append(node)
        node = main
    steps.extend(_read_product(node, views))
    return Chain(node, _fold_caps(steps[::-1]), views[::-1])


def _read_step(node: Node, main: Node, views: list[Node], steps: list[Step]) -> list[Step]:
    position = next((i for i, arg in enumerate(node.args) if isinstance(arg, Node) and arg is not main), None)
    if node.op in ("mul", "div"):
        index = 1 if node.args[0] is main else 0
        factor = read_factor(node, index, "logits", heads_axis=-3)
        value = node.operands.get(index)
        value = evaluate(node.args[index]) if value is not None and value.is_meta else value
        if factor is None and node.op == "mul" and value is not None and _is_binary(value):
            # z * m before z + -1e4 * (1 - m) is the mask's first half; alone, it leaves hidden keys a logit of 0.
            hidden_later = _hidden_later(value, node, views, steps)
            return [] if hidden_later else [Step("unknown", name=ZERO_ONE_FACTOR)]
        factor = of_the_data(node.args[index], factor)
        if factor is None or (node.op == "div" and index == 0):
            return [Step("unknown", name=f"{node.op} by a tensor")]
        return [Step("scale", factor=factor)]
    if node.op == "neg":
        return [Step("scale", factor=Factor(-1.0, "logits", "number"))]
    if node.op in ("add", "sub", "rsub"):
        return _read_sum(node, main, views, position)
    if node.op == "tanh":
        return [Step("softcap")]
    if node.op == "masked_fill":
        mask = node.operands.get(1)
        fill = node.number(2)
        return [Step("mask", addend=_hide(mask, node.args[1], fill, views[::-1], node.shape, keep=False))]
    if node.op == "where":
        kept = node.args[1] is main
        fill = node.number(2 if kept else 1)
        return [Step("mask", addend=_hide(node.operands.get(0), node.args[0], fill, views[::-1], node.shape, kept))]
    if node.op == "index_put":
        fill = node.number(2)
        if fill is not None and fill < _FILL:
            return [Step("mask", addend=Addend("mask", "bool", None, None, fill, views[::-1], node.shape, False))]
    if node.op in ops.CLAMPS:
        return _read_clamp(node)
    if node.op == "cat":
        return [_joined(node, main)]
    if node.op in ("bmm", "convolution", "_convolution"):
        return [Step("unknown", name="heads mixed")]
    return [Step("unknown", name=node.op)]


def _joined(node: Node, main: Node) -> Step:
    """A column of sinks beside the logits, or logits of another product, whose scale must be the same."""
    others = [p for p in node.parents() if p is not main and p.products]
    if not others:
        return Step("sinks", name="sinks")
    scales = [_scale_of(branch) for branch in (main, *others)]
    if None in scales or any(abs(s - scales[0]) > 1e-3 * abs(scales[0]) for s in scales if s and scales[0]):
        return Step("unknown", name="logits of products with unlike scales side by side")
    return Step("joined", name=f"logits of {len(scales)} products side by side")


def _scale_of(branch: Node) -> float | None:
    """Product of the factors on the way to one of several products; None where it can't be followed."""
    chain = read_chain(branch)
    if chain.product is None or chain.unknown:
        return None
    operands = [arg for arg in chain.product.args if isinstance(arg, Node)][-2:]
    sides = [follow(operand, where) for operand, where in zip(operands, "qk", strict=True)]
    factors = [factor for side in sides for factor in side.factors]
    factors += [step.factor for step in chain.steps if step.factor is not None]
    if any(side.unknown for side in sides) or any(factor.value is None for factor in factors):
        return None
    return math.prod(factor.value for factor in factors if factor.value is not None)


def _hidden_later(factor: Tensor, node: Node, views: list[Node], later: list[Step]) -> bool:
    """Whether the steps after the multiplication hide every key that the 0/1 `factor` sets to 0."""
    try:
        zeros = to_logits((factor == 0).expand(node.shape), views[::-1])
        for step in later:
            if step.addend is not None and step.addend.visible is not None:
                zeros = zeros & to_logits(step.addend.visible.expand(step.addend.shape), step.addend.views)
    except RuntimeError:
        return False
    return not bool(zeros.any())


ZERO_ONE_FACTOR = "mul by a 0/1 mask"
_FILL = -1e3  # written over logits, a number below this hides


def _is_binary(value: Tensor) -> bool:
    return bool(((value == 0) | (value == 1)).all())


def _read_clamp(node: Node) -> list[Step]:
    """A clamp that can bite; one at finfo.min only keeps infinities out."""
    low, high = (node.number(1), node.number(2)) if node.op == "clamp" else (None, None)
    if node.op in ("clamp_min", "maximum"):
        low = node.number(1)
    elif node.op in ("clamp_max", "minimum"):
        high = node.number(1)
    bounds = [f"{bound:.4g}" if bound is not None and abs(bound) < -HIDDEN else "" for bound in (low, high)]
    return [Step("clamp", name=", ".join(bounds))] if any(bounds) else []


def _hide(
    mask: Tensor | None, node: object, fill: float | None, views: list[Node], shape: tuple[int, ...], keep: bool
) -> Addend:
    visible = None
    if mask is not None and mask.is_meta and isinstance(node, Node):
        mask = evaluate(node)
    if mask is not None and not mask.is_meta:
        visible = mask if keep else ~mask
    return Addend("mask", "bool", None, visible, -math.inf if fill is None else fill, views, shape, False)


def _read_sum(node: Node, main: Node, views: list[Node], position: int | None) -> list[Step]:
    if position is None:
        return []  # a number added to every logit changes nothing
    other = node.args[position]
    value = node.operands.get(position)
    sign = -1.0 if node.op == "sub" else 1.0
    alpha = node.kwargs.get("alpha", 1)
    if _is_own_maximum(other, main):
        value = None if value is None or value.is_meta else value * sign
        return [Step("offset", addend=Addend("offset", "float", value, None, None, views[::-1], node.shape, False))]
    return _addend_steps(other, value, float(alpha) * sign, views[::-1], node.shape)


def _addend_steps(
    other: Node, value: Tensor | None, alpha: float, views: list[Node], shape: tuple[int, ...]
) -> list[Step]:
    addend = read_addend(other, value, alpha, views, shape)
    return [] if addend is None else [Step("mask" if addend.kind == "mask" else "bias", addend=addend)]


def _is_own_maximum(other: Node, main: Node) -> bool:
    """Z - max(z): the softmax does not see it."""
    while other.op in ops.VIEWS | ops.SAME | {"masked_fill", "maximum"}:
        parent = other.main()
        if parent is None:
            return False
        other = parent
    return other.op in ("amax", "max", "logsumexp") and bool(other.products & main.products)


def _read_product(node: Node, views: list[Node]) -> list[Step]:
    """What baddbmm and addmm do besides the product."""
    if node.op not in ("baddbmm", "addmm", "addbmm"):
        return []
    alpha, beta = float(node.kwargs.get("alpha", 1)), float(node.kwargs.get("beta", 1))
    steps = []
    if beta:
        steps.extend(_addend_steps(node.args[0], node.operands.get(0), beta, views[::-1], node.shape))
    if alpha != 1:
        steps.append(Step("scale", factor=Factor(alpha, "logits", f"{node.op} alpha")))
    return steps


def _fold_caps(steps: list[Step]) -> list[Step]:
    """X / c, tanh, times c is one softcap; what does not cancel stays a scale."""
    folded: list[Step] = []
    used: set[int] = set()
    for i, step in enumerate(steps):
        if i in used:
            continue
        if step.kind == "softcap":
            after = next((j for j in range(i + 1, len(steps)) if steps[j].kind == "scale"), None)
            step.cap = _value(steps[after]) if after is not None else 1.0
            if after is not None:
                used.add(after)
            inner = _value(folded[-1]) if folded and folded[-1].kind == "scale" else None
            if step.cap and inner and abs(inner * step.cap - 1) < 1e-3:
                folded.pop()
            elif step.cap != 1.0:
                # c tanh(f x) has slope f c and is capped at c: written c tanh((f c x) / c).
                folded.append(Step("scale", factor=Factor(step.cap, "logits", "softcap")))
        folded.append(step)
    return folded


def _value(step: Step) -> float | None:
    return step.factor.value if step.factor is not None else None


def to_logits(value: Tensor, views: list[Node]) -> Tensor:
    """Bring a tensor from an earlier layout of the chain into the softmax's, by the same views, innermost first."""
    for view in views:
        if view.op == "cat":  # a sink column: it carries nothing of `value`
            dim = int(view.args[1]) % value.dim() if len(view.args) > 1 else 0
            column = value.narrow(dim, 0, 1).expand(
                *[view.shape[dim] - n if d == dim else n for d, n in enumerate(value.shape)]
            )
            value = torch.cat([value, column], dim)
        else:
            value = replay(view, value)
    return value
