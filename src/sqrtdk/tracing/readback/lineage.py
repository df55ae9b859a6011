"""Reads a side of the product: from q (or k) at the product back to its projection.

`SIDE_READERS` says what each operation on the way means. Normalisations and rotations, which are several operations
each, are looked for first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from weakref import WeakKeyDictionary

from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.vectors import ROTATION
from sqrtdk.tracing.probe.norms import RowNorm, norm_at, norm_of
from sqrtdk.tracing.probe.replays import Subgraph, rearrangements, subgraphs_inwards
from sqrtdk.tracing.readback import pieces
from sqrtdk.tracing.readback.factors import multiplied, tensor_factor
from sqrtdk.tracing.readback.rotations import repeat_count, rotated, turned_by_matrix
from sqrtdk.tracing.readback.side import ROTATION_NAMES, Follow, ProductSide
from sqrtdk.tracing.records import BY_DATA, Factor, Stage
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import ancestors, decided_by, replay
from sqrtdk.tracing.tape.node import Node

_RESHAPES_TO_HEADS = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten"})
# More operations without readers than this on one way is a recurrence: its effect is not probed.
_MOST_PROBED = 4
_MOST_NESTED_CALLS = 40  # nested calls of `_step`; a longer lineage (a recurrence) is cut and followed from farther in
_POOLED = frozenset({"mul", "sum"})  # roots of vectors that were weighted and summed
_PICKS = frozenset({"gather", "index", "index_select"})


class _Asked(threading.local):
    now = False
    inside = 0
    followed: dict[tuple[Node, str, bool], ProductSide] | None = None  # results within the outermost `follow_side`
    remembered: dict[tuple[Node, str, bool], ProductSide] | None = None  # results of the ones before it, if shared


class _TooDeepError(Exception):
    """A lineage is deeper than `_MOST_NESTED_CALLS` nested steps; carries the step at which to start again."""

    def __init__(self, node: Node, where: str, now: bool) -> None:
        self.args = (node, where, now)


_asked = _Asked()
# None: the operations' effect is neither a factor nor a norm. Keys are weak, so a value must not hold its own node.
_by_effects: WeakKeyDictionary[Node, dict[str, ProductSide | None]] = WeakKeyDictionary()


def follow_side(node: Node, where: str) -> ProductSide:
    """Return q or k, followed back from a node to its projection or other root.

    Args:
        node: node of q or k where it enters the product.
        where: "q" or "k", for the stages and factors.
    """
    if _asked.followed is not None:
        return _step(node, where)
    known = {} if _asked.remembered is None else _asked.remembered
    way, _asked.followed = [(node, where, _asked.now)], known
    try:
        while True:  # a recurrence too deep for Python's stack: its inner steps are followed first, then reused
            try:
                node, where, now = way[-1]
                with unprobed(now):
                    side = _step(node, where)
                inner = way.pop()
                if not way:
                    return side
                known[inner] = side
            except _TooDeepError as deep:
                way.append(deep.args)
    finally:
        _asked.followed = None


def _step(node: Node, where: str) -> ProductSide:
    assert _asked.followed is not None
    key = node, where, _asked.now
    if key in _asked.followed:
        return _asked.followed[key]
    if _asked.inside >= _MOST_NESTED_CALLS:
        raise _TooDeepError(*key)
    before, _asked.inside = _asked.inside, _asked.inside + 1
    try:
        side = _follow_side(node, where).written_at(node)
    finally:
        _asked.inside = before
    if before:  # the outermost step probes more operations than an inner one, so its result is not shared
        _asked.followed[key] = side
    return side


@contextmanager
def remembered() -> Iterator[None]:
    """Return a context manager within which no step is followed twice.

    It is used where q and k of a recurrence are read for the name and the formula of an attention.
    """
    before, _asked.remembered = _asked.remembered, {}
    try:
        yield
    finally:
        _asked.remembered = before


@contextmanager
def unprobed(now: bool = True) -> Iterator[None]:
    """Return a context manager within which operations without readers are recorded as unknown.

    Otherwise they are run again on other values, to find out their effect.

    Args:
        now: False allows such runs within the block.
    """
    before, _asked.now = _asked.now, now
    try:
        yield
    finally:
        _asked.now = before


def _follow_side(node: Node, where: str) -> ProductSide:
    if node.branches:
        before = _before(node, where)
        if before is not None:
            return before
    main = node.main()
    if node.is_root or not node.act or main is None:
        return _start(node, where)
    side = _normalised(node, where) or rotated(node, where, follow_side) or pieces.unstacked(node, where, follow_side)
    if side is None:
        side = SIDE_READERS.get(node.op, _unknown)(node, main, where, follow_side) or _unknown(
            node, main, where, follow_side
        )
    if not side.unknown or len(side.unknown) > _MOST_PROBED or (_asked.inside > 1 and node.op in ops.PASSING):
        return side  # a view is probed only where it ends the way, as view_as_real of a complex vector does
    return _by_effect(node, where) or side


def _by_effect(node: Node, where: str) -> ProductSide | None:
    """Return the side after operations without readers, by their effect on other values; None for an unknown effect.

    Inner operations were followed and probed first, so sources that are still unknown are not probed again.
    """
    known = _by_effects.setdefault(node, {})
    if where not in known and not _asked.now:
        with unprobed():
            known[where] = next(_effects(node, where), None)
    return known.get(where)


def _effects(node: Node, where: str) -> Iterator[ProductSide]:
    for found in rearrangements(node):
        side = follow_side(found.part.source, where)
        if not side.unknown:
            side, factor = replace(side, basis=_through(side, found.part, found.place)), found.factor(where)
            yield side if factor is None else side.times(factor, Stage(where, "scale", factor.text()))
    for part in subgraphs_inwards(node):
        norm = norm_of(part)
        if norm is not None and not (side := follow_side(part.source, where)).unknown:
            yield _normed(side, norm, _through(side, part, part.run), where, part.effect)


def _through(side: ProductSide, part: Subgraph, effect: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Return the side's values after the effect of `part`, or None if they do not fit it."""
    if side.basis is None or tuple(side.basis.shape) != part.source.shape:
        return None
    try:
        return effect(side.basis)
    except RuntimeError:  # an operation of the part does not take this dtype
        return None


