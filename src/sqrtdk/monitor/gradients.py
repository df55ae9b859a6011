"""The gradients of q and k as their projections gave them: a hook on the output of the projection's module.

If no module returns the vectors, as with the packed projection of nn.MultiheadAttention or with `x @ self.weight`, the
hook is one of the trace's, on the tensor itself.

A rotation keeps the size of a gradient, and a scale factor is already in it. For q and k behind a norm, it is the
gradient before the norm. An activation that is recomputed during the backward pass is counted once: if the first pass
ran without autograd, its tensors have no gradient; if it ran with autograd, the recomputed tensors have none.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from sqrtdk.errors import kind_and_text
from sqrtdk.messages import Message
from sqrtdk.tracing import Projection


def can_project(module: nn.Module) -> bool:
    """Return whether a module may compute q or k with its own weight, as `nn.Linear(d_model, h * d_k)` does.

    It has a parameter `weight` and no modules inside.
    """
    return "weight" in module._parameters and not module._modules


def module_of(projection: Projection | None, modules: dict[str, nn.Module]) -> nn.Module | None:
    """Return the module whose output is a projection.

    Args:
        projection: The projection, named by its weight: "h.0.attn.q.weight".
        modules: Modules of the model by path.

    Returns:
        The module, or None if there is no projection or its weight is not that of a module that projects.
    """
    path, _, name = projection.name.rpartition(".") if projection is not None else ("", "", "")
    module = modules.get(path)
    return module if name == "weight" and module is not None and can_project(module) else None


def was_compiled() -> bool:
    """Return whether torch's compiler called the running code, as it does to trace a model's Python code."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        # torch has no public way to ask this once the frame runs eagerly under the wrapper.
        if code.co_name == "compile_wrapper" and code.co_filename.endswith("eval_frame.py"):
            return True
        frame = frame.f_back
    return False


Place = tuple[str, int, str]  # site, index, "query" or "key"


@dataclass(frozen=True, slots=True, eq=False)
class Projected:
    """Where one vector (q or k) of one attention lies in the tensor that a module returns.

    Attributes:
        place: attention, and q or k.
        features: numbers of its features in the module's output, all heads in a row; a slice if they are contiguous.
        heads: number of heads H.
    """

    place: Place
    features: slice | Tensor
    heads: int

    @classmethod
    def of(cls, place: Place, features: Tensor) -> Projected:
        """Make it from the index of each feature in the projection, (H, E).

        Consecutive indices are stored as a slice, so that taking the features makes no copy.
        """
        flat = features.flatten()
        first = int(flat[0]) if flat.numel() else 0
        one = bool((flat == first + torch.arange(flat.numel(), device=flat.device)).all())
        return cls(place, slice(first, first + flat.numel()) if one else flat, features.shape[0])

    def sizes(self, gradient: Tensor) -> Tensor:
        """Return the root mean square over the channels of each row and head.

        Args:
            gradient: Gradient of the projection's output, (..., D).

        Returns:
            (H, n) for n rows, in the gradient's dtype, at least float32.
        """
        flat = gradient.reshape(-1, gradient.shape[-1])
        if isinstance(self.features, slice):
            rows = flat[:, self.features]
        else:
            rows = flat.index_select(-1, self.features.to(flat.device))
        rows = rows.reshape(len(rows), self.heads, -1)
        dtype = torch.promote_types(rows.dtype, torch.float32)
        norms: Tensor = torch.linalg.vector_norm(rows, dim=-1, dtype=dtype)
        # The root mean square does not depend on the head dimension, so that models can be compared.
        sizes: Tensor = norms.mT / rows.shape[-1] ** 0.5
        return sizes


def share_features(found: Sequence[Projected]) -> bool:
    """Return whether two of the vectors share a feature of the tensor.

    Example:
        >>> q, k = (Projected(("", 0, name), slice(at, at + 4), 2) for at, name in ((0, "query"), (4, "key")))
        >>> share_features([q, k]), share_features([q, k, Projected(("", 1, "key"), slice(6, 8), 1)])
        (False, True)
    """
    slices = [one.features for one in found]
    numbers = [n for one in slices for n in (range(one.start, one.stop) if isinstance(one, slice) else one.tolist())]
    return len(set(numbers)) < len(numbers)


