"""Reading a side of the product: from q (or k) as the product saw it back to the projection it came from.

What an operation means on the way is a row of `READERS`; a normalisation or a rotation, which are several operations
each, are looked for first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.read.factors import read_factor
from sqrtdk.tracing.read.regroup import regrouped
from sqrtdk.tracing.read.rotary import amplitude_of, table_positions
from sqrtdk.tracing.records import Factor, Stage
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, Root, dominator, replay

_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten"})
_REPEATS = frozenset({"expand", "repeat", "repeat_interleave", "index", "index_select"})
# Between a vector and its rotated self: products with a table, halves taken and put together again.
_ROTATION = frozenset(
    {"mul", "div", "neg", "add", "sub", "cat", "stack", "addcmul", "copy", "overwrite", "flip", "clone"}
)
_ROTATED = frozenset({"add", "sub", "cat", "stack", "overwrite", "addcmul"})  # the last of them


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One side of the product, read back to its projection.

    Attributes:
        basis: the projection's (or the normalised) values in the operand's layout; None where they are not known.
        root: where the lineage starts; None when several roots were put together.
        stages: every step, in order.
        factors: multiplications on the way, nearest to the projection first.
        norm: normalisation after the projection.
        norm_gain: a gain for each channel followed it.
        rope: a rotation was applied.
        growth: how many times each head was repeated (GQA).
        padding: zero columns added to the head dimension.
        unknown: operations that could not be followed.
        folded_heads: features that the last reshape before the product split into heads.
    """

    basis: Tensor | None
    root: Node | None
    stages: tuple[Stage, ...] = ()
    factors: tuple[Factor, ...] = ()
    norm: str | None = None
    norm_gain: bool = False
    rope: bool = False
    growth: int = 1
    padding: int = 0
    unknown: tuple[str, ...] = ()
    folded_heads: int | None = None

    def then(self, *stages: Stage, **changes: Any) -> Side:
        """The side after further stages, with some of its attributes changed."""
        return replace(self, stages=(*self.stages, *stages), **changes)

    def lost(self, where: str, operation: str, name: str | None = None, **changes: Any) -> Side:
        """The side after an operation that could not be followed."""
        return self.then(Stage(where, "unknown", operation), unknown=(*self.unknown, name or operation), **changes)

    def times(self, factor: Factor, *stages: Stage) -> Side:
        """The side after a multiplication."""
        return self.then(*stages, factors=(*self.factors, factor))

    @property
    def start(self) -> Root:
        """What is known of where the lineage starts."""
        return Root() if self.root is None or self.root.root is None else self.root.root

    @property
    def factor(self) -> float:
        """Product of the factors; NaN where one is not known."""
        return math.prod(math.nan if f.value is None else f.value for f in self.factors)


def follow(node: Node, where: str) -> Side:
    """Follow `node` back to its root, collecting what happened on the way."""
    main = node.main()
    if node.is_root or not node.act or main is None:
        return _start(node, where)
    for structure in (_normalised, _rotated):
        side = structure(node, where)
        if side is not None:
            return side
    return READERS.get(node.op, _unknown)(node, main, where)


def _start(node: Node, where: str) -> Side:
    detail = node.label or {"mm": "matmul", "addmm": "linear", "bmm": "einsum"}.get(node.op, node.op)
    projects = node.op in ops.CONTRACTIONS or node.op in ops.PROJECTIONS or node.op in ops.AFFINE
    side = Side(node.value, node)
    if side.start.additive:
        return side.then(Stage(where, "input", "additive"), unknown=("additive",))
    opaque = node.is_root and not projects and node.op not in ("input", "add", "sub")
    stage = Stage(where, "projection" if projects else "input", detail)
    return side.then(stage, unknown=(node.op,) if opaque else ())


# -- structures: several operations that are one step ------------------------------------------------------------------


def _normalised(node: Node, where: str) -> Side | None:
    """A normalised vector: what was before is cut off, and its values are those to compare with."""
    if not node.norm or node.value is None:
        return None
    side = follow(min(node.roots, key=lambda n: n.serial), where)
    stage = Stage(where, "norm", node.norm.kind)
    return side.then(stage, basis=node.value, factors=(), norm=node.norm.kind, norm_gain=node.norm.gain)


def _rotated(node: Node, where: str) -> Side | None:
    """A rotary embedding: q times cosines plus its turned halves times sines, however the halves are taken."""
    if node.op not in _ROTATED or sum(1 for _ in node.parents()) < 2:
        return None
    source, between = dominator(node)
    if source is None or not _turns(source, between):
        return None
    tables = [(n, i) for n in between if n.op in ("mul", "addcmul") for i in table_positions(n)]
    rejoined = node.op in ("cat", "stack") and all(p.act for p in node.parents())
    scaled = any(n.op in ("mul", "div") and not table_positions(n) and n.number(1) != 1.0 for n in between)
    if not tables and (scaled or not rejoined):
        return None
    side = follow(source, where)
    if side.basis is not None and tables and tuple(side.basis.shape) != node.shape:
        same = side.basis.numel() == math.prod(node.shape)
        side = replace(side, basis=side.basis.reshape(node.shape) if same else None)
    if not tables:
        return _rejoined(node, source, side)
    side = side.then(Stage(where, "rope"), rope=True)
    if scaled:
        return replace(side, unknown=(*side.unknown, "a factor inside a rotation"))
    amplitude = amplitude_of(tables)
    if amplitude is None:
        return replace(side, unknown=(*side.unknown, "rotary table of varying amplitude"))
    return _stretched(side, amplitude, where)