def _before(node: Node, where: str) -> ProductSide | None:
    """Return the side of a root that continues q or k: a sum of branches, a convolution, a rotation by matrices."""
    if len(node.branches) > 1:
        return pieces.summed(node, where, follow_side)
    return (
        pieces.convolved(node, where, follow_side)
        if node.op == "convolution"
        else turned_by_matrix(node, where, follow_side)
    )


def _start(node: Node, where: str) -> ProductSide:
    detail = node.label or {"mm": "matmul", "addmm": "linear", "bmm": "einsum"}.get(node.op, node.op)
    side = ProductSide(node.value, node)
    named = node.op in ops.CONTRACTIONS or node.op in ops.PROJECTIONS or node.op in ops.AFFINE
    projects = named or side.start.projects
    if side.start.additive:
        return side.then(Stage(where, "input", "additive"), unknown=("additive",))
    opaque = node.is_root and not projects and node.op not in ("input", "add", "sub")
    stage = Stage(where, "projection" if projects else "input", detail)
    return side.then(stage, unknown=(node.op,) if opaque else ())


# -- structures: several operations that are one step ------------------------------------------------------------------


def _normalised(node: Node, where: str) -> ProductSide | None:
    """Return the side of a normalised vector, or None. Its values are the new basis, so earlier steps are dropped.

    A rotation before the norm stays as a stage only: the normalised values already contain it.
    """
    norm = norm_at(node)
    if norm is None or node.value is None:
        return None
    turns = [stage for stage in follow_side(norm.part.source, where).stages if stage.name in ROTATION_NAMES]
    root = min(node.roots, key=lambda n: n.serial)
    side = follow_side(root, where).then(*turns)
    # norm((kv * gate.softmax(1)).sum(1)), DeepSeek-V4's compressed keys: whatever the sum is, the norm sets its length.
    if side.root is root and side.unknown == (root.op,) and root.op in _POOLED:
        side = replace(side, unknown=())
    return _normed(side, norm, node.value, where, "number")


def _normed(side: ProductSide, norm: RowNorm, values: Tensor | None, where: str, source: str) -> ProductSide:
    """Return the side after a normalisation that gave `values`; a gain beyond unit size becomes a factor."""
    learned = None if norm.learned is None else tensor_factor(*norm.learned, where, -1)
    gains = [] if norm.by in (1.0, None) else [Factor(norm.by, where, source)]
    gains += [] if learned is None else [learned]
    longer = math.prod(gain.value or 1.0 for gain in gains)
    return side.then(
        Stage(where, "norm", norm.kind),
        *(Stage(where, "scale", gain.text()) for gain in gains),
        basis=None if values is None else values / longer,
        factors=tuple(gains),
        norm=norm.kind,
        norm_gain=norm.gain,
        normed=norm.part.end.shape[-1],
    )


