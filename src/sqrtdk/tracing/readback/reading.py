"""The result of reading one attention, in the same form for every kind of attention."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from sqrtdk.impl.call import Call
from sqrtdk.tracing.readback.addends import as_passed
from sqrtdk.tracing.readback.orient import Orientation
from sqrtdk.tracing.readback.side import ProductSide
from sqrtdk.tracing.records import Factor, PairDistance
from sqrtdk.tracing.steps import Scale, Step
from sqrtdk.tracing.steps.placed import StepTensor
from sqrtdk.tracing.tape.node import Node, SoftmaxRun, WeightSteps
from sqrtdk.tracing.tape.places import Place

_SAFE_SOFTMAX = "aten._safe_softmax"  # only SDPA's unfused path calls it


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of one attention.

    Attributes:
        batch: B.
        heads: H, the number of query heads.
        rows: L, the number of queries.
        columns: S, the number of keys.
        width: E, the number of channels of q and k in a head.
        value_width: Ev, the number of channels of v in a head.
        inner: number of batch entries (windows, say) that stand between heads and rows in the model's layout.
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
        """Shape of the logits, (B, H, L, S)."""
        return self.batch, self.heads, self.rows, self.columns

    def by_head(self, tensor: Tensor) -> Tensor:
        """Return (B, H, L, S) from (..., L, S) with the leading axes of the model's layout."""
        if self.inner == 1:
            return tensor.reshape(self.batch, self.heads, *tensor.shape[-2:])
        apart = tensor.reshape(-1, self.heads, self.inner, *tensor.shape[-2:])
        return apart.transpose(1, 2).reshape(self.batch, self.heads, *tensor.shape[-2:])


@dataclass(frozen=True, slots=True, eq=False)
class Logits:
    """The logits and weights of an eager attention, in the softmax's layout, with the column of sinks if there is one.

    Attributes:
        values: the softmax's input.
        weights: the softmax's output.
        product: q . k.
        views: the views from the product to the softmax, innermost first.
        axes: the axes of queries and keys in the softmax's layout.
        layout: sizes.
        met: the weights that multiply the values, (..., L, S); set if a mixing of heads may have shown hidden keys.
        first: index of the first key; nonzero if the softmax has keys before these.
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
        """Return (B, H, L, S) from a tensor in the softmax's layout, without the column of sinks."""
        columns = self.axes.apply(tensor)[..., self.first : self.first + self.layout.columns]
        return self.layout.by_head(columns)

    def at_logits(self, placed: StepTensor) -> Tensor:
        """Return (B, H, L, S) from a tensor that was applied to the logits at an earlier step."""
        value = placed.at_softmax()
        return self.arrange(value if self.values.is_meta else value.to(self.values.device))


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """Q and k of a kernel that does not expose its logits.

    Attributes:
        query: (B, Hq, L, E), or the shape that was passed to the kernel.
        key: (B, H, S, E), or the shape that was passed to the kernel.
        scale: a number, or a tensor that broadcasts to (B, Hq, L, 1).
        softcap: the kernel's softcap, in logits; None if it has none.
        exact: a key hidden by minus infinity has weight 0 by the kernel's contract.
        exists: (B, 1, L, 1), False for padding rows of shorter sequences; None if all rows exist.
        keys: (B, 1, 1, S), False for padding keys; None if all keys exist, or a mask hides the padding.
    """

    query: Tensor
    key: Tensor
    scale: float | Tensor
    softcap: float | None = None
    exact: bool = False
    exists: Tensor | None = None
    keys: Tensor | None = None

    def at_logits(self, placed: StepTensor) -> Tensor:
        """Return (B, H, L, S), any of them 1, from a tensor that was passed to the kernel."""
        value = placed.value[(None,) * (4 - placed.value.dim())]
        return value.flatten(0, value.dim() - 4)