def _rejoined(node: Node, source: Node, side: Side) -> Side:
    """Pieces of one vector in another order: heads cut out of it and stacked, halves taken and put together again."""
    folded = source.shape[-1] if source.shape[-1] > node.shape[-1] else side.folded_heads
    return replace(side, basis=regrouped(node, lambda n: side.basis if n is source else None), folded_heads=folded)


def _turns(source: Node, between: Sequence[Node]) -> bool:
    """Whether the operations after `source` can be a rotation of it."""
    if source.size or source.shape[-1:] == (1,):
        return False
    return all(n.op in _ROTATION | ops.VIEWS | ops.SAME for n in between)


def _stretched(side: Side, amplitude: float, where: str) -> Side:
    """A rotation whose table is no pure one multiplies by its amplitude."""
    return side.times(Factor(amplitude, where, "rotary table")) if abs(amplitude - 1) > 1e-3 else side


# -- one reader an operation -------------------------------------------------------------------------------------------


def _unknown(node: Node, main: Node, where: str) -> Side:
    side = follow(main, where)
    fits = side.basis is not None and tuple(side.basis.shape) == node.shape
    return side.lost(where, node.op, basis=side.basis if fits else None)


def _same(node: Node, main: Node, where: str) -> Side:
    return follow(main, where)


def _view(node: Node, main: Node, where: str) -> Side:
    side = follow(main, where)
    before, after = math.prod(main.shape), math.prod(node.shape)
    if node.op in _REPEATS and before and after > before and after % before == 0:
        times = after // before
        side = side.then(Stage(where, "repeat", str(times)), growth=side.growth * times)
    if node.op in _RESHAPES and main.shape and node.shape and main.shape[-1] > node.shape[-1]:
        side = replace(side, folded_heads=main.shape[-1])
    if side.basis is None:
        return side
    try:
        return replace(side, basis=replay(node, side.basis))
    except RuntimeError:
        return replace(side, basis=None)


def _negated(node: Node, main: Node, where: str) -> Side:
    return follow(main, where).times(Factor(-1.0, where, "number"))


def _multiplied(node: Node, main: Node, where: str) -> Side:
    side = follow(main, where)
    position = 1 if node.args[0] is main else 0
    other = node.args[position]
    if isinstance(other, Node) and other.act:
        return side.lost(where, node.op)
    value = node.operands.get(position)
    if side.norm and not side.factors and isinstance(other, Node) and other.shape[-1:] > (1,):
        # a gain for every channel belongs to the normalisation
        return replace(side, basis=_with_gain(node.op, side.basis, value), norm_gain=True)
    factor = read_factor(node, position, where, heads_axis=-3)
    if factor is None and value is not None and value.is_complex():
        amplitude = 1.0 if value.is_meta else float(value.abs().mean())
        return _stretched(side.then(Stage(where, "rope"), rope=True), amplitude, where)
    if factor is None:
        shape = tuple(other.shape) if isinstance(other, Node) else ""
        return side.lost(where, node.op, f"{node.op} by a tensor of shape {shape}")
    if side.norm == "l2" and not side.factors and factor.value is not None and _is_sqrt_width(node, factor.value):
        # Unit length times sqrt(width) is unit root mean square.
        stages = (*side.stages[:-1], replace(side.stages[-1], detail="rms"))
        basis = None if side.basis is None else side.basis * factor.value
        return replace(side, norm="rms", stages=stages, basis=basis)
    return side.times(factor, Stage(where, "scale", factor.text()))


def _with_gain(op: str, basis: Tensor | None, value: Tensor | None) -> Tensor | None:
    if basis is None or value is None or value.is_meta:
        return None
    return basis / value if op == "div" else basis * value


def _is_sqrt_width(node: Node, value: float) -> bool:
    return any(abs(value / math.sqrt(n) - 1) < 1e-3 for n in node.shape[-2:] if n > 1)


def _padded(node: Node, main: Node, where: str) -> Side:
    side = follow(main, where)
    pads = node.args[1]
    if len(pads) >= 2 and any(p > 0 for p in pads[:2]) and not any(pads[2:]):
        stage = Stage(where, "pad", f"{main.shape[-1]} to {node.shape[-1]}")
        side = side.then(stage, padding=side.padding + int(sum(pads[:2])))
    else:
        side = side.then(Stage(where, "pad"))
    return side if side.basis is None else replace(side, basis=replay(node, side.basis))


def _cached(node: Node, main: Node, where: str) -> Side:
    return follow(main, where).then(Stage(where, "cache"), basis=None)


