"""A reading: what a reader of one kind of attention makes of it, for all kinds alike."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.records import Factor
from sqrtdk.tracing.spine.masks import as_passed
from sqrtdk.tracing.spine.orient import Orientation
from sqrtdk.tracing.spine.side import Side
from sqrtdk.tracing.steps import Scale, Step
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.tape.node import Carried, Node, Weighing
from sqrtdk.tracing.tape.places import Place

_SAFE_SOFTMAX = "aten._safe_softmax"  # of SDPA's unfused path alone


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of one attention.

    `inner` is how many entries of the batch (windows, say) stand between heads and rows in the attention's own layout.
    """

    batch: int
    heads: int
    rows: int
    columns: int
    width: int
    value_width: int
    inner: int = 1

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the logits, (B, H, L, S)."""
        return self.batch, self.heads, self.rows, self.columns

    def by_head(self, tensor: Tensor) -> Tensor:
        """(B, H, L, S) of (..., L, S) with the leading axes of the attention's own layout."""
        if self.inner == 1:
            return tensor.reshape(self.batch, self.heads, *tensor.shape[-2:])
        apart = tensor.reshape(-1, self.heads, self.inner, *tensor.shape[-2:])
        return apart.transpose(1, 2).reshape(self.batch, self.heads, *tensor.shape[-2:])


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """The logits and weights of an eager attention, as its softmax saw them, a column of sinks included.

    Attributes:
        values: what entered the softmax, in its own layout.
        weights: what left it.
        product: q . k.
        views: the views from the product to the softmax, innermost first.
        axes: where the softmax's layout has queries and keys.
        layout: sizes.
        met: the weights that met the values, (..., L, S), where a mixing may have shown hidden keys.
        first: number of the first key, where the softmax saw more than these.
    """

    values: Tensor
    weights: Tensor
    product: Node
    views: tuple[Node, ...]
    axes: Orientation
    layout: Layout
    met: Tensor | None = None
    first: int = 0

    def arrange(self, tensor: Tensor) -> Tensor:
        """(B, H, L, S) of a tensor in the softmax's layout, without the sinks' column."""
        columns = self.axes.apply(tensor)[..., self.first : self.first + self.layout.columns]
        return self.layout.by_head(columns)

    def at_logits(self, placed: Placed) -> Tensor:
        """(B, H, L, S) of a tensor that met the logits at an earlier step."""
        value = placed.at_softmax()
        return self.arrange(value if self.values.is_meta else value.to(self.values.device))


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """Q and k of a kernel that keeps its logits to itself.

    Attributes:
        query: (B, Hq, L, E), or as the kernel was given it.
        key: (B, H, S, E), or as the kernel was given it.
        scale: a number, or a tensor that broadcasts to (B, Hq, L, 1).
        softcap: of the kernel.
        exact: a key that is hidden by minus infinity gets a weight of 0 by the kernel's contract.
        exists: (B, 1, L, 1), False for rows of padding that the batch does not have; None where all exist.
        keys: (B, 1, 1, S), False for keys that it does not have; None where all exist, and where a mask hides them.
    """

    query: Tensor
    key: Tensor
    scale: float | Tensor
    softcap: float | None = None
    exact: bool = False
    exists: Tensor | None = None
    keys: Tensor | None = None

    def at_logits(self, placed: Placed) -> Tensor:
        """(B, H, L, S), any of them 1, of a tensor that the kernel was given."""
        value = placed.value[(None,) * (4 - placed.value.dim())]
        return value.flatten(0, value.dim() - 4)


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """The logits of an edge softmax, one an edge and head, as it saw them.

    Attributes:
        values: what entered the softmax.
        product: q[target] . k[source], or the same as a batch of products of one row and one column.
        views: the views from the product to the softmax, innermost first.
        axis: of the edges.
        index: the node of each edge; None where it is not known.
    """

    values: Tensor
    product: Node
    views: tuple[Node, ...]
    axis: int
    index: Tensor | None = None

    def arrange(self, tensor: Tensor) -> Tensor:
        """(1, heads, edges) of a tensor in the softmax's layout; what stands before the edges counts as heads."""
        return tensor.movedim(self.axis, -1).reshape(1, -1, tensor.shape[self.axis])

    def by_node(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """(1, heads, nodes, most edges), a row for each node that has several; and True where there is an edge."""
        assert self.index is not None
        _, node, count = torch.unique(self.index, return_inverse=True, return_counts=True)
        order = node.argsort(stable=True)
        node, first = node[order], count.cumsum(0) - count
        place = torch.arange(len(node), device=node.device) - first[node]
        rows = logits.new_full((*logits.shape[:-1], len(count), int(count.max())), -math.inf)
        rows[..., node, place] = logits[..., order]
        several = count > 1
        return rows[..., several, :], torch.arange(rows.shape[-1], device=node.device) < count[several, None]


@dataclass(frozen=True, slots=True, eq=False)
class Cell:
    """Rows and keys whose logits are one product, read as if they were an attention; from which of them on it is."""

    row: int
    key: int
    reading: Reading


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One attention, read.

    Attributes:
        site: module path.
        kind: of the record.
        op: the operation that ran it.
        layout: sizes.
        query: the way of q from its projection to the product.
        key: the way of k.
        steps: what happened from the product to the softmax, in order.
        operands: the tensors that tell the numbers; None where there is no product of q and k.
        dtype: of q at the product.
        logits_dtype: in which the logits were stored.
        device: where it ran.
        output: weights . v; None where it is not known.
        kv_heads: heads of the key as the product saw it, repeated or not; None where they are those of the query.
        dropout: rate of the dropout on the weights.
        carried: what the weights went through after the softmax.
        score: of an attention whose logits are no product of q and k.
        distance: its score is |q - k| to this power, and no q . k; see `Product`.
        axis: what its keys are; see `AttentionCall`.
        fault: why its numbers can't be judged: what it does is no attention as the record knows it.
        no_slope: why its scale can't be read from the numbers.
        no_stats: why its statistics can't be measured.
        place: where the softmax is written, or the kernel's call.
        blocks: the products that its logits come from, where blocks of keys have one each.
        offset: position of the first key, counted from that of the first row, where blocks have them told.
    """

    site: str
    kind: str
    op: str
    layout: Layout
    query: Side
    key: Side
    steps: tuple[Step, ...]
    operands: Logits | Vectors | Edges | None
    dtype: torch.dtype
    logits_dtype: torch.dtype
    device: torch.device
    output: Tensor | None = None
    kv_heads: int | None = None
    dropout: float = 0.0
    carried: Carried = field(default_factory=Carried)
    score: str | None = None
    distance: int | None = None
    axis: str = "positions"
    fault: str | None = None
    no_slope: str | None = None
    no_stats: str | None = None
    place: Place | None = None
    blocks: tuple[Cell, ...] = ()
    offset: int | None = None

    @property
    def reordered(self) -> bool:
        """Whether rows or keys were picked by indices of the data: i - j tells nothing then."""
        return self.query.gathered or self.key.gathered

    @property
    def without_data(self) -> bool:
        """Whether it ran on the meta device."""
        return self.device.type == "meta"


def of_softmax(weighing: Weighing, query: Side, key: Side, steps: tuple[Step, ...], **others: Any) -> Reading:
    """The reading of a softmax that met values; the others of its attributes are those of the softmax.

    SDPA's unfused path multiplies q and k by the root of its scale each, and turns masks into floats: they are told as
    the one scale of the call, and in the form in which it got them.
    """
    by_sdpa = weighing.op == _SAFE_SOFTMAX and not weighing.flex
    if by_sdpa:
        steps = as_passed(steps)
        left, right = (side.factors[-1].value if side.factors else None for side in (query, key))
        if left is not None and left == right:
            merged = Scale(Factor(left * right, "op", "sdpa scale"), at=query.factors[-1].at)
            query, key, steps = _without_last_scale(query), _without_last_scale(key), (merged, *steps)
    return Reading(
        site=weighing.entry.site,
        kind="sdpa" if by_sdpa else "flex" if weighing.flex else "eager",
        op="aten._scaled_dot_product_attention_math" if by_sdpa else weighing.op,
        query=query,
        key=key,
        steps=steps,
        device=weighing.logits.device,
        dropout=weighing.dropout,
        carried=weighing.carried,
        **others,
    )


def _without_last_scale(side: Side) -> Side:
    last = max(i for i, stage in enumerate(side.stages) if stage.name == "scale")
    return replace(side, factors=side.factors[:-1], stages=(*side.stages[:last], *side.stages[last + 1 :]))
