"""What the recorder tells the reader: a softmax that ran, a fused call, and whom to tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sqrtdk.trace.graph import Node


@dataclass(slots=True)
class Seen:
    """A softmax that has run, for the list of those that turn out to be no attention."""

    site: str
    shape: tuple[int, ...]
    reason: str  # why it is no attention, unless it turns out to be one
    attention: bool = False


@dataclass(eq=False)
class Pending:
    """A softmax that has run; it becomes an attention when its weights reach a value product."""

    node: Node  # of the logits
    logits: Tensor  # what entered it
    weights: Tensor  # what left it
    dim: int
    op: str
    seen: Seen
    flex: bool
    stored: torch.dtype  # of the product's result, before an upcast for the softmax
    dropout: float = 0.0
    sinks: bool = False  # its denominator has more than the keys
    carried: Any = None  # what the weights went through until the value product (`carried.Carried`)
    fault: str | None = None  # the value product sums over another axis than the softmax's


@dataclass(slots=True)
class Fused:
    """The arguments of a fused attention call, whatever the kernel calls them."""

    op: str
    query: Tensor
    key: Tensor
    value: Tensor
    query_node: Node
    key_node: Node
    mask: Tensor | None
    mask_node: Node | None
    is_causal: bool
    scale: float | None
    dropout: float
    output: Tensor
    site: str


@dataclass(slots=True)
class Compiled:
    """The arguments of the project's own operator by their names, and the nodes of those that are tensors."""

    arguments: dict[str, Any]
    nodes: dict[str, Node]
    output: Tensor
    site: str


@dataclass(slots=True)
class Listener:
    """What the recorder tells: an eager attention is complete, a fused, a compiled or a native one ran."""

    eager: Callable[[Pending, Tensor, Tensor], None]
    fused: Callable[[Fused], None]
    compiled: Callable[[Compiled], None]
    native: Callable[[str, str, dict[str, Any], Tensor], None]
    missed: Callable[[str, str], None]
    enlarge: Callable[[str], float | None] = field(default=lambda site: None)
