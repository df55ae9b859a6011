"""Reading a side of the product: from q (or k) as the product saw it back to the projection it came from."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from sqrtdk.trace import ops
from sqrtdk.trace.factors import describe, read_factor
from sqrtdk.trace.graph import Node, dominator, replay
from sqrtdk.trace.records import Factor, Stage
from sqrtdk.trace.rotary import amplitude_of, table_positions

_RESHAPES = frozenset({"view", "_unsafe_view", "reshape", "_reshape_alias", "unflatten"})
_REPEATS = frozenset({"expand", "repeat", "repeat_interleave", "index", "index_select"})
# Between a vector and its rotated self: products with a table, halves taken and put together again.
_ROTATION = frozenset(
    {"mul", "div", "neg", "add", "sub", "cat", "stack", "addcmul", "copy", "overwrite", "flip", "clone"}
)


@dataclass(slots=True)
class Side:
    """One side of the product, read back to its projection.

    Attributes:
        basis: the projection's (or the normalised) values in the operand's layout; None where they are not known.
        factors: multiplications on the way, nearest to the projection first.
        stages: every step, in order.
        root: where the lineage starts; None when several roots were put together.
        norm: normalisation after the projection.
        rope: a rotation was applied.
        growth: how many times each head was repeated (GQA).
        padding: zero columns added to the head dimension.
        unknown: operations that could not be followed.
        folded_heads: features that the last reshape before the product split into heads.
    """

    basis: Tensor | None
    factors: list[Factor]
    stages: list[Stage]
    root: Node | None
    norm: str | None = None
    rope: bool = False
    growth: int = 1
    padding: int = 0
    unknown: list[str] = field(default_factory=list)
    folded_heads: int | None = None


def follow(node: Node, where: str) -> Side:
    """Follow `node` back to its root, collecting what happened on the way."""
    if node.is_root or not node.act:
        return _start(node, where)
    if node.norm and node.value is not None:
        return _normalised(node, where)
    main = node.main()
    if main is None:
        return _start(node, where)
    if node.op in ops.SAME:
        return follow(main, where)
    if node.op in ops.VIEWS:
        return _view(node, main, where)
    if node.op in ("mul", "div"):
        return _multiplied(node, main, where)
    if node.op == "neg":
        side = follow(main, where)
        side.factors.append(Factor(-1.0, where, "number"))
        return side
    if node.op == "constant_pad_nd":
        return _padded(node, main, where)
    if node.op in ops.CACHE_WRITES:
        side = follow(main, where)
        side.stages.append(Stage(where, "cache"))
        side.basis = None
        return side
    if node.op in ops.CLAMPS:
        side = follow(main, where)
        side.stages.append(Stage(where, "clamp", node.op))
        return side
    rotated = _rotation(node, where)
    if rotated is not None:
        return rotated
    if node.op == "cat":
        return _joined(node, where)
    if node.op == "overwrite":
        return _assembled(node, where)
    if node.op in ("add", "sub") and sum(p.act for p in node.parents()) == 1:
        return _shifted(node, main, where)
    side = follow(main, where)
    side.unknown.append(node.op)
    side.stages.append(Stage(where, "unknown", node.op))
    if side.basis is not None and tuple(side.basis.shape) != node.shape:
        side.basis = None
    return side


def _start(node: Node, where: str) -> Side:
    detail = node.label or {"mm": "matmul", "addmm": "linear", "bmm": "einsum"}.get(node.op, node.op)
    projects = node.op in ops.CONTRACTIONS or node.op in ops.PROJECTIONS or node.op in ops.AFFINE
    name = "projection" if projects else "input"
    unknown = []
    if node.is_root and name == "input" and node.op not in ("input", "add", "sub"):
        unknown.append(node.op)
    return Side(node.value, [], [Stage(where, name, detail)], node, unknown=unknown)


def _normalised(node: Node, where: str) -> Side:
    side = follow(min(node.roots, key=lambda n: n.serial), where)
    side.stages.append(Stage(where, "norm", node.norm or ""))
    return Side(node.value, [], side.stages, side.root, norm=node.norm, folded_heads=side.folded_heads)


def _view(node: Node, main: Node, where: str) -> Side:
    side = follow(main, where)
    before, after = math.prod(main.shape), math.prod(node.shape)
    if node.op in _REPEATS and before and after > before and after % before == 0:
        side.growth *= after // before
        side.stages.append(Stage(where, "repeat", str(after // before)))
    if node.op in _RESHAPES and main.shape and node.shape and main.shape[-1] > node.shape[-1]:
        side.folded_heads = main.shape[-1]
    if side.basis is not None:
        try:
            side.basis = replay(node, side.basis)
        except RuntimeError:
            side.basis = None
    return side


def _multiplied(node: Node, main: Node, where: str) -> Side:
    side = follow(main, where)
    position = 1 if node.args[0] is main else 0
    other = node.args[position]
    if isinstance(other, Node) and other.act:
        side.unknown.append(node.op)
        side.stages.append(Stage(where, "unknown", node.op))
        return side
    if side.norm and not side.factors and isinstance(other, Node) and other.shape[-1:] > (1,):
        value = node.operands.get(position)  # a gain for every channel belongs to the normalisation
        side.basis = None if value is None or value.is_meta else _scaled(node.op, side.basis, value)
        return side
    factor = read_factor(node, position, where, heads_axis=-3)
    if factor is None:
        if _is_complex(node, position):
            side.rope = True
            side.stages.append(Stage(where, "rope"))
            amplitude = float(node.operands[position].abs().mean()) if not node.operands[position].is_meta else 1.0
            if abs(amplitude - 1) > 1e-3:
                side.factors.append(Factor(amplitude, where, "rotary table"))
            return side
        side.unknown.append(f"{node.op} by a tensor of shape {tuple(other.shape) if isinstance(other, Node) else ''}")
        side.stages.append(Stage(where, "unknown", node.op))
        return side
    if side.norm == "l2" and not side.factors and factor.value is not None and _is_sqrt_width(node, factor.value):
        # Unit length times sqrt(width) is unit root mean square.
        side.norm = "rms"
        side.stages[-1] = replace(side.stages[-1], detail="rms")
        side.basis = None if side.basis is None else side.basis * factor.value
        return side
    side.factors.append(factor)
    side.stages.append(Stage(where, "scale", describe(factor)))
    return side


def _scaled(op: str, basis: Tensor | None, value: Tensor) -> Tensor | None:
    if basis is None:
        return None
    return basis / value if op == "div" else basis * value


def _is_complex(node: Node, position: int) -> bool:
    value = node.operands.get(position)
    return value is not None and value.is_complex()


def _is_sqrt_width(node: Node, value: float) -> bool:
    return any(abs(value / math.sqrt(n) - 1) < 1e-3 for n in node.shape[-2:] if n > 1)


def _padded(node: Node, main: Node, where: str) -> Side:
    side = follow(main, where)
    pads = node.args[1]
    if len(pads) >= 2 and any(p > 0 for p in pads[:2]) and not any(pads[2:]):
        side.padding += int(sum(pads[:2]))
        side.stages.append(Stage(where, "pad", f"{main.shape[-1]} to {node.shape[-1]}"))
    else:
        side.stages.append(Stage(where, "pad"))
    if side.basis is not None:
        side.basis = replay(node, side.basis)
    return side


def _shifted(node: Node, main: Node, where: str) -> Side:
    """A learned vector added to q or k (a bias of the projection that came late)."""
    side = follow(main, where)
    side.stages.append(Stage(where, "shift"))
    position = 1 if node.args[0] is main else 0
    shift = node.operands.get(position)
    product = 1.0
    for factor in side.factors:
        product *= factor.value if factor.value is not None else math.nan
    if side.basis is not None and shift is not None and not shift.is_meta and math.isfinite(product) and product:
        sign = -1.0 if node.op == "sub" else 1.0
        side.basis = side.basis + sign * shift / product
    else:
        side.basis = None
    return side


def _joined(node: Node, where: str) -> Side:
    """Pieces of different origin put side by side: each is followed, and their factors must agree."""
    pieces = [p for p in node.parents() if p.act]
    zeros = [p for p in node.parents() if not p.act]
    dim = int(node.args[1]) if len(node.args) > 1 else 0
    if any(math.prod(p.shape) for p in zeros):
        side = follow(pieces[0], where)
        if len(pieces) == 1 and dim in (-1, len(node.shape) - 1) and all("zeros" in p.op for p in zeros):
            extra = node.shape[-1] - pieces[0].shape[-1]
            side.padding += extra
            side.stages.append(Stage(where, "pad", f"{pieces[0].shape[-1]} to {node.shape[-1]}"))
            side.basis = None if side.basis is None else torch.nn.functional.pad(side.basis, (0, extra))
        else:  # keys of the model's own beside the projected ones (memory keys): the latter's scale is read
            side.stages.append(Stage(where, "cat", "constant"))
            side.basis = None
        return side
    sides = [follow(p, where) for p in pieces]
    if len(sides) == 1:
        return sides[0]
    whole = _together(sides)
    if all(s.basis is not None for s in sides):
        whole.basis = torch.cat([s.basis for s in sides if s.basis is not None], dim)
    return whole


def _together(sides: list[Side]) -> Side:
    """What pieces of different origin have in common; their factors must agree."""
    whole = Side(None, sides[0].factors, [], None, norm=sides[0].norm, folded_heads=sides[0].folded_heads)
    whole.rope = any(s.rope for s in sides)
    whole.stages = [stage for s in sides for stage in s.stages]
    whole.unknown = [name for s in sides for name in s.unknown]
    values = [math.prod(f.value if f.value is not None else math.nan for f in s.factors) for s in sides]
    if any(abs(v - values[0]) > 1e-3 * abs(values[0]) for v in values):
        whole.unknown.append("pieces with unlike factors")
    return whole


def _assembled(node: Node, where: str) -> Side:
    """A tensor written slice by slice: like pieces put side by side."""
    pieces: list[tuple[Node, Node]] = []
    while node.op == "overwrite":
        old, new = node.args
        if new.op != "copy" or not isinstance(new.args[1], Node) or new.args[0].op not in ops.VIEWS:
            side = follow(old if old.act else new, where)
            side.unknown.append(f"{new.op} in place")
            side.stages.append(Stage(where, "unknown", f"{new.op} in place"))
            side.basis = None
            return side
        pieces.append((new.args[0], new.args[1]))
        node = old
    sides = [follow(source, where) for _, source in pieces]
    base = follow(node, where) if node.act else None
    whole = _together([base, *sides] if base is not None else sides)
    whole.root = sides[0].root if len(sides) == 1 and base is None else None
    covered = sum(place.shape[-1] for place, _ in pieces)
    if base is None and "zeros" in node.op and covered < node.shape[-1] and pieces[0][0].shape[:-1] == node.shape[:-1]:
        whole.padding = node.shape[-1] - covered
        whole.stages.append(Stage(where, "pad", f"{covered} to {node.shape[-1]}"))
    if all(s.basis is not None for s in sides) and (base is None or base.basis is not None):
        first = sides[0].basis
        assert first is not None
        basis = base.basis.clone() if base is not None and base.basis is not None else first.new_zeros(node.shape)
        for (place, _), side in zip(reversed(pieces), reversed(sides), strict=True):
            assert side.basis is not None
            replay(place, basis).copy_(side.basis)
        whole.basis = basis
    return whole


def _rotation(node: Node, where: str) -> Side | None:
    """A rotary embedding: q times cosines plus its turned halves times sines, however the halves are taken."""
    if node.op not in ("add", "sub", "cat", "stack", "overwrite", "addcmul") or sum(1 for _ in node.parents()) < 2:
        return None
    source, between = dominator(node)
    if source is None or any(n.op not in _ROTATION | ops.VIEWS | ops.SAME for n in between):
        return None
    if source.size or source.shape[-1:] == (1,):
        return None
    tables = [(n, i) for n in between if n.op in ("mul", "addcmul") for i in table_positions(n)]
    parts = node.op in ("cat", "stack") and all(p.act for p in node.parents())
    scaled = any(n.op in ("mul", "div") and not table_positions(n) for n in between)
    if not tables and (scaled or not parts):
        return None
    side = follow(source, where)
    if side.basis is not None and tuple(side.basis.shape) != node.shape:
        side.basis = side.basis.reshape(node.shape) if side.basis.numel() == math.prod(node.shape) else None
    if not tables:
        return side
    amplitude = amplitude_of(tables)
    side.rope = True
    side.stages.append(Stage(where, "rope"))
    if scaled:
        side.unknown.append("a factor inside a rotation")
    elif amplitude is None:
        side.unknown.append("rotary table of varying amplitude")
    elif abs(amplitude - 1) > 1e-3:
        side.factors.append(Factor(amplitude, where, "rotary table"))
    return side
