"""Hooks on the gradients of what some projections gave: put there as soon as autograd has its node."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.weak import TensorWeakRef

Come = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True)
class Asked:
    """Which gradients a trace hands on.

    Attributes:
        labels: names of the weights of the projections, "" for those without a name; None: of all.
        come: is told the serial number of a projection's node, and the gradient of what it gave, in a backward pass.
    """

    labels: Collection[str] | None
    come: Come


class Hooked:
    """What the projections gave that are asked for.

    An operation's result has its node in autograd's graph only after the operation has been seen: the hook is put on it
    when the next one comes, which is before anything could write over it. It changes no number.
    """

    def __init__(self, asked: Asked) -> None:
        self._asked = asked
        self._waiting: list[tuple[int, TensorWeakRef]] = []

    def note(self, label: str, serial: int, tensor: Tensor) -> None:
        """A projection gave a tensor."""
        if (self._asked.labels is None or label in self._asked.labels) and torch.is_grad_enabled():
            self._waiting.append((serial, TensorWeakRef(tensor)))

    def attach(self) -> None:
        """Another operation comes, or the last one has run."""
        waiting, self._waiting = self._waiting, []
        for serial, ref in waiting:
            tensor = ref()
            if tensor is not None and tensor.requires_grad:
                tensor.register_hook(partial(self._asked.come, serial))
