"""Reads the logits: walks from the softmax's input back to the product of q and k, outermost step first.

`READERS` says what each operation on the way means: the table of `operations`, and `cat`, which needs this walk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.pairs import is_additive, is_score
from sqrtdk.tracing.lower.sums import real_part
from sqrtdk.tracing.probe.replays import Rearrangement, rearrangements
from sqrtdk.tracing.readback.addends import numbers_around, numbers_over, spread_over
from sqrtdk.tracing.readback.lineage import follow_side
from sqrtdk.tracing.readback.operations import OPERATIONS, Readers, beside_product, read_residual_mixing, unknown
from sqrtdk.tracing.readback.operations import Link as Link
from sqrtdk.tracing.readback.orient import product_operands
from sqrtdk.tracing.readback.rotations import with_cancelled_decays
from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.steps import Beside, LearnedSinks, Scale, Softcap, Step, Unknown
from sqrtdk.tracing.tape import ops, places
from sqrtdk.tracing.tape.graph import before_writes, written_logits
from sqrtdk.tracing.tape.node import Node, back, origin


@dataclass(frozen=True, slots=True)
class Fork:
    """The node that joins logits of several products, by a concatenation or by writes of slices.

    Attributes:
        node: the node.
        steps: the steps after it, innermost first.
        views: the views after it, innermost first.
    """

    node: Node
    steps: tuple[Step, ...]
    views: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Chain:
    """The steps and views from the product to the softmax, innermost (nearest to the product) first.

    `product` is q . k or another score of q and k, or None if neither is there. `fork` is the join of several
    products that is nearest to the softmax; `steps` then belong to the first product.
    """

    product: Node | None
    steps: tuple[Step, ...] = ()
    views: tuple[Node, ...] = ()
    fork: Fork | None = None


def read_chain(
    node: Node,
    readers: Readers | None = None,
    *,
    until: Node | None = None,
    steps: tuple[Step, ...] = (),
    views: tuple[Node, ...] = (),
) -> Chain:
    """Walks from the softmax's input back to the product.

    Args:
        node: the softmax's input, or a tensor on the way to it.
        readers: reader of each operation; default `READERS`.
        until: logits at which the walk stops, in place of the product.
        steps: steps between `node` and the softmax.
        views: views between `node` and the softmax.
    """
    readers = READERS if readers is None else readers
    fork: Fork | None = None
    scored = not node.products and is_additive(node)
    ends = is_score if scored else _is_product
    while not ends(node) and node is not until:
        fork = fork or _fork(node, steps, views)
        if (structure := _structure(node, views)) is not None:
            inner, views, node = structure
            steps = (*inner, *steps)
            continue
        lost = None if node.products else node.lost_logits
        main = lost if node.is_root else node.main() if node.products or scored or lost or until is not None else None
        if main is None:
            return Chain(None, steps, views, fork)
        if node.is_root:
            steps = (*_written_at(node, (Unknown(node.op),)), *steps)
        elif node.op in ops.VIEWS:
            views = (node, *views)
        elif node.op not in ops.CASTS_AND_COPIES:
            read = readers.get(node.op, unknown)(Link(node, main, views, steps))
            effect = _by_effect(node, until) if any(isinstance(step, Unknown) for step in read) else None
            if effect is not None:
                factor = effect.factor("logits")
                steps = (*_written_at(node, () if factor is None else (Scale(factor),)), *steps)
                node = effect.part.source
                continue
            steps = (*_written_at(node, read), *steps)
        # A concatenation and a mixing of heads change the layout, so they are replayed like views.
        if node.op == "cat" or (node.shape != main.shape and node.op in ops.CONTRACTIONS):
            views = (node, *views)
        node = main
    if node is until:
        return Chain(node, steps, views)
    # (view_as_complex(q) @ view_as_complex(k).conj().mT).real is a product over real channels.
    if node.product is not None and node.product.dtype.is_complex:
        real = real_part(node, views)
        node, views = real or (node, views)
        steps = steps if real else (Unknown(Message("trace.step.complex_product")), *steps)
    if node.product is not None:
        steps = (*_written_at(node, beside_product(node, views)), *steps)
    return Chain(node, _fold_caps(steps), views, fork)


def _by_effect(node: Node, until: Node | None) -> Rearrangement | None:
    """Return the effect of operations without readers if they only multiply each logit by one number, else None."""
    for found in rearrangements(node):
        if any(_is_product(inner) or inner is until for inner in found.part.order):
            return None  # the span reaches past the product, so its effect is not one on the logits
        if found.in_place:
            return found
    return None


def _fork(node: Node, steps: tuple[Step, ...], views: tuple[Node, ...]) -> Fork | None:
    """Return the fork if `node` concatenates logits of several products or writes them part by part, else None."""
    joins = node.op == "overwrite" or (node.op == "cat" and sum(bool(p.products) for p in node.parents()) > 1)
    return Fork(node, steps, views) if joins else None


def _is_product(node: Node) -> bool:
    return node.product is not None


def _written_at(node: Node, steps: tuple[Step, ...]) -> Iterator[Step]:
    """Yield the steps of an operation, innermost first, with its source line."""
    at = places.place_text(node.place) if steps else None
    return (replace(step, at=step.at or at) for step in reversed(steps))


def _structure(node: Node, views: tuple[Node, ...]) -> tuple[tuple[Step, ...], tuple[Node, ...], Node] | None:
    """Return the steps of a structure of several operations, its views, and the node to go on from, or None."""
    if node.op == "overwrite":
        return _overwritten(node, views)
    if node.op == "add" and (residual := read_residual_mixing(node)) is not None:
        step, whole = residual
        return (step,), views, whole
    if node.op == "mul" and (capped := _by_its_own_tanh(node)) is not None:
        cap, logits = capped
        return tuple(_written_at(node, (Softcap(cap, by_logits=True),))), views, logits
    return None


# -- logits of several products, and logits that were written in part --------------------------------------------------


def _joined(link: Link) -> tuple[Step, ...]:
    """Reads `cat([z, sinks], -1)` as sinks, and `cat([z1, z2], -1)` as two products, whose scales must agree."""
    others = [p for p in link.node.parents() if p is not link.main and p.products]
    return _side_by_side((link.main, *others)) if others else (LearnedSinks(),)


def _side_by_side(branches: Sequence[Node]) -> tuple[Step, ...]:
    first, *others = scales = [_scale_of(branch) for branch in branches]
    if first is None or any(scale is None or abs(scale - first) > 1e-3 * abs(first) for scale in others):
        return (Unknown(Message("trace.step.unlike_products")),)
    return (Beside(len(scales)),)


def _scale_of(branch: Node) -> float | None:
    """Return the product of all factors on one of several products, or None if a step can't be followed."""
    chain = read_chain(branch)
    if chain.product is None or any(isinstance(step, Unknown) for step in chain.steps):
        return None
    left, right = product_operands(chain.product)
    sides = with_cancelled_decays(follow_side(left, "q"), follow_side(right, "k"))
    values = [step.factor.value for step in chain.steps if isinstance(step, Scale)]
    values += [factor.value for side in sides for factor in side.factors]
    known = [value for value in values if value is not None]
    return None if any(side.unknown for side in sides) or len(known) < len(values) else math.prod(known)