def _clamped(node: Node, main: Node, where: str) -> Side:
    return follow(main, where).then(Stage(where, "clamp", node.op))


def _shifted(node: Node, main: Node, where: str) -> Side:
    """A learned vector added to q or k (a bias of the projection that came late)."""
    if sum(p.act for p in node.parents()) != 1:
        return _unknown(node, main, where)
    side = follow(main, where).then(Stage(where, "shift"))
    shift, product = node.operands.get(1 if node.args[0] is main else 0), side.factor
    if side.basis is None or shift is None or shift.is_meta or not math.isfinite(product) or not product:
        return replace(side, basis=None)
    sign = -1.0 if node.op == "sub" else 1.0
    return replace(side, basis=side.basis + sign * shift / product)


def _joined(node: Node, main: Node, where: str) -> Side:
    """Pieces of different origin put side by side: each is followed, and their factors must agree."""
    pieces = [p for p in node.parents() if p.act]
    constants = [p for p in node.parents() if not p.act]
    dim = int(node.args[1]) if len(node.args) > 1 else 0
    if any(math.prod(p.shape) for p in constants):
        side = follow(pieces[0], where)
        if len(pieces) > 1 or dim not in (-1, len(node.shape) - 1) or not all("zeros" in p.op for p in constants):
            # keys of the model's own beside the projected ones (memory keys): the latter's scale is read
            return side.then(Stage(where, "cat", "constant"), basis=None)
        extra = node.shape[-1] - pieces[0].shape[-1]
        basis = None if side.basis is None else torch.nn.functional.pad(side.basis, (0, extra))
        stage = Stage(where, "pad", f"{pieces[0].shape[-1]} to {node.shape[-1]}")
        return side.then(stage, padding=side.padding + extra, basis=basis)
    sides = [follow(p, where) for p in pieces]
    if len(sides) == 1:
        return sides[0]
    bases = [side.basis for side in sides if side.basis is not None]
    return _together(sides, basis=torch.cat(bases, dim) if len(bases) == len(sides) else None)


def _together(sides: Sequence[Side], *, basis: Tensor | None, root: Node | None = None, padding: int = 0) -> Side:
    """What pieces of different origin have in common; their factors must agree."""
    first = sides[0]
    unknown = [name for side in sides for name in side.unknown]
    if any(abs(side.factor - first.factor) > 1e-3 * abs(first.factor) for side in sides):
        unknown.append("pieces with unlike factors")
    return Side(
        basis,
        root,
        tuple(stage for side in sides for stage in side.stages),
        first.factors,
        norm=first.norm,
        norm_gain=any(side.norm_gain for side in sides),
        rope=any(side.rope for side in sides),
        padding=padding,
        unknown=tuple(unknown),
        folded_heads=first.folded_heads,
    )


def _assembled(node: Node, main: Node, where: str) -> Side:
    """A tensor written slice by slice: like pieces put side by side."""
    places: list[Node] = []
    sources: list[Node] = []
    base = node
    while base.op == "overwrite":
        old, new = base.args
        if new.op != "copy" or not isinstance(new.args[1], Node) or new.args[0].op not in ops.VIEWS:
            return follow(old if old.act else new, where).lost(where, f"{new.op} in place", basis=None)
        places.append(new.args[0])
        sources.append(new.args[1])
        base = old
    pieces = [follow(source, where) for source in sources]
    beneath = [follow(base, where)] if base.act else []
    covered = sum(place.shape[-1] for place in places)
    zeros = not beneath and "zeros" in base.op and covered < node.shape[-1]
    padded = zeros and places[0].shape[:-1] == node.shape[:-1]
    side = _together(
        [*beneath, *pieces],
        basis=_written(node, places, pieces, beneath),
        root=pieces[0].root if len(pieces) == 1 and not beneath else None,
        padding=node.shape[-1] - covered if padded else 0,
    )
    return side.then(Stage(where, "pad", f"{covered} to {node.shape[-1]}")) if padded else side


def _written(node: Node, places: Sequence[Node], pieces: Sequence[Side], beneath: Sequence[Side]) -> Tensor | None:
    """The values of pieces written to their places, the first written last among `places`."""
    values = [side.basis for side in (*pieces, *beneath) if side.basis is not None]
    if len(values) < len(pieces) + len(beneath):
        return None
    basis = values[-1].clone() if beneath else values[0].new_zeros(node.shape)
    for place, value in zip(reversed(places), reversed(values[: len(pieces)]), strict=True):
        replay(place, basis).copy_(value)
    return basis


READERS: dict[str, Callable[[Node, Node, str], Side]] = {
    "mul": _multiplied,
    "div": _multiplied,
    "neg": _negated,
    "constant_pad_nd": _padded,
    "cat": _joined,
    "overwrite": _assembled,
    "add": _shifted,
    "sub": _shifted,
    **dict.fromkeys(ops.SAME, _same),
    **dict.fromkeys(ops.VIEWS, _view),
    **dict.fromkeys(ops.CACHE_WRITES, _cached),
    **dict.fromkeys(ops.CLAMPS, _clamped),
}