@dataclass(frozen=True, slots=True, eq=False)
class Edges:
    """The logits of an edge softmax, one for each edge and head.

    Attributes:
        values: the softmax's input.
        product: q[target] . k[source]: a sum over channels, or `bmm` of one row and one column for each edge.
        views: the views from the product to the softmax, innermost first.
        axis: the axis of the edges.
        index: the node of each edge; None if it is unknown.
    """

    values: Tensor
    product: Node
    views: tuple[Node, ...]
    axis: int
    index: Tensor | None = None

    def arrange(self, tensor: Tensor) -> Tensor:
        """Return (1, heads, edges) from a tensor in the softmax's layout; all other axes count as heads."""
        return tensor.movedim(self.axis, -1).reshape(1, -1, tensor.shape[self.axis])

    def by_node(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits (1, heads, nodes, most edges) of the nodes with several edges, and a mask True at edges."""
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
    """A block of logits that comes from one product, read as an attention.

    Attributes:
        row: index of its first row in the whole.
        key: index of its first key in the whole.
        reading: its reading.
    """

    row: int
    key: int
    reading: Reading


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """One attention, read.

    Attributes:
        site: module path.
        kind: `kind` of the record.
        op: the operation that ran the attention.
        layout: sizes.
        query: q, from its projection to the product.
        key: k, from its projection to the product.
        steps: the steps from the product to the softmax, in order.
        operands: the tensors to measure; None if there is no product of q and k.
        dtype: dtype of q at the product.
        logits_dtype: dtype in which the logits are stored.
        device: device on which it ran.
        output: weights @ v; None if it is unknown.
        kv_heads: heads of the key at the product, repeated or not; None if they equal the query's.
        dropout: rate of the dropout on the weights.
        weight_steps: the steps on the weights after the softmax.
        score: name of the score if the logits are not a product of q and k.
        distance: the score is this distance of q and k instead of q . k; see `Product`.
        axis: what the keys are; see `AttentionCall`.
        fault: why the numbers can't be judged: the model computes no attention that the record can describe.
        no_slope: why the scale can't be read from the numbers.
        no_stats: why the statistics can't be measured.
        place: source line of the softmax, or of the kernel's call.
        blocks: the blocks of the logits, if there are several products.
        whole: the call of `sqrtdk.attention`, if it ran in blocks of rows and its logits are not a product and bias.
        sample: the reading of its first rows, from which the scale is read.
        offset: position of the first key minus position of the first row, if the blocks' positions are known.
    """

    site: str
    kind: str
    op: str
    layout: Layout
    query: ProductSide
    key: ProductSide
    steps: tuple[Step, ...]
    operands: Logits | Vectors | Edges | None
    dtype: torch.dtype
    logits_dtype: torch.dtype
    device: torch.device
    output: Tensor | None = None
    kv_heads: int | None = None
    dropout: float = 0.0
    weight_steps: WeightSteps = field(default_factory=WeightSteps)
    score: str | None = None
    distance: PairDistance | None = None
    axis: str = "positions"
    fault: str | None = None
    no_slope: str | None = None
    no_stats: str | None = None
    place: Place | None = None
    blocks: tuple[Cell, ...] = ()
    whole: Call | None = None
    sample: Reading | None = None
    offset: int | None = None

    @property
    def reordered(self) -> bool:
        """Whether rows or keys were picked by indices computed from the data; i - j is then no distance."""
        return self.query.gathered or self.key.gathered

    @property
    def without_data(self) -> bool:
        """Whether the attention ran on the meta device, where tensors have shapes and no numbers."""
        return self.device.type == "meta"


def of_softmax(
    softmax_run: SoftmaxRun, query: ProductSide, key: ProductSide, steps: tuple[Step, ...], **others: Any
) -> Reading:
    """Return the reading of a softmax whose weights multiply values.

    SDPA's unfused path multiplies both q and k by the root of its scale, and turns masks into floats. The reading
    gives the one scale of the call, and the masks as they were passed.

    Args:
        softmax_run: the softmax.
        query: q, from its projection to the product.
        key: k, likewise.
        steps: the steps from the product to the softmax, in order.
        others: further attributes of the `Reading`; those that the softmax tells need not be passed.
    """
    by_sdpa = softmax_run.op == _SAFE_SOFTMAX and not softmax_run.flex
    if by_sdpa:
        steps = as_passed(steps)
        left, right = (side.factors[-1].value if side.factors else None for side in (query, key))
        if left is not None and left == right:
            merged = Scale(Factor(left * right, "op", "sdpa scale"), at=query.factors[-1].at)
            query, key, steps = _without_last_scale(query), _without_last_scale(key), (merged, *steps)
    return Reading(
        site=softmax_run.entry.site,
        kind="sdpa" if by_sdpa else "flex" if softmax_run.flex else "eager",
        op="aten._scaled_dot_product_attention_math" if by_sdpa else softmax_run.op,
        query=query,
        key=key,
        steps=steps,
        device=softmax_run.logits.device,
        dropout=softmax_run.dropout,
        weight_steps=softmax_run.weight_steps,
        **others,
    )


def _without_last_scale(side: ProductSide) -> ProductSide:
    last = max(i for i, stage in enumerate(side.stages) if stage.name == "scale")
    return replace(side, factors=side.factors[:-1], stages=(*side.stages[:last], *side.stages[last + 1 :]))
