"""Keeps torch's compiler out: a dispatch mode that it leaves alone, and compiled functions that run as written.

Both hold whether the compiler has been imported or not.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._python_dispatch as dispatch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode_stack

if TYPE_CHECKING:
    from typing_extensions import Self

_EXPECTED_WARNINGS = (
    r"Using `torch\.compile\(module\)` when there are global hooks|flex_attention called without torch\.compile"
)
# The compiler's stance is one setting for all threads, so traces that overlap share it and the last one resets it.
_lock = threading.Lock()
_open = 0
_stance = ExitStack()
# So are torch's flags that say whether a mode is open. Each mode puts back what it found: of two that overlap in
# threads the last one puts back that the first is open, and up to torch 2.8 nothing is compiled from then on.
_MODE_FLAGS = tuple(
    name for name, value in vars(dispatch).items() if name.startswith("_is_in_") and isinstance(value, bool)
)
_modes_open = 0
_flags_before: dict[str, bool] = {}


class EagerMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is never compiled, even if a model compiles part of itself while it is open.

    torch's own switch, `_should_skip_dynamo`, imports the compiler at the first operation: over a second in every
    process that compiles nothing. The compiler's table of skipped frames can be written without it.
    """

    supports_higher_order_operators = False  # whether `__torch_dispatch__` gets FlexAttention and its like as well

    def whole(self, call: Any, run: Callable[[Any], Any]) -> Any:
        """Run an attention of this package that takes several operations; a mode that records may note it as one.

        Args:
            call: The call.
            run: Computes it.
        """
        return run(call)

    def merged(self, outputs: Any, lses: Any, run: Callable[[], Any]) -> Any:
        """Run a merge of attentions to blocks of keys; a mode that records may note them as one attention.

        Args:
            outputs: Those of the blocks.
            lses: Those of the blocks.
            run: Computes the merged output and lse.
        """
        return run()

    def __enter__(self) -> Self:
        # For torch 2.9 the attribute is enough; an older one wants a rule of each operator for each class of modes.
        if self.supports_higher_order_operators and not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            for operator in torch._ops._higher_order_ops.values():
                if type(self) not in operator.python_key_table:
                    operator.py_impl(type(self))(partial(_pass_on, operator))
        global _modes_open
        with _lock:
            if _modes_open == 0:
                _flags_before.update({name: getattr(dispatch, name) for name in _MODE_FLAGS})
            mode: Self = super().__enter__()  # type: ignore[no-untyped-call]
            _modes_open += 1
        return mode

    def __exit__(self, *raised: Any) -> None:
        global _modes_open
        with _lock:
            super().__exit__(*raised)  # type: ignore[no-untyped-call]
            _modes_open -= 1
            if _modes_open == 0:
                vars(dispatch).update(_flags_before)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        frames: Any = torch._C._dynamo.eval_frame
        if hasattr(frames, "set_code_exec_strategy"):
            skip = frames._FrameAction.SKIP
            frames.set_code_exec_strategy(cls.__torch_dispatch__.__code__, frames._FrameExecStrategy(skip, skip))
        else:  # torch 2.6 skips one frame alone, and would compile what that calls
            cls.__torch_dispatch__ = _uncompiled(cls.__torch_dispatch__)  # type: ignore[method-assign]


def _pass_on(operator: Any, mode: Any, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)


def _uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    frames: Any = torch._C._dynamo.eval_frame

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        compiler = frames.set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            frames.set_eval_frame(compiler)

    code: Any = run
    frames.skip_code(code.__code__)
    return run


def in_backward_pass() -> bool:
    """Return whether this thread runs a backward pass, whose forward computations were seen before."""
    return torch._C._current_graph_task_id() != -1


def default_device() -> torch.device:
    """Return the device of tensors made without one; in torch 2.6 `get_default_device` skips `with torch.device`."""
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    devices: list[torch.device] = [mode.device for mode in modes if isinstance(mode, DeviceContext)]
    return devices[-1] if devices else torch.get_default_device()


def accelerator() -> torch.device | None:
    """Return torch's accelerator, None where there is none; torch 2.6 raises there."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


@contextmanager
def eager_compiler() -> Iterator[None]:
    """Makes compiled functions run their Python code until the last open trace of all threads ends.

    Does nothing if the compiler was never imported: nothing is compiled then, and the import is slow.
    """
    global _open
    if "torch._dynamo" not in sys.modules and "torch.nn.attention.flex_attention" not in sys.modules:
        yield
        return
    with _lock:
        if _open == 0:
            _stance.enter_context(torch.compiler.set_stance("force_eager"))
            # Torch warns about global hooks on a compiled module, and about FlexAttention without torch.compile. Both
            # are the trace's doing, so the user should not see the warnings.
            warnings.filterwarnings("ignore", message=_EXPECTED_WARNINGS)
            _stance.callback(_drop, warnings.filters[0])
        _open += 1
    try:
        yield
    finally:
        with _lock:
            _open -= 1
            if _open == 0:
                _stance.close()


@contextmanager
def outside_modes() -> Iterator[None]:
    """Runs a block without gradients and without the caller's torch modes and default device."""
    with torch.no_grad(), _disable_current_modes(), torch.device("cpu"):
        yield


def _drop(rule: Any) -> None:
    rules: Any = warnings.filters
    if rule in rules:
        rules.remove(rule)


def as_one(call: Any, run: Callable[[Any], Any]) -> Any:
    """Return `run(call)`; every open mode gets it as one attention, whatever operations it takes."""
    if not torch.compiler.is_compiling():
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, EagerMode):
                run = partial(mode.whole, run=run)
    return run(call)


def as_merge(outputs: Any, lses: Any, run: Callable[[], Any]) -> Any:
    """Return `run()`; every open mode gets it as the merge of these blocks, whatever operations it takes."""
    if not torch.compiler.is_compiling():
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, EagerMode):
                run = partial(mode.merged, outputs, lses, run)
    return run()
