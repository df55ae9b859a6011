"""How a traced model runs: compiled functions eagerly, without fast paths, or with another output in one place."""

from __future__ import annotations

import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode

from sqrtdk.tracing.watch.recorder import unseen

_KNOWN = r"Using `torch\.compile\(module\)` when there are global hooks|flex_attention called without torch\.compile"
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


_CLOSE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of its size


class Disturbed(TorchFunctionMode):
    """Changes the first result that has the numbers of an attention's output.

    Attributes:
        done: whether it came by.
    """

    def __init__(self, output: Tensor, change: Callable[[Tensor], Tensor | None]) -> None:
        """
        Args:
            output: of the attention, in any layout: it is known by its size and two sums.
            change: what stands in place of a result with these sums; None where it is not the one.
        """
        super().__init__()
        self.done = False
        self._change, self._numel, self._sums = change, output.numel(), _sums(output)
        self._off = _close_of(output.dtype)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.compiler.is_compiling():  # flex_attention compiles itself: a sum has no value there
            return result
        first = result[0] if isinstance(result, tuple) and result else result
        if self.done or type(first) is not Tensor or not first.is_floating_point() or not self._is_it(first):
            return result
        with torch.no_grad(), unseen():
            other = self._change(first)
        if other is None:
            return result
        self.done = True
        return (other, *result[1:]) if isinstance(result, tuple) else other

    def _is_it(self, tensor: Tensor) -> bool:
        if tensor.numel() != self._numel or not self._numel:
            return False
        pairs = zip(_sums(tensor), self._sums, strict=True)
        return all(abs(one - other) <= self._off * max(abs(other), self._sums[1]) for one, other in pairs)


def scaled_throughout(tensor: Tensor) -> Tensor:
    """The tensor with another factor for every entry, 0.5 to 1.5."""
    factor = torch.linspace(0.5, 1.5, tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    return tensor * factor.view(tensor.shape)


def added_in_layout(output: Tensor, addend: Tensor) -> Callable[[Tensor], Tensor | None]:
    """What adds to an output whose axes the code has in another order, or merged; None for another tensor.

    Args:
        output: (B, H, L, E), as it is.
        addend: of the same shape, what is to be added.

    Example:
        >>> output = torch.randn(1, 2, 3, 4)
        >>> change = added_in_layout(output, torch.ones(1, 2, 3, 4))
        >>> torch.equal(change(output.transpose(1, 2)), output.transpose(1, 2) + 1)
        True
    """

    def change(tensor: Tensor) -> Tensor | None:
        limit = _close_of(tensor.dtype) * float(output.abs().max())
        for order in itertools.permutations(range(output.dim())):
            laid = output.permute(order).reshape(tensor.shape)
            if bool(((laid - tensor).abs() <= limit).all()):
                return tensor + addend.permute(order).reshape(tensor.shape).to(tensor.dtype)
        return None

    return change


def _close_of(dtype: torch.dtype) -> float:
    """How far two results of one computation are apart, of their size."""
    return _CLOSE.get(dtype, _CLOSE[torch.float32])


def _sums(tensor: Tensor) -> tuple[float, float]:
    """The mean of the entries, and their root mean square."""
    with torch.no_grad(), unseen():
        values = tensor.detach().double()
        return float(values.mean()), float(values.square().mean().sqrt())


def hint_for(model: object, otherwise: str) -> str:
    """What to pass in the place of something that is no module."""
    if isinstance(model, ExportedProgram):
        return "An ExportedProgram runs by its module: pass program.module()."
    return otherwise