# -- one reader an operation -------------------------------------------------------------------------------------------


def _unknown(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    side = follow(main, where)
    fits = side.basis is not None and tuple(side.basis.shape) == node.shape
    return side.lost(where, node.op, basis=side.basis if fits else None)


def _same(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    return follow(main, where)


def _by_data(node: Node, main: Node) -> bool:
    """Whether the indices of a selection descend from activations, as in sorting, clustering or routing."""
    indices = [parent for parent in node.parents() if parent is not main]
    return any(ancestor.act for index in indices for ancestor in ancestors(index, closed=ops.CREATIONS))


def _view(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    side = follow(main, where)
    if node.op in _PICKS and _by_data(node, main):
        side = side.then(Stage(where, "gather", BY_DATA))
        own = any(decided_by(parent, main) for parent in node.parents())
        if own and where == "q" and node.shape[-2:-1] < main.shape[-2:-1]:  # Informer: only the picked rows attend
            side = replace(side, unknown=(*side.unknown, Message("trace.step.picked_queries")))
    elif node.op == "gather":
        side = side.then(Stage(where, "gather"))
    if times := repeat_count(node):  # GQA: k.repeat_interleave(groups, 1)
        side = side.then(Stage(where, "repeat", str(times)), growth=side.growth * times)
    if node.op in _RESHAPES_TO_HEADS and main.shape and node.shape and main.shape[-1] > node.shape[-1]:
        side = replace(side, folded_heads=main.shape[-1])
    if side.pads:
        side = replace(side, pads=pieces.pads_after(side.pads, main, node))
    if side.basis is None:
        return side
    try:
        return replace(side, basis=replay(node, side.basis))
    except RuntimeError:
        return replace(side, basis=None)


def _negated(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    return follow(main, where).times(Factor(-1.0, where, "number"))


def _cached(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    if len(node.args) > 1:  # q[q < -8] = 0 writes numbers into q, not new keys into a cache
        return _unknown(node, main, where, follow)
    return follow(main, where).then(Stage(where, "cache"), basis=None)


def _clamped(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    if sum(p.act for p in node.parents()) > 1:  # torch.minimum(x, 2 * x + 8) is a curve of x, not a bound
        return _unknown(node, main, where, follow)
    return follow(main, where).then(Stage(where, "clamp", node.op))


def _shifted(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    """Return the side after a vector was added to q or k: a bias of the projection, written apart."""
    if sum(p.act for p in node.parents()) != 1:
        return _unknown(node, main, where, follow)
    side = follow(main, where)
    shift, product = node.operands.get(1 if node.args[0] is main else 0), side.factor
    if side.norm is None or side.factors or side.moves:  # right after a norm it is the norm's own bias
        side = side.then(Stage(where, "shift"))
    if side.basis is None or shift is None or shift.is_meta or not math.isfinite(product) or not product:
        return replace(side, basis=None)
    # The basis is compared before the factors: (x + shift / f) * f = x * f + shift.
    sign = -1.0 if node.op == "sub" else 1.0
    return replace(side, basis=side.basis + sign * shift / product)


def _by_matrix(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    return follow(main, where).lost(where, node.op, Message("trace.step.outside_matrix"), basis=None)


def _turned(node: Node, main: Node, where: str, follow: Follow) -> ProductSide:
    return follow(main, where).then(Stage(where, "rope", "by its effect"), rope=True)


SIDE_READERS: dict[str, Callable[[Node, Node, str, Follow], ProductSide | None]] = {
    "mul": multiplied,
    "div": multiplied,
    "neg": _negated,
    **pieces.PIECE_READERS,
    ROTATION: _turned,
    **dict.fromkeys(ops.CONTRACTIONS, _by_matrix),
    "add": _shifted,
    "sub": _shifted,
    **dict.fromkeys(ops.CASTS_AND_COPIES, _same),
    **dict.fromkeys({*ops.VIEWS, "gather"}, _view),
    **dict.fromkeys(ops.CACHE_WRITES, _cached),
    **dict.fromkeys(ops.CLAMPS, _clamped),
}
