"""Reads rotations of q and k: `x * cos + turned(x) * sin`, complex points `z * e^ia`, or a table of matrices.

The operations' names show where a rotation may be. Whether it is one, and its factor, is measured on other values: a
rotation keeps the length of every vector, or multiplies all lengths by one number. A decay (xPos) multiplies by one
number for each position and channel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor

from sqrtdk.messages import Message
from sqrtdk.tracing.lower.vectors import holds_angles
from sqrtdk.tracing.probe.replays import Subgraph, subgraph_between
from sqrtdk.tracing.readback.regroup import regrouped
from sqrtdk.tracing.readback.side import Follow, ProductSide
from sqrtdk.tracing.records import BY_ROW, Factor, Stage
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.graph import dominator, evaluate
from sqrtdk.tracing.tape.node import Node, back

REPEATS = frozenset({"expand", "repeat", "repeat_interleave", "index", "index_select"})
_TABLE_PRODUCTS = frozenset({"mul", "div", "addcmul"})
# Operations that may lie inside a rotation: taking halves, putting them together again, products with a table.
_MOVING = ops.VIEWS | {"cat", "stack", "copy", "overwrite", "complex", "sum"}
_INSIDE_A_ROTATION = _MOVING | _TABLE_PRODUCTS | ops.CASTS_AND_COPIES | {"neg", "add", "sub"}
_END_OF_A_ROTATION = frozenset({"add", "sub", "cat", "stack", "overwrite", "addcmul", "complex", "sum"})
_AMPLITUDE_TOLERANCE = 1e-3  # a table's amplitude this near to 1 is 1 with rounding
_LEAST_VECTORS = 16  # vectors whose lengths are measured; fewer could keep their length by chance
_DECAY_TOLERANCE = (
    2e-3  # the decays of q and k count as cancelled up to this relative spread, the rounding of their tables
)
_UNCANCELLED = "trace.step.decay"


@dataclass(frozen=True, slots=True, eq=False)
class Amplitude:
    """The factor by which a rotation multiplies the length of vectors.

    Attributes:
        value: one number, 1.0 for a plain rotation.
        decay: factors that differ by position (xPos); None if there are none.
    """

    value: float
    decay: Tensor | None = None


_amplitudes: WeakKeyDictionary[Node, Amplitude | None] = WeakKeyDictionary()
# Nodes without an amplitude because a vector's length changes with its direction: measured, not merely unknown.
_skewed: WeakSet[Node] = WeakSet()


def rotated(node: Node, where: str, follow: Follow) -> ProductSide | None:
    """Return q or k after a rotary embedding, whichever way it takes the halves of the channels.

    Args:
        node: node of the result.
        where: "q" or "k".
        follow: reads q or k up to a node.

    Returns:
        The reading; None if `node` does not end a rotation.
    """
    last = node.main() if node.op == "sum" else node  # (R * x[..., None, :]).sum(-1)
    if (
        node.is_root
        or node.op not in _END_OF_A_ROTATION
        or last is None
        or (last is node and sum(1 for _ in node.parents()) < 2)
    ):
        return None
    source, between = dominator(last)
    if source is None or source.shape[-1:] == (1,) or any(n.op not in _INSIDE_A_ROTATION for n in between):
        return None
    if not any(n.op in _MOVING for n in (node, *between)):
        return None  # x * a + x * b scales x and rotates nothing
    tables = any(_tables(n) for n in between)
    rejoined = node.op in ("cat", "stack", "complex") and all(p.act for p in node.parents())
    scaled = any(n.op in ("mul", "div") and not _tables(n) and n.number(1) != 1.0 for n in between)
    if not tables and (scaled or not rejoined or any(repeat_count(n) for n in between)):
        return None
    if not tables and node.op != "complex":
        return _rejoined(node, source, follow(source, where))
    amplitude = amplitude_of(source, node) if tables else None
    if tables and amplitude is None and node.op == "sum":
        return None
    side = follow(source, where)
    side = replace(side, basis=in_shape(side.basis, node))
    if not tables:
        return side
    if amplitude is None:
        skewed = node in _skewed
        id = "skewed" if skewed else "factor_in_rotation" if scaled else "rotary_table"
        unknown = (*side.unknown, Message(f"trace.step.{id}"))
        return side.then(Stage(where, "rope"), rope=True, unknown=unknown, skewed=side.skewed or skewed)
    return after_rotation(side, amplitude, where)


def _tables(node: Node) -> list[int]:
    """Return the positions of arguments that are tables: constant tensors of more than one number."""
    if node.op not in _TABLE_PRODUCTS:
        return []
    return [i for i, arg in enumerate(node.args) if isinstance(arg, Node) and not arg.act and math.prod(arg.shape) > 1]


def _rejoined(node: Node, source: Node, side: ProductSide) -> ProductSide:
    """Return the side of one vector's pieces put together again: `torch.stack(q.chunk(heads, -1), 1)`."""
    folded = source.shape[-1] if source.shape[-1] > node.shape[-1] else side.folded_heads
    return replace(side, basis=regrouped(node, lambda n: side.basis if n is source else None), folded_heads=folded)


