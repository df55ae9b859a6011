"""Rotary embeddings: a vector times cosines plus its turned self times sines, or times a rotation matrix."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.tracing.read.amplitude import Amplitude, amplitude_of, table_positions
from sqrtdk.tracing.read.regroup import regrouped
from sqrtdk.tracing.records import ROWS, Factor, Stage
from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, dominator

if TYPE_CHECKING:
    from sqrtdk.tracing.read.side import Side

    Follow = Callable[[Node, str], Side]

REPEATS = frozenset({"expand", "repeat", "repeat_interleave", "index", "index_select"})
# Between a vector and its rotated self: products with a table, halves taken and put together again.
_ROTATION = frozenset(
    {"mul", "div", "neg", "add", "sub", "cat", "stack", "addcmul", "copy", "overwrite", "flip", "clone", "complex"}
)
_ROTATED = frozenset({"add", "sub", "cat", "stack", "overwrite", "addcmul", "complex"})  # the last of them

_EVEN = 2e-3  # decays cancel but for the rounding of their tables
_UNCANCELLED = "a decay that the other side does not cancel"


def rotated(node: Node, where: str, follow: Follow) -> Side | None:
    """A rotary embedding, however the halves are taken; None where it is none."""
    if node.op not in _ROTATED or sum(1 for _ in node.parents()) < 2:
        return None
    source, between = dominator(node)
    if source is None or not _turns(source, between):
        return None
    tables = any(table_positions(n) for n in between if n.op in ("mul", "div", "addcmul"))
    rejoined = node.op in ("cat", "stack", "complex") and all(p.act for p in node.parents())
    scaled = any(n.op in ("mul", "div") and not table_positions(n) and n.number(1) != 1.0 for n in between)
    if not tables and (scaled or not rejoined or any(repeats(n) for n in between)):
        return None
    side = follow(source, where)
    if not tables and node.op != "complex":
        return _rejoined(node, source, side)
    side = replace(side, basis=_in_shape(side.basis, node))
    if not tables:
        return side
    amplitude = amplitude_of(node, source)
    if amplitude is None:
        name = "a factor inside a rotation" if scaled else "rotary table of varying amplitude"
        return side.then(Stage(where, "rope"), rope=True, unknown=(*side.unknown, name))
    return turned(side, amplitude, where)


def _rejoined(node: Node, source: Node, side: Side) -> Side:
    """Pieces of one vector in another order: heads cut out of it and stacked, halves taken and put together again."""
    folded = source.shape[-1] if source.shape[-1] > node.shape[-1] else side.folded_heads
    return replace(side, basis=regrouped(node, lambda n: side.basis if n is source else None), folded_heads=folded)


def paired(query: Side, key: Side) -> tuple[Side, Side]:
    """Both sides; their decays, by a power of the position on q and its inverse on k, must cancel where i = j (xPos).

    Sun et al. 2022, arXiv:2212.10554.
    """
    if query.decay is None and key.decay is None:
        return query, key
    if query.decay is None or key.decay is None:
        query, key = _by_row(query, "q"), _by_row(key, "k")
        if query.decay is None and key.decay is None:
            return query, key
    both = None if query.decay is None or key.decay is None else _product(query.decay, key.decay)
    if both is None or float(both.max() - both.min()) > _EVEN * float(both.mean()):
        return query.lost("q", _UNCANCELLED), key
    by = float(both.mean())
    return (query if abs(by - 1) <= _EVEN else query.times(Factor(by, "q", "rotary table"))), key


def _by_row(side: Side, where: str) -> Side:
    """A decay that nothing cancels is a factor of each row, where it is one number for all channels."""
    if side.decay is None or side.decay.shape[-1] != 1:
        return side
    stages = [replace(stage, name="rope") if stage.name == "xpos" else stage for stage in side.stages]
    side = replace(side, decay=None, stages=tuple(stage for stage in stages if stage.name != "decay"))
    factor = Factor(None, where, ROWS)
    return side.times(factor, Stage(where, "scale", factor.text()))


def _product(query: Tensor, key: Tensor) -> Tensor | None:
    rows = query.shape[-2] if query.dim() > 1 else 1
    try:
        return query * (key[..., -rows:, :] if key.dim() > 1 and rows > 1 else key)
    except RuntimeError:
        return None


def repeats(node: Node) -> int:
    """How many times a view holds each number of what it views; 0 where it is no repeat."""
    main = node.main()
    before, after = 0 if main is None else math.prod(main.shape), math.prod(node.shape)
    repeated = node.op in REPEATS and before and after > before and after % before == 0
    return after // before if repeated else 0


def turned(side: Side, amplitude: Amplitude, where: str) -> Side:
    """The side after a rotation; one whose table is no pure one multiplies by its amplitude."""
    side = side.then(Stage(where, "rope"), rope=True)
    if amplitude.decay is not None:
        side = decayed(side, amplitude.decay, where)
    if abs(amplitude.value - 1) <= 1e-3:
        return side
    return side.times(Factor(amplitude.value, where, "rotary table"))


def decayed(side: Side, by: Tensor, where: str) -> Side:
    """The side after a multiplication by one number, or more, for each position; on a rotation it is xPos."""
    decay = by if side.decay is None else side.decay * by
    if side.stages[-1].name == "rope":
        return replace(side, stages=(*side.stages[:-1], Stage(where, "xpos")), decay=decay)
    return side.then(Stage(where, "decay"), decay=decay)


def _turns(source: Node, between: Sequence[Node]) -> bool:
    """Whether the operations after `source` can be a rotation of it."""
    if source.shape[-1:] == (1,):
        return False
    return all(n.op in _ROTATION | ops.VIEWS | ops.SAME for n in between)


def _in_shape(basis: Tensor | None, node: Node) -> Tensor | None:
    """Values in the shape of their rotated selves; the order of the channels does not matter, q's and k's are alike."""
    if basis is None or tuple(basis.shape) == node.shape:
        return basis
    if basis.is_complex() and node.op != "complex":
        basis = torch.view_as_real(basis)
    if node.op == "complex" and basis.numel() == 2 * math.prod(node.shape):
        return torch.view_as_complex(basis.reshape(*node.shape, 2))
    return basis.reshape(node.shape) if basis.numel() == math.prod(node.shape) else None