def _overwritten(node: Node, views: tuple[Node, ...]) -> tuple[tuple[Step, ...], tuple[Node, ...], Node] | None:
    """Return the structure of logits that were overwritten in part, or written into a larger tensor.

    `z[:, :, :, pad] = -inf` hides keys; `full = torch.zeros(...); full[..., :n] = z` surrounds z with numbers.
    """
    base, writes = before_writes(node)
    blocks = [source for write in writes if (source := written_logits(write)) is not None]
    if base.products:
        own = written_logits(writes[0])
        if own is None:
            return numbers_over(node, writes, views), views, base
        put_back = _put_back(own, base, writes[0], node, views)
        return (*put_back, *numbers_over(node, writes[1:], views)), views, base
    if not blocks:
        return None
    steps = numbers_around(node, base, writes, views) if len(blocks) == 1 else _side_by_side(blocks)
    return steps, (node, *views), blocks[0]


def _put_back(own: Node, base: Node, write: Node, node: Node, views: tuple[Node, ...]) -> tuple[Step, ...]:
    """Return the steps on a part of the logits that was changed and put back: `z[..., :4] = z[..., :4] + bias`."""
    inner, lost = read_chain(own, until=base), (Unknown("overwrite"),)
    for at in takewhile(lambda at: at is not base, back(own, None)):
        if at.op in ("add", "sub", "rsub") and len(list(at.parents())) == 1:
            return lost  # the softmax ignores a number added to all logits, but not one added to some
    steps = spread_over(inner.steps, write, node, views) if inner.product is base else None
    return lost if steps is None else steps


# -- softcaps ----------------------------------------------------------------------------------------------------------


def _by_its_own_tanh(node: Node) -> tuple[float, Node] | None:
    """Return c and z of z * tanh(z / c), a softcap that multiplies by the logits in place of c; None for others."""
    operands = [arg for arg in node.args if isinstance(arg, Node)]
    for bent, logits in (operands, operands[::-1]) if len(operands) == 2 else ():
        at, divisor = origin(bent, ops.CASTS_AND_COPIES), 1.0
        if at.op != "tanh" or not logits.products:
            continue
        inner = at.main()
        while inner is not None and origin(inner, ops.CASTS_AND_COPIES) is not origin(logits, ops.CASTS_AND_COPIES):
            inner = origin(inner, ops.CASTS_AND_COPIES)
            by = inner.number(1)
            if inner.op not in ("mul", "div") or not by:
                break
            divisor, inner = divisor * (by if inner.op == "div" else 1.0 / by), inner.main()
        else:
            return None if inner is None else (divisor, logits)
    return None


def _fold_caps(steps: tuple[Step, ...]) -> tuple[Step, ...]:
    """Folds z / c, tanh and * c into one softcap of c; a factor that does not cancel stays a scale."""
    folded: list[Step] = []
    rest = list(steps)
    while rest:
        step = rest.pop(0)
        if isinstance(step, Softcap) and not step.by_logits:
            after, before = next((s for s in rest if isinstance(s, Scale)), None), folded[-1] if folded else None
            rest = [s for s in rest if s is not after]
            cap = 1.0 if after is None else after.factor.value
            inner = before.factor.value if isinstance(before, Scale) else None
            if cap and inner and abs(inner * cap - 1) < 1e-3:  # (z / 30).tanh() * 30: the two factors cancel
                folded.pop()
            elif cap != 1.0:
                # c tanh(f x) has slope f c and is capped at c: written c tanh((f c x) / c).
                folded.append(Scale(Factor(cap, "logits", "softcap"), at=step.at))
            step = replace(step, cap=cap)
        folded.append(step)
    return tuple(folded)


READERS: dict[str, Callable[[Link], tuple[Step, ...]]] = {**OPERATIONS, "cat": _joined}