# -- what a rotation multiplies by -------------------------------------------------------------------------------------


def amplitude_of(source: Node, node: Node) -> Amplitude | None:
    """Return the factor on the length of vectors between two nodes, measured by running the operations again.

    Args:
        source: node of the vectors before.
        node: node of the vectors after.

    Returns:
        The factor; None if the operations are no rotation, or can't be run again.
    """
    if node not in _amplitudes:
        part = subgraph_between(source, node)
        try:
            _amplitudes[node] = None if part is None else _measured(part, _made_up(part))
            if part is not None and _amplitudes[node] is None:
                _skewed.add(node)
        except Exception:  # an operand has no values, or an operation does not run on the sampled vectors
            _amplitudes[node] = None
    return _amplitudes[node]


def _measured(part: Subgraph, tables: dict[Node, Tensor]) -> Amplitude | None:
    rows = part.sampled(-1, tables, most=1)
    several = 1 if math.prod(rows[:-1]) >= _LEAST_VECTORS else 4  # a single vector may keep its length by chance
    vectors = torch.randn((several, *rows), dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        part.device
    )
    before = vectors.norm(dim=-1)
    after = torch.stack([_lengths(part.run(x, tables), x) for x in vectors])
    eps = max(
        (torch.finfo(x.dtype).eps for node in part.order for x in node.operands.values() if x.is_floating_point()),
        default=0.0,
    )
    amplitude = _even((after / before).square(), eps)
    if amplitude is None or amplitude.decay is None:
        return amplitude
    channels = torch.eye(rows[-1], dtype=torch.float64, device=part.device)
    turned = [part.run(channel.expand(rows), tables) for channel in channels]
    decay = torch.stack([_lengths(y, vectors[0]) for y in turned], -1)
    if not torch.allclose((vectors * decay).norm(dim=-1), after, rtol=_AMPLITUDE_TOLERANCE + 8 * eps):
        return None  # x1 * cos + x2 * sin, x2 * cos + x1 * sin: a sign is missing, so a pair is not orthogonal
    return Amplitude(1.0, decay)


def _lengths(after: Tensor, before: Tensor) -> Tensor:
    """Return the lengths of the vectors along `before`'s last axis, which the effect may have reshaped."""
    lead = before.shape[:-1]
    while lead[-1:] == (1,):
        lead = lead[:-1]
    if after.shape[: len(lead)] != lead:
        raise RuntimeError("not the vectors that went in")
    return after.reshape(*before.shape[:-1], -1).abs().square().sum(-1).sqrt()


def _even(squares: Tensor, eps: float) -> Amplitude | None:
    """Return one amplitude if all squared lengths are equal up to rounding, else a decay."""
    low, high = (math.sqrt(float(v)) for v in torch.aminmax(squares))
    mean = math.sqrt(float(squares.mean()))
    if high - low <= (_AMPLITUDE_TOLERANCE + 8 * eps) * mean:
        return Amplitude(mean)
    return Amplitude(1.0, squares.sqrt()) if low > 0 else None


