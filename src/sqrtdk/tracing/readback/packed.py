"""Brings sequences of different lengths (packed end to end, padded, or nested) into one padded row per sequence."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sqrtdk.masks.band import Band, in_band
from sqrtdk.messages import Message
from sqrtdk.tracing.readback import addends
from sqrtdk.tracing.readback.factors import read_factor
from sqrtdk.tracing.readback.lineage import follow_side
from sqrtdk.tracing.readback.reading import Layout, Reading, Vectors, of_softmax
from sqrtdk.tracing.readback.side import ProductSide
from sqrtdk.tracing.records import Factor, NotAttentionCode, Stage
from sqrtdk.tracing.steps import Scale, Step, Unknown
from sqrtdk.tracing.tape import ops
from sqrtdk.tracing.tape.node import Node, SoftmaxRun, origin

_MATRIX_PROJECTIONS = frozenset({"linear", "matmul", "mm", "bmm"})
_OF_PIECES = "_nested_tensor_from_tensor_list"


@dataclass(frozen=True, slots=True, eq=False)
class Sequences:
    """The places of one side's sequences among its tokens (T, H, E), or (N, L, H, E) with L tokens each.

    Attributes:
        count: N, the number of sequences.
        longest: tokens of the longest sequence; without data, the upper bound.
        starts: (N,) first token of each sequence; None if all have one length, or without data.
        lengths: (N,) tokens of each sequence; None if `starts` is None.
        known: True if the lengths are known.
    """

    count: int
    longest: int
    starts: Tensor | None = None
    lengths: Tensor | None = None
    known: bool = True

    @classmethod
    def of(cls, operand: Tensor, ends: Tensor | None, used: Tensor | None, longest: int | None) -> Sequences:
        """Return the sequences of an operand.

        Args:
            operand: (T, H, E) or (1, T, H, E) if `ends` is passed, else (N, L, H, E).
            ends: (N + 1,) cumulative lengths, starting with 0 (`cu_seqlens`).
            used: (N,) tokens of each sequence that take part; None if all do.
            longest: the longest length that was passed to the kernel.
        """
        if ends is None:
            count, length = operand.shape[:2]
            if used is None or used.is_meta:
                return cls(count, length, known=used is None)
            return cls(count, length, torch.arange(count, device=used.device) * length, used.long())
        # flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, ...): sequence i has the tokens ends[i] to ends[i + 1].
        count = ends.shape[0] - 1
        if ends.is_meta or (used is not None and used.is_meta):
            return cls(count, int(longest or operand.shape[-3]), known=False)
        lengths = ends.diff() if used is None else used
        most = int(lengths.max()) if count else 0
        # Sequences of one length need no index: their tokens reshape to (N, L, H, E).
        if count * most == operand.shape[-3] and bool((lengths == most).all()):
            return cls(count, most)
        return cls(count, most, ends[:-1].long(), lengths.long())

    def spread(self, tokens: Tensor) -> Tensor:
        """Return the tokens of packed sequences as (N, H, longest, E), with zeros after the end of a sequence."""
        exists = self.exists(tokens.device)
        if self.starts is None or exists is None:
            return tokens.reshape(self.count, self.longest, *tokens.shape[-2:]).transpose(1, 2)
        flat = tokens.reshape(-1, *tokens.shape[-2:])
        at = self.starts[:, None] + torch.arange(self.longest, device=flat.device)
        rows = flat[at.clamp(max=max(len(flat) - 1, 0))]
        return rows.masked_fill(~exists[:, :, None, None], 0.0).transpose(1, 2)

    def exists(self, device: torch.device) -> Tensor | None:
        """Return (N, longest), False after the end of a sequence; None if all have one length, or without data."""
        if self.lengths is None:
            return None
        return torch.arange(self.longest, device=device) < self.lengths.to(device)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class PackedPair:
    """Queries and keys of the same sequences.

    Attributes:
        queries: places of the queries.
        keys: places of the keys.
        device: device of both.
        alike: one tensor gives the ends of both.
    """

    queries: Sequences
    keys: Sequences
    device: torch.device
    alike: bool = False

    @property
    def unlike(self) -> bool:
        """Whether sequences are known to differ in length, among the queries or among the keys."""
        return self.queries.lengths is not None or self.keys.lengths is not None

    @property
    def known(self) -> bool:
        """Whether the lengths of the sequences are known for the queries and for the keys."""
        return self.queries.known and self.keys.known

    @property
    def square(self) -> bool:
        """Whether every sequence has as many queries as keys."""
        if self.queries.longest != self.keys.longest:
            return False
        return self.alike if not self.known else not self.unlike or not bool(self._offset().any())

    def exist(self) -> tuple[Tensor | None, Tensor | None]:
        """Return (N, 1, L, 1) and (N, 1, 1, S), False after the end of a sequence; None if all have one length."""
        rows, columns = (side.exists(self.device) for side in (self.queries, self.keys))
        rows = None if rows is None else rows[:, None, :, None]
        return rows, None if columns is None else columns[:, None, None, :]

    def vectors(
        self, query: Tensor, key: Tensor, scale: float | Tensor, softcap: float | None = None, *, exact: bool
    ) -> Vectors:
        """Return q and k of the kernel with one padded row per sequence.

        Args:
            query: q, (T, H, E) or (N, L, H, E).
            key: k, likewise.
            scale: a number, or a tensor that broadcasts to (B, Hq, L, 1).
            softcap: the kernel's softcap; None if it has none.
            exact: whether a key hidden by minus infinity has weight 0 by the kernel's contract.
        """
        query = query if query.is_meta else self.queries.spread(query)
        key = key if key.is_meta else self.keys.spread(key)
        rows, columns = self.exist()
        return Vectors(query, key, scale, softcap, exact=exact, exists=rows, keys=columns)

    def distance(self, *, lower_right: bool) -> Tensor:
        """Return i - j, (N or 1, 1, L, S); it is 0 at the last query and key if `lower_right`, else at the first."""
        i, j = self._positions(lower_right=lower_right)
        return i - j

    def _positions(self, *, lower_right: bool) -> tuple[Tensor, Tensor]:
        """Return i, (N or 1, 1, L, 1), and j, (S,); the last query is at the last key if `lower_right`."""
        i = torch.arange(self.queries.longest, device=self.device)[None, None, :, None]
        return i + self._offset() if lower_right else i, torch.arange(self.keys.longest, device=self.device)

    def _offset(self) -> Tensor:
        """Return S - L of each sequence, (N or 1, 1, 1, 1)."""
        sides = (self.keys, self.queries)
        lengths = (torch.tensor([side.longest]) if side.lengths is None else side.lengths for side in sides)
        keys, queries = (each.to(self.device) for each in lengths)
        return (keys - queries)[:, None, None, None]

    def visible(self, left: int | None, right: int | None, *, lower_right: bool) -> Tensor | None:
        """Return which keys a window lets each row see.

        Args:
            left: how many keys before the row's own are visible; None is no bound.
            right: how many keys after it are visible; None is no bound.
            lower_right: whether the last row is at the last key, and not the first row at the first key.

        Returns:
            Bool, (N or 1, 1, L, S), True where the row sees the key; None if every key is visible.
        """
        i, j = self._positions(lower_right=lower_right)
        visible = in_band(i, j, Band(None if right is None else -right, left))
        every = torch.ones_like(visible)
        for exists in self.exist():
            every = every if exists is None else every & exists
        return visible & every if bool((~visible & every).any()) else None

    def too_large(self) -> str | None:
        """Return the reason why a mask of these sizes is not computed, a text; None if it is small enough."""
        count, rows, columns = self.queries.count, self.queries.longest, self.keys.longest
        if (count if self.unlike else 1) * rows * columns <= addends.MOST_MASK_ELEMENTS:
            return None
        if not self.unlike:
            return Message("trace.statistics.window", rows=rows, keys=columns)
        return Message("trace.statistics.mask", count=count, rows=rows, keys=columns)


# -- nested tensors, of which torch made operations on whole nested batches --------------------------------------------


def read_nested(softmax_run: SoftmaxRun, value: Tensor) -> Reading | NotAttentionCode:
    """Return the reading of a softmax over nested logits, whose weights multiply values.

    Args:
        softmax_run: the softmax.
        value: the nested tensor of the values.

    Returns:
        The reading, with one padded row per sequence; or the code of the reason why it is not an attention.
    """
    # (q @ k.transpose(-1, -2) * scale).softmax(-1) @ v, where all are torch.nested tensors.
    product, met = _back_through_nested(softmax_run.node, "logits", {"matmul"})
    if product is None or len(product.operands) < 2:
        return "nested_logits"
    q, k = product.operands[0], product.operands[1].transpose(-1, -2)
    (rows, queries), (columns, keys) = _tokens(q), _tokens(k)
    query, key = _side(product.args[0], "q", queries), _side(product.args[1], "k", keys)
    steps: tuple[Step, ...] = tuple(Scale(m) if isinstance(m, Factor) else Unknown(m) for m in met)
    by = math.prod(m.value or math.nan for m in met if isinstance(m, Factor))
    unread = next((m for m in met if isinstance(m, str)), None)
    heads, width = rows.shape[1:]
    value_width = value.unbind()[0].shape[-1]
    layout = Layout(queries.count, heads, queries.longest, keys.longest, width, value_width)
    return of_softmax(
        softmax_run,
        query,
        key,
        steps,
        layout=layout,
        operands=PackedPair(queries, keys, q.device).vectors(rows, columns, by, exact=True),
        dtype=q.dtype,
        logits_dtype=softmax_run.logits.dtype,
        no_slope=unread,
        no_stats=None if unread is None else Message("trace.statistics.nested", step=unread),
    )


def _tokens(nested: Tensor) -> tuple[Tensor, Sequences]:
    """Return the tokens of all sequences end to end, (T, H, E), and their places."""
    pieces = [piece if piece.dim() == 3 else piece[None] for piece in nested.unbind()]
    lengths = torch.tensor([piece.shape[-2] for piece in pieces], device=nested.device)
    sequences = Sequences(len(lengths), int(lengths.max()), lengths.cumsum(0) - lengths, lengths)
    return torch.cat([piece.transpose(0, 1) for piece in pieces]), sequences


def _back_through_nested(node: Node, where: str, ends: Set[str]) -> tuple[Node | None, list[Factor | str]]:
    """Walks back through nested tensors to an operation of `ends`.

    Returns its node (None if the walk does not reach one), and the factors and the names of other operations since.
    """
    met: list[Factor | str] = []
    while node.op not in ends:
        # The tape has no shape for a nested tensor; a mask or a bias beside it has one.
        nested = [p for p in node.parents() if not p.shape and p.op not in ("constant", "parameter")]
        if not nested:
            return None, [node.op, *met]
        if node.op not in ops.PASSING:
            met.insert(0, _factor(node, nested[0], where) or node.op)
        node = nested[0]
    return node, met


def _factor(node: Node, main: Node, where: str) -> Factor | None:
    """Return the factor of a multiplication by one number, or None."""
    if node.op == "neg":
        return Factor(-1.0, where, "number")
    position = 1 if node.args[0] is main else 0
    if node.op not in ("mul", "div") or (node.op == "div" and position == 0):
        return None
    return read_factor(node, position, where, heads_axis=-3)


def _side(node: Node, where: str, sequences: Sequences) -> ProductSide:
    """Return the side from the product back to the projection of the packed tokens or of the nested batch."""
    start, met = _back_through_nested(node, where, _MATRIX_PROJECTIONS | {_OF_PIECES})
    if start is None or any(isinstance(m, str) for m in met):
        last = next(m for m in reversed(met) if isinstance(m, str))
        side = ProductSide(None, None).lost(where, Message("trace.step.nested", name=last))
    elif start.op == _OF_PIECES:
        side = _of_pieces(start, where, sequences)
    else:
        weight = start.args[1]
        label = origin(weight).label if isinstance(weight, Node) else ""
        side = ProductSide(None, None, (Stage(where, "projection", label or start.op),))
    for factor in met:
        side = side.times(factor, Stage(where, "scale", factor.text())) if isinstance(factor, Factor) else side
    return side


def _of_pieces(node: Node, where: str, sequences: Sequences) -> ProductSide:
    """Return the side of a nested tensor made from a list; it is followed if the list splits one (T, H, E) tensor."""
    pieces = list(node.parents())
    tokens = {piece.main() for piece in pieces}
    whole = next(iter(tokens)) if len(tokens) == 1 else None
    if whole is None or any("split" not in piece.op for piece in pieces):
        return ProductSide(None, None).lost(where, Message("trace.step.nested_several"))
    side = follow_side(whole, where)
    fits = side.basis is not None and side.basis.dim() == 3 and not side.basis.is_meta
    return replace(side, basis=sequences.spread(side.basis) if fits and side.basis is not None else None)
