"""Follows attention by blocks of keys with a running maximum and sum: exp(z - m) @ v comes before the division.

o = o exp(m - m') + exp(z - m') v and l likewise, with o / l at the end (Milakov & Gimelshein 2018, arXiv:1805.02867;
Rabe & Staats 2021, arXiv:2112.05682; Dao et al. 2022, arXiv:2205.14135) or at every block, or with blocks merged by
their logsumexp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import alias, ancestors, numbered, replay_all
from sqrtdk.tracing.tape.node import (
    Exponential,
    Finished,
    Node,
    Online,
    Partial,
    SoftmaxEntry,
    back,
    origin,
)
from sqrtdk.tracing.tape.recorder import RecordedOutput, Scene

Part = Exponential | Finished
MOST_HELD_LOGITS = 2**26  # logits held by one trace, 256 MB in float32
_POWERS = {"exp": math.e, "exp2": 2.0}
_WEIGHED = ops.PASSING | {"mul", "div", "masked_fill", "where"}  # may stand between an exp and the value product
_LOG_OPERATIONS = frozenset({"log", "log2"})
_OF_LSES = frozenset({"cat", "stack", "add", "sub", "mul", "div"})  # lse / log2(e), (m + l.log()) - top
_SUM_OPERATIONS = frozenset({"sum", "logsumexp", "logaddexp"})
_MAXIMUM_OPERATIONS = frozenset({"amax", "max", "maximum"})
_OF_THE_SUM = frozenset({"reciprocal", "pow", "exp", "exp2", "sigmoid", "log_sigmoid_forward", "rsqrt"})
_ACCUMULATING_PRODUCTS = frozenset({"baddbmm", "addmm", "addbmm"})  # add a product to their first argument
_ADDS = frozenset({"add", "sub", "rsub", "cat", "stack", "sum", "copy", "where", "masked_fill", "lerp", "addcmul"})
_SUMMED = frozenset({"add", "sub", "rsub", "sum", "lerp", "addcmul"})
_CARRIES = ops.PASSING | ops.CLAMPS | _ADDS | {"mul", "div", "neg", "addcdiv", "constant_pad_nd"}


def weigh_values(scene: Scene, made: RecordedOutput, a: Node, b: Node) -> bool:
    """Return whether a contraction multiplies the exponential of logits with values.

    If it does, its node becomes a partial sum: exp(z - m) @ v, to be divided by the sum of exponentials later.

    Args:
        scene: state of the trace.
        made: the result of the contraction.
        a: its left operand.
        b: its right operand.
    """
    # A step of FlashAttention by hand: p = (q @ k.mT - m).exp(); o = o * (m_before - m).exp() + p @ v.
    for weights, value, contracted in ((a, b, -1), (b, a, -2)):
        way = _path_from_exp(weights)
        if way is None or not value.act or value.products or value.weights is not None:
            continue
        power = way[0]
        tensors = [t for i, t in made.tensors.items() if made.node.args[i] is value]
        exponential = _exponential(scene, power, way[1:], value, tensors[0], contracted)
        alone: frozenset[Part] = frozenset({exponential})
        partial = Partial(alone, frozenset() if _sums(power.args[0]) else alone)
        before = made.node.args[0].partial if made.node.op in _ACCUMULATING_PRODUCTS else None
        made.node.partial = partial if before is None else _added([before, partial])
        made.node.args = ()
        if not made.node.partial.open:
            complete_sums(scene, made)
        return True
    return False


def _path_from_exp(node: Node) -> list[Node] | None:
    """Return the nodes from an exp of logits to `node`, or None if there is no such exp."""
    way = [node]
    for at, main in pairwise(back(node, _WEIGHED)):
        if not at.products or sum(bool(p.products) for p in at.parents()) != 1:
            return None
        if math.prod(at.shape) < math.prod(main.shape):
            return None  # a slice drops some of the keys
        way.insert(0, main)
    power = way[0]
    return way if power.op in _POWERS and power.args and power.args[0].products else None


def _exponential(
    scene: Scene, power: Node, way: list[Node], value_node: Node, value: Tensor, contracted: int
) -> Exponential:
    inner = origin(power.args[0], ops.CASTS_AND_COPIES)
    logits, offset, maximum = power.args[0], None, None
    dim = _axis_of_keys(power, way, contracted)
    if inner.op == "sub" and isinstance(inner.args[1], Node) and _is_of_rows(inner.args[1], power.shape, dim):
        logits, offset = inner.args[0], inner.operands.get(1)
        maximum = origin(inner.args[1]).serial if inner.args[1].products else None
    size = math.prod(power.shape)
    entry = SoftmaxEntry(next(iter(logits.products)).site, power.shape, place=power.place)
    scene.exponentials.append(entry)
    entered = power.operands.get(0)
    held = entered is not None and scene.held + size <= MOST_HELD_LOGITS
    if held:
        scene.held += size
    else:
        power.operands = {}
    over = bool(power.func._schema.is_mutable)  # z.exp_() overwrites the logits: they are the logarithm of its output
    product = next(iter(logits.products)).product
    return Exponential(
        node=logits,
        way=tuple(way),
        logits=entered if held and not over else None,
        power=entered if held and over else None,
        offset=offset,
        maximum=maximum,
        value=alias(value if contracted == -1 else value.mT),
        value_node=value_node,
        values_first=contracted == -2,
        shape=power.shape,
        dim=dim,
        base=_POWERS[power.op],
        stored=torch.float32 if product is None else product.dtype,
        entry=entry,
        number=next_number(scene),
    )


def next_number(scene: Scene) -> int:
    """Return the rank of the next attention, or block of one, in the order of running."""
    return len(scene.exponentials) + len(scene.entries)


def _axis_of_keys(power: Node, way: list[Node], contracted: int) -> int:
    """Return the axis of the exp that the product with the values sums over."""
    keys = power.shape[-1]
    views = [node for node in way if node.op in ops.VIEWS]
    if contracted == -1 and all(node.shape[-1:] == (keys,) for node in views):
        return len(power.shape) - 1
    for axis in range(len(power.shape)):
        line = replay_all(views, numbered(power.shape, axis))
        if bool((line != line.narrow(contracted, 0, 1)).any()):
            return axis
    return len(power.shape) - 1


def _is_of_rows(offset: Node, shape: tuple[int, ...], dim: int) -> bool:
    """Whether the subtracted tensor has one number for all keys of a row."""
    place = dim - len(shape) + len(offset.shape)
    return place < 0 or offset.shape[place] == 1


# -- what is computed from partial sums --------------------------------------------------------------------------------


def carry_partial_sums(scene: Scene, made: RecordedOutput, parents: list[Node]) -> bool:
    """Return whether a node carries on the partial sums of its operands.

    Complete sums that an operation ends are passed to the listener.

    Args:
        scene: state of the trace.
        made: the output of the operation, whose node is changed.
        parents: the nodes of the operands.
    """
    node = made.node
    if (
        node.op in _ACCUMULATING_PRODUCTS
        and parents[0].partial is not None
        and sum(p.partial is not None for p in parents) == 1
    ):
        return False
    sources = [p for p in parents if p.partial is not None]
    partials = [p.partial for p in sources if p.partial is not None]
    others = [p for p in parents if p.act and p.partial is None]
    if node.op not in _CARRIES or not all(p.products for p in others) or any(p.weights is not None for p in others):
        used = _take_runs(scene, joined_parts(partials).parts)
        if used:
            _report_run(scene, _as_one(used))
        return False
    partial = _joined(node, sources, others)
    if not others and not partial.weighed and not any(before.open for before in partials):
        node.partial = partial  # outputs of attentions, which continue as ordinary vectors
        if node.op == "cat" and len(sources) > 1 and any(isinstance(part, Exponential) for part in partial.parts):
            complete_sums(scene, made)  # of blocks of queries
        return False
    ends = _ends_in_sum(node, others)
    node.args = ()
    if partial.open:
        node.partial = partial
    elif any(before.open for before in partials) or node.op in _ADDS or ends:
        scene.store.cut(node, made.tensor)
        node.partial = replace(partial, weighed=False)
        complete_sums(scene, made, weighed=partial.weighed)
    else:
        node.roots = frozenset[Node]().union(*(p.roots for p in sources))
        node.partial = partial
    return True


def _joined(node: Node, sources: list[Node], others: list[Node]) -> Partial:
    """Return the operands' partial sums after the node's operation."""
    partials = [p.partial for p in sources if p.partial is not None]
    if node.op == "addcmul" and others:  # addcmul(o_new, o, exp(m - m')): the old sum is rescaled to the new maximum
        partials = [replace(partial, scaled=True) for partial in partials]
    partial = _added(partials) if node.op in _SUMMED else joined_parts(partials)
    if _divided(node, sources, others):
        partial = replace(partial, open=frozenset())
    if node.op in ("mul", "div") and others:
        partial = replace(partial, scaled=True, weighed=partial.weighed or any(_sums(other) for other in others))
    return partial


def joined_parts(partials: list[Partial]) -> Partial:
    """Return partial sums that are carried on together."""
    return Partial(
        frozenset[Part]().union(*(partial.parts for partial in partials)),
        frozenset[Part]().union(*(partial.open for partial in partials)),
        any(partial.scaled for partial in partials),
        any(partial.loose for partial in partials),
        any(partial.weighed for partial in partials),
    )


def _added(partials: list[Partial]) -> Partial:
    """Return the sum of partial sums; it is loose if their maxima differ and none was rescaled."""
    whole = joined_parts(partials)
    maxima = {part.maximum for part in whole.parts if isinstance(part, Exponential)}
    return replace(whole, scaled=False, loose=whole.loose or (len(maxima) > 1 and not whole.scaled))


def is_sum(node: Node) -> bool:
    """Return whether the node is a logsumexp of logits, or several joined.

    A softmax over such numbers weighs whole blocks of keys, not keys.
    """
    of_sum = node.op in _LOG_OPERATIONS and _sums(node.args[0])
    if of_sum or (node.op in ("logsumexp", "logaddexp") and node.products):
        return True
    if node.op not in ops.PASSING | _OF_LSES or node.product is not None:
        return False
    # lse - lse.amax(0) is one of blocks, and z - z.logsumexp(-1) one of keys
    parents = [node.args[0]] if node.op == "sub" else node.parents()
    return any(is_sum(parent) for parent in parents if isinstance(parent, Node) and parent.products)


def _divided(node: Node, parts: list[Node], others: list[Node]) -> bool:
    """Whether the operation divides partial sums by the sums of their exponentials: o / l, or o * (1 / l)."""
    if node.op == "div" and len(node.args) > 1 and isinstance(node.args[1], Node):
        divisor = node.args[1]
        return (divisor in parts and divisor.shape[-1:] == (1,)) or _sums(divisor)
    return node.op == "mul" and any(_divides(other) for other in others)


def _ends_in_sum(node: Node, others: list[Node]) -> bool:
    """Whether merged outputs are divided by the sum of their weights: (a * o1 + b * o2) / (a + b)."""
    if node.op == "div":
        return len(node.args) > 1 and _sums(node.args[1])
    starts = [origin(other) for other in others if node.op == "mul"]
    return any(at.op == "reciprocal" or (at.op == "div" and not isinstance(at.args[0], Node)) for at in starts)


def _above(node: Node) -> Iterator[Node]:
    """Yield the node and its ancestors that carry logits, up to products and maxima, each once."""
    return (above for above in ancestors(node, closed=_MAXIMUM_OPERATIONS | ops.CONTRACTIONS.keys()) if above.products)


def _sums(node: object) -> bool:
    """Whether a node is computed from a sum of exponentials, or its logarithm."""
    return isinstance(node, Node) and any(n.op in _SUM_OPERATIONS for n in _above(node))


def _divides(node: Node) -> bool:
    """Whether a factor holds the inverse of a sum of exponentials."""
    return any(
        (n.op == "div" and len(n.args) > 1 and _sums(n.args[1])) or (n.op in _OF_THE_SUM and _sums(n.args[0]))
        for n in _above(node)
    )


def complete_sums(scene: Scene, made: RecordedOutput, *, weighed: bool = False) -> None:
    """Note the output of exponentials that are divided by their sum, or of merged blocks; more blocks may join it.

    Args:
        scene: state of the trace.
        made: the output.
        weighed: whether shares of sums of exponentials weigh the blocks in it.
    """
    partial = made.node.partial
    assert partial is not None
    joined = _take_runs(scene, partial.parts)
    new = Online(list(partial.parts), alias(made.tensor), partial.loose, whole=weighed or not joined)
    scene.online.append(_as_one([new, *joined]))


def _take_runs(scene: Scene, parts: frozenset[Part]) -> list[Online]:
    """Removes from the scene, and returns, the complete runs that contain any of the parts."""
    taken = [run for run in scene.online if not parts.isdisjoint(run.parts)]
    scene.online = [run for run in scene.online if run not in taken]
    return taken


def _as_one(runs: list[Online]) -> Online:
    """Return one run from runs whose results are used together, usually blocks of queries."""
    everything = {part for run in runs for part in run.parts}
    output = max((run.output for run in runs), key=lambda tensor: tensor.numel())
    whole = any(run.whole and everything == set(run.parts) for run in runs)
    parts = sorted(everything, key=lambda part: part.number)
    return Online(parts, output, any(run.loose for run in runs), whole)


def _report_run(scene: Scene, run: Online) -> None:
    exponentials = [part for part in run.parts if isinstance(part, Exponential) and not part.entry.attention]
    for exponential in exponentials:
        exponential.entry.attention = True
    if exponentials:
        others = [part for part in run.parts if isinstance(part, Finished)]
        scene.listener.online(replace(run, parts=[*exponentials, *others]))
    for group in _of_the_same_rows([part for part in run.parts if isinstance(part, Finished)]):
        scene.listener.online(replace(run, parts=[*group]))
    for exponential in exponentials:
        if exponential.logits is not None or exponential.power is not None:
            scene.held -= math.prod(exponential.shape)
        exponential.logits = exponential.power = exponential.offset = None
        exponential.way = ()
        exponential.node = exponential.value_node = Node("told", exponential.shape)


def _of_the_same_rows(parts: list[Finished]) -> list[list[Finished]]:
    """Groups blocks of keys by their rows; returns [] if no side tells the blocks apart."""
    for rows, keys in ((0, 1), (1, 0)):
        groups: dict[object, list[Finished]] = {}
        for part in parts:
            groups.setdefault(part.sides[rows], []).append(part)
        several = [group for group in groups.values() if len(group) > 1]
        if several and all(len({part.sides[keys] for part in group}) == len(group) for group in several):
            return several
    return []


def close_partial_sums(scene: Scene) -> None:
    """Pass complete attentions by blocks to the listener at the end of a trace.

    Exponentials that multiplied values and were never divided by their sum are reported as missed.
    """
    ready, scene.online = scene.online, []
    for site in dict.fromkeys(run.parts[0].entry.site for run in ready):
        _report_run(scene, _as_one([run for run in ready if run.parts[0].entry.site == site]))
    for entry in scene.exponentials:
        if not entry.attention:
            scene.listener.missed(entry.site, Message("trace.missed.never_divided"))