def _made_up(part: Subgraph) -> dict[Node, Tensor]:
    """Return values for tables without values: cos and sin of an eighth of a turn, times the table's factor.

    There cos equals sin, so it does not matter which of the two a table holds.

    Raises:
        RuntimeError: the factor of a table is unknown.
    """
    made: dict[Node, Tensor] = {}
    for node in part.order:
        for i in _tables(node):
            table, value = node.args[i], node.operands.get(i)
            if value is not None and value.is_meta and evaluate(table) is None:
                scale = _scale_of_table(table)
                if scale is None:
                    raise RuntimeError("a table of unknown values")
                eighth = complex(0.5, 0.5) * 2**0.5 if value.is_complex() else 0.5**0.5
                made[table] = torch.full((), scale * eighth, device=part.device)
    return made


def _scale_of_table(node: Node) -> float | None:
    """Return the product of the numbers on a table without values, or None if any number is unknown."""
    *passed, node = back(node, ops.PASSING | {"mul", "cat", "stack", "table"})
    scale = 1.0
    for step in passed:
        if step.op == "mul":
            number = next((n for n in (step.number(0), step.number(1)) if n is not None), None)
            if number is None:
                return None
            scale *= number
    length = _length(node.args[0]) if node.op == "polar" and isinstance(node.args[0], Node) else 1.0
    return None if length is None else scale * length


def _length(node: Node) -> float | None:
    """Return the absolute value that `torch.polar(abs, angle)` was called with, or None if it is not one number."""
    if node.op.startswith("ones") or node.op == "new_ones":
        return 1.0
    if node.op == "full_like":
        return node.number(1)
    value = evaluate(node)
    return None if value is None or bool((value != value.flatten()[0]).any()) else float(value.flatten()[0])


# -- rotations by matrices ---------------------------------------------------------------------------------------------


def turned_by_matrix(node: Node, where: str, follow: Follow) -> ProductSide | None:
    """Return q or k after a product with rotation matrices, 2 x 2 for each pair of channels or one for all channels.

    Args:
        node: node of the product, with the vectors as a branch.
        where: "q" or "k".
        follow: reads q or k up to a node.

    Returns:
        The reading; None if the matrices are no rotations.
    """
    vector, table, values = node.branches[0][0], node.args[0], node.operands[0]
    several = math.prod(table.shape[:-2]) > 1  # R[i] @ q[i]: a matrix for each position or pair, not one projection
    known = evaluate(table) if values.is_meta else values.detach()
    if known is None and not holds_angles(table.args[0] if table.op == "table" else table):
        before = follow(vector, where)
        if several and (before.factors or before.rope):
            return before.lost(where, node.op, Message("trace.step.unknown_matrices"))
        return None
    size = 1.0 if known is None else _size(known)
    if size is None:
        return None
    side = follow(vector, where)
    if known is None or bool((known != known[(0,) * (known.dim() - 2)]).any()):
        return after_rotation(side, Amplitude(size), where)
    side = side.then(Stage(where, "rotation", "one for all positions"))
    return side.times(Factor(size, where, "rotation matrix")) if abs(size - 1) > _AMPLITUDE_TOLERANCE else side


def _size(matrices: Tensor) -> float | None:
    """Return the factor of R on a vector's length, R^T R = factor^2 * I, or None if the matrices are not rotations."""
    flat = matrices.reshape(-1, *matrices.shape[-2:]).double()
    if not flat.numel():
        return None
    squares = flat.mT @ flat
    size = float(squares.diagonal(dim1=-2, dim2=-1).mean())
    beside = squares - size * torch.eye(squares.shape[-1], dtype=squares.dtype, device=squares.device)
    even = size > 0 and float(beside.abs().max()) <= (_AMPLITUDE_TOLERANCE + 8 * torch.finfo(matrices.dtype).eps) * size
    return math.sqrt(size) if even else None


# -- sides after a rotation --------------------------------------------------------------------------------------------


