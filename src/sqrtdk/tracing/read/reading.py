"""A reading: what a reader of one kind of attention makes of it, for all kinds alike."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from sqrtdk.tracing.read.orient import Orientation
from sqrtdk.tracing.read.side import Side
from sqrtdk.tracing.steps import Step
from sqrtdk.tracing.steps.placed import Placed
from sqrtdk.tracing.watch.carried import Carried
from sqrtdk.tracing.watch.graph import Node


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of one attention."""

    batch: int
    heads: int
    rows: int
    columns: int
    width: int
    value_width: int


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
        first: number of the first key, where the softmax saw more than these.
    """

    values: Tensor
    weights: Tensor
    product: Node
    views: tuple[Node, ...]
    axes: Orientation
    layout: Layout
    first: int = 0

    def arrange(self, tensor: Tensor) -> Tensor:
        """(B, H, L, S) of a tensor in the softmax's layout, without the sinks' column."""
        sizes = self.layout
        columns = self.axes.apply(tensor)[..., self.first : self.first + sizes.columns]
        return columns.reshape(sizes.batch, sizes.heads, *columns.shape[-2:])

    def place(self, placed: Placed) -> Tensor:
        """(B, H, L, S) of a tensor that met the logits at an earlier step."""
        return self.arrange(placed.at_softmax())


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
    """

    query: Tensor
    key: Tensor
    scale: float | Tensor
    softcap: float | None = None
    exact: bool = False
    exists: Tensor | None = None

    def place(self, placed: Placed) -> Tensor:
        """(B, H, L, S), any of them 1, of a tensor that the kernel was given."""
        value = placed.value
        if value.dim() < 4:
            return value.reshape((1,) * (4 - value.dim()) + tuple(value.shape))
        return value.flatten(0, value.dim() - 4)


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
        fault: why its numbers can't be judged: what it does is no attention as the record knows it.
        no_slope: why its scale can't be read from the numbers.
        no_stats: why its statistics can't be measured.
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
    operands: Logits | Vectors | None
    dtype: torch.dtype
    logits_dtype: torch.dtype
    device: torch.device
    output: Tensor | None = None
    kv_heads: int | None = None
    dropout: float = 0.0
    carried: Carried = field(default_factory=Carried)
    score: str | None = None
    fault: str | None = None
    no_slope: str | None = None
    no_stats: str | None = None
    blocks: tuple[Cell, ...] = ()
    offset: int | None = None

    @property
    def without_data(self) -> bool:
        """Whether it ran on the meta device."""
        return self.device.type == "meta"
