"""Controls how a traced model runs: no fast paths, or one output changed on purpose."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sqrtdk.tracing.tape.recorder import unseen

# Tolerance for recognising an output by its numbers, relative to its size.
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@contextmanager
def fast_path_off() -> Iterator[None]:
    """Turn off the fast path of nn.MultiheadAttention during the `with` block.

    It is one operation that hides its q, k and v. The setting is restored afterwards.
    """
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Disturbed(TorchFunctionMode):
    """Adds a tensor to an attention's output at its first occurrence, recognised by its numbers.

    Attributes:
        done: True once the output was found and changed.

    Example:
        >>> output = torch.randn(1, 2, 3, 4)
        >>> with Disturbed(output, torch.ones(1, 2, 3, 4)) as mode:
        ...     merged = output.transpose(1, 2).reshape(1, 3, 8)
        >>> mode.done
        True
    """

    def __init__(self, output: Tensor, addend: Tensor) -> None:
        """
        Args:
            output: (B, H, L, E); the model's code may order its axes differently, or merge them.
            addend: (B, H, L, E), added to the output.
        """
        super().__init__()
        self.done = False
        self._output, self._addend = output, addend
        self._size, self._largest = _size_of(output), float(output.abs().max()) if output.numel() else 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.done or torch.compiler.is_compiling():  # flex_attention compiles itself; its tensors have no values
            return result
        first = result[0] if isinstance(result, tuple) and result else result
        if type(first) is not Tensor or not first.is_floating_point() or first.numel() != self._output.numel():
            return result
        with torch.no_grad(), unseen():
            other = self._added(first) if first.numel() else None
        if other is None:
            return result
        self.done = True
        return (other, *result[1:]) if isinstance(result, tuple) else other

    def _added(self, tensor: Tensor) -> Tensor | None:
        """Return the tensor plus the addend in its layout, or None if it is not the output."""
        close = _CLOSE.get(tensor.dtype, _CLOSE[torch.float32])
        if abs(_size_of(tensor) - self._size) > close * self._size:  # cheap test before the loop over axis orders
            return None
        for order in itertools.permutations(range(self._output.dim())):
            laid = self._output.permute(order).reshape(tensor.shape)
            if bool(((laid - tensor).abs() <= close * self._largest).all()):
                return tensor + self._addend.permute(order).reshape(tensor.shape).to(tensor.dtype)
        return None


def _size_of(tensor: Tensor) -> float:
    """Return the root mean square of the entries."""
    with torch.no_grad(), unseen():
        return float(tensor.detach().double().square().mean().sqrt())
