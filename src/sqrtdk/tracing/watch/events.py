"""What the recorder tells the readers: a softmax whose weights met values, a kernel that ran, and what was missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sqrtdk.tracing.watch.carried import Carried
from sqrtdk.tracing.watch.graph import Node


@dataclass(slots=True)
class SoftmaxEntry:
    """A softmax that has run, for the list of those that turn out to be no attention."""

    site: str
    shape: tuple[int, ...]
    reason: str  # why it is no attention, unless it turns out to be one
    attention: bool = False


@dataclass(eq=False)
class Weighing:
    """A softmax that has run; it becomes an attention when its weights reach a value product."""

    node: Node  # of the logits
    logits: Tensor  # what entered it
    weights: Tensor  # what left it
    dim: int
    op: str
    entry: SoftmaxEntry
    flex: bool
    stored: torch.dtype  # of the product's result, before an upcast for the softmax
    dropout: float = 0.0
    sinks: bool = False  # its denominator has more than the keys
    carried: Carried = field(default_factory=Carried)  # what the weights went through until the value product
    met: Tensor | None = None  # the weights that met the values, (..., L, S), where a mixing may have shown hidden keys
    fault: str | None = None  # the value product sums over another axis than the softmax's


@dataclass(slots=True)
class KernelCall:
    """A call of an attention that is one operation.

    Attributes:
        op: its whole name, "aten::_scaled_dot_product_flash_attention_for_cpu".
        arguments: by their names in the operator's schema.
        nodes: of those that are tensors.
        output: its first result.
        site: module path.
    """

    op: str
    arguments: dict[str, Any]
    nodes: dict[str, Node]
    output: Tensor
    site: str


@dataclass(slots=True)
class Listener:
    """Who is told: of an eager attention that is complete, of a kernel that ran, and of what could not be seen."""

    eager: Callable[[Weighing, Tensor, Tensor], None]
    kernel: Callable[[KernelCall], None]
    missed: Callable[[str, str], None]
    enlarge: Callable[[str], float | None]
