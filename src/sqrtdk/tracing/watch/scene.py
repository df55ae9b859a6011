"""What classifying needs to know beside the operation, and the operation's result."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from sqrtdk.tracing.watch.events import Listener, Online, SoftmaxEntry
from sqrtdk.tracing.watch.graph import Node
from sqrtdk.tracing.watch.sites import Sites
from sqrtdk.tracing.watch.store import Store


@dataclass(slots=True)
class Scene:
    """A trace while it runs.

    Attributes:
        store: the nodes.
        sites: where in the model an operation runs.
        listener: who is told.
        products: note the largest |q . k|.
        flex: what runs is FlexAttention's own code.
        entries: every softmax so far.
        exponentials: every exponential of logits that met values so far.
        online: those that are divided by their sum, and not told yet.
        held: how many logits exponentials hold.
        keep: keep the values of q, k and v at every step, and what projections multiplied.
    """

    store: Store
    sites: Sites
    listener: Listener
    products: bool
    flex: bool = False
    entries: list[SoftmaxEntry] = field(default_factory=list)
    exponentials: list[SoftmaxEntry] = field(default_factory=list)
    online: list[Online] = field(default_factory=list)
    held: int = 0
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Made:
    """One output of an operation: its node, which is being filled in, its values, and the operands by position."""

    node: Node
    tensor: Tensor
    tensors: dict[int, Tensor]
