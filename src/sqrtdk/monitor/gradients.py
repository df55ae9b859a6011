"""The gradients of q and k, as their projections gave them: a hook on what a projection's module returns.

A rotation keeps the size of a gradient, and a factor is in it already; of q and k behind a norm it is the gradient
before the norm. An activation that is computed again during the backward pass is counted once: where the first pass ran
without autograd, what it returned has no gradient; where it ran with it, what was computed again has none.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

Place = tuple[str, int, str]  # site, index, "query" or "key"


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """Where one vector of one attention stands in what a module returns.

    Attributes:
        place: of which attention, and whether q or k.
        features: (H, E), numbers of the features in the module's output.
    """

    place: Place
    features: Tensor


class Gradients:
    """The size of the gradient of each row of q and k, while the context is open.

    Attributes:
        rows: by place, (H, n) parts: root of the mean square over the channels of a row.
    """

    def __init__(self, projections: Mapping[nn.Module, Sequence[Projected]]) -> None:
        self.rows: dict[Place, list[Tensor]] = defaultdict(list)
        self._projections = projections
        self._thread = threading.get_ident()
        self._handle: Any = None

    def __enter__(self) -> Gradients:
        self._thread = threading.get_ident()
        if self._projections:
            self._handle = torch_module.register_module_forward_hook(self._returned)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if module not in self._projections:
            return
        tensor = output[0] if isinstance(output, tuple) and output else output
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            hook = tensor.register_hook
            hook(lambda gradient: self._come(module, gradient))  # type: ignore[no-untyped-call]

    def _come(self, module: nn.Module, gradient: Tensor) -> None:
        with torch.no_grad():
            flat = gradient.detach().flatten(0, -2)
            for one in self._projections[module]:
                features = one.features.to(flat.device)
                rows = flat[:, features.flatten()].reshape(-1, *features.shape).float()
                self.rows[one.place].append(rows.square().mean(-1).sqrt().mT)