def with_cancelled_decays(query: ProductSide, key: ProductSide) -> tuple[ProductSide, ProductSide]:
    """Return q and k after a check that their factors by position cancel where i = j.

    xPos multiplies q by a power of the position and k by its inverse (Sun et al. 2022, arXiv:2212.10554).

    Returns:
        (q, k). A constant that remains is added to q's factors. If the factors do not cancel, q becomes unknown. If
        only one of q and k has them, one number per row for all channels, they become a factor by row.
    """
    if query.decay is None and key.decay is None:
        return query, key
    if query.decay is None or key.decay is None:
        query, key = _by_row(query, "q"), _by_row(key, "k")
        if query.decay is None and key.decay is None:
            return query, key
    both = None if query.decay is None or key.decay is None else _product(query.decay, key.decay)
    if both is None or float(both.max() - both.min()) > _DECAY_TOLERANCE * float(both.mean()):
        return query.lost("q", Message(_UNCANCELLED)), key
    by = float(both.mean())
    return (query if abs(by - 1) <= _DECAY_TOLERANCE else query.times(Factor(by, "q", "rotary table"))), key


def _by_row(side: ProductSide, where: str) -> ProductSide:
    """Return the side with its decay as a factor of each row, if the decay is one number for all channels.

    Called if the other side has no decay that could cancel it.
    """
    if side.decay is None or side.decay.shape[-1] != 1:
        return side
    stages = [replace(stage, name="rope") if stage.name == "xpos" else stage for stage in side.stages]
    side = replace(side, decay=None, stages=tuple(stage for stage in stages if stage.name != "decay"))
    factor = Factor(None, where, BY_ROW)
    return side.times(factor, Stage(where, "scale", factor.text()))


def _product(query: Tensor, key: Tensor) -> Tensor | None:
    rows = query.shape[-2] if query.dim() > 1 else 1
    try:
        return query * (key[..., -rows:, :] if key.dim() > 1 and rows > 1 else key)
    except RuntimeError:
        return None


def repeat_count(node: Node) -> int:
    """Return how many times a view repeats each number of its source; 0 if the operation is not a repeat."""
    main = node.main()
    before, after = 0 if main is None else math.prod(main.shape), math.prod(node.shape)
    repeated = node.op in REPEATS and before and after > before and after % before == 0
    return after // before if repeated else 0


def after_rotation(side: ProductSide, amplitude: Amplitude, where: str) -> ProductSide:
    """Return q or k after a rotation by position.

    Args:
        side: q or k before it.
        amplitude: the factor of the rotation; one that is not 1 is added to the factors.
        where: "q" or "k".
    """
    side = side.then(Stage(where, "rope"), rope=True)
    if amplitude.decay is not None:
        side = after_decay(side, amplitude.decay, where)
    if abs(amplitude.value - 1) <= 1e-3:
        return side
    return side.times(Factor(amplitude.value, where, "rotary table"))


def after_decay(side: ProductSide, by: Tensor, where: str) -> ProductSide:
    """Return q or k after a product with factors that differ by position; right after a rotation it is named xPos.

    Args:
        side: q or k before it.
        by: the factors, multiplied with those from before.
        where: "q" or "k".
    """
    decay = by if side.decay is None else side.decay * by
    if side.stages[-1].name == "rope":
        return replace(side, stages=(*side.stages[:-1], Stage(where, "xpos")), decay=decay)
    return side.then(Stage(where, "decay"), decay=decay)


def in_shape(basis: Tensor | None, node: Node) -> Tensor | None:
    """Return values in the shape of the rotated vector, where real and complex forms are converted.

    The order of the channels is free, as q and k share it.

    Args:
        basis: the values; None if they are unknown.
        node: node of the rotated vector.

    Returns:
        The values; None if they are unknown, or if their number does not fit.
    """
    if basis is None or tuple(basis.shape) == node.shape:
        return basis
    if basis.is_complex() and node.op != "complex":
        basis = torch.view_as_real(basis)
    if node.op == "complex" and basis.numel() == 2 * math.prod(node.shape):
        return torch.view_as_complex(basis.reshape(*node.shape, 2))
    return basis.reshape(node.shape) if basis.numel() == math.prod(node.shape) else None