class Gradients:
    """The size of the gradient of each row of q and k, measured while the context is open.

    Attributes:
        rows: by place, parts (H, n): root mean square over the channels of a row.
        failures: why some gradients could not be measured.
    """

    def __init__(
        self,
        asks: Callable[[nn.Module], bool],
        places: Callable[[nn.Module], Sequence[Projected]],
        most: int | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        """Set up the measurement.

        Args:
            asks: whether the module's current output may be a q or k that counts.
            places: the vectors that a module returns, asked when the gradient arrives, as they may be unknown before.
            most: rows of a sequence, evenly spread; None: all.
            loss_scale: factor on the loss before its backward pass.
        """
        self.rows: dict[Place, list[Tensor]] = defaultdict(list)
        self.failures: list[str] = []
        self._asks = asks
        self._places = places
        self._most = most
        self._loss_scale = loss_scale
        self._rooted: dict[int, list[tuple[Projected, int]]] = defaultdict(list)
        self._handle: Any = None

    def __enter__(self) -> Gradients:
        self._handle = torch_module.register_module_forward_hook(self._returned)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def root(self, serial: int, projected: Projected, length: int) -> None:
        """Register a vector (q or k) whose gradient is to be measured.

        Args:
            serial: Number of the trace's node that holds the vector.
            projected: Which features of the node's tensor belong to the vector.
            length: Rows of one sequence in the tensor.
        """
        self._rooted[serial].append((projected, length))

    def come(self, serial: int, gradient: Tensor) -> None:
        """Measure the gradient of a node's tensor; a backward pass calls this when it has computed it.

        Args:
            serial: Number of the trace's node.
            gradient: Gradient of the loss by the node's tensor.
        """
        for projected, length in self._rooted.get(serial, ()):
            self._try(partial(self._measure, [projected], gradient, length))

    def _returned(self, module: nn.Module, args: Any, output: Any) -> None:
        if not self._asks(module):
            return
        tensor = output[0] if isinstance(output, tuple) and output else output
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            hook, placements = tensor.register_hook, getattr(tensor, "placements", None)
            hook(lambda gradient: self._come(module, gradient, placements))  # type: ignore[no-untyped-call]

    def _come(self, module: nn.Module, gradient: Tensor, placements: object) -> None:
        if places := self._places(module):
            self._try(lambda: self._measure(places, _of_rank(gradient, placements)))

    def _try(self, measure: Callable[[], None]) -> None:
        try:
            with torch.no_grad():
                measure()
        except Exception as error:  # an error raised here would stop the backward pass
            self.failures.append(Message("alarms.unmeasured.gradient", error=kind_and_text(error)))

    def _measure(self, places: Sequence[Projected], gradient: Tensor, length: int | None = None) -> None:
        gradient = gradient.detach()
        if gradient.is_nested:
            gradient = gradient.values()
        rows = gradient.shape[-2] if gradient.dim() > 1 else 1
        length = length or rows
        if self._most is not None and self._most < length:
            chosen = torch.linspace(0, rows - 1, self._most * rows // length, device=gradient.device).round().long()
            gradient = gradient.index_select(-2, chosen)
        for one in places:
            # A loss scaler multiplies all gradients by one number, which is taken off here.
            self.rows[one.place].append(one.sizes(gradient) / self._loss_scale)


def _of_rank(gradient: Tensor, placements: object) -> Tensor:
    """Return this rank's part of a DTensor's gradient, without communication.

    Raises:
        ValueError: The gradient is laid out differently from its tensor.
    """
    if placements is None:
        return gradient
    # A gradient may be sharded along another dimension than its tensor; then its rows are not this rank's.
    if getattr(gradient, "placements", None) != placements:
        raise ValueError(f"that of a DTensor {placements} is laid out otherwise")
    local: Tensor = gradient.to_local()  # type: ignore[attr-defined]
    return local
