"""How a traced model runs: compiled functions eagerly, without fast paths, or with another output in one place."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from sqrtdk.tracing.tape.recorder import unseen

_KNOWN = r"Using `torch\.compile\(module\)` when there are global hooks|flex_attention called without torch\.compile"
_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of its size
_lock = threading.Lock()
_open = 0
_stance = ExitStack()


@contextmanager
def eager_compiler() -> Iterator[None]:
    """Let compiled functions run their Python code, until the last of the open traces of all threads ends.

    Nothing is done before the compiler has been imported: nothing is compiled then, and the import is slow.
    """
    global _open
    if "torch._dynamo" not in sys.modules and "torch.nn.attention.flex_attention" not in sys.modules:
        yield
        return
    with _lock:
        if _open == 0:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
            # Torch warns that a global hook sees a compiled module twice, and that FlexAttention is not compiled: it is
            # the trace that does so.
            warnings.filterwarnings("ignore", message=_KNOWN)
            _stance.callback(_drop, warnings.filters[0])
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                _stance.close()


def _drop(rule: Any) -> None:
    rules: Any = warnings.filters
    if rule in rules:
        rules.remove(rule)


@contextmanager
def steps_seen() -> Iterator[None]:
    """Without the fast path of nn.MultiheadAttention: one operation, of whose q, k and v nothing is seen."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class Disturbed(TorchFunctionMode):
    """Adds to the first result that is an attention's output, which is known by its numbers.

    Attributes:
        done: whether it came by.

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
            output: (B, H, L, E); the code may have its axes in another order, or merged.
            addend: of the same shape.
        """
        super().__init__()
        self.done = False
        self._output, self._addend = output, addend
        self._size, self._largest = _size_of(output), float(output.abs().max()) if output.numel() else 0.0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.done or torch.compiler.is_compiling():  # flex_attention compiles itself: a sum has no value there
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
        """The result with the addend in its layout; None for another tensor."""
        close = _CLOSE.get(tensor.dtype, _CLOSE[torch.float32])
        if abs(_size_of(tensor) - self._size) > close * self._size:  # cheaper than all orders of axes
            return None
        for order in itertools.permutations(range(self._output.dim())):
            laid = self._output.permute(order).reshape(tensor.shape)
            if bool(((laid - tensor).abs() <= close * self._largest).all()):
                return tensor + self._addend.permute(order).reshape(tensor.shape).to(tensor.dtype)
        return None


def _size_of(tensor: Tensor) -> float:
    """The root mean square of the entries."""
    with torch.no_grad(), unseen():
        return float(tensor.detach().double().square().mean().sqrt())


def hint_for(model: object, otherwise: str) -> str:
    """What to pass in the place of something that is no module."""
    if isinstance(model, ExportedProgram):
        return "An ExportedProgram runs by its module: pass program.module()."
    return otherwise
