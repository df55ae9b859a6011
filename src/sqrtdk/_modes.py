"""Keeps torch's compiler out: a dispatch mode that it leaves alone, and compiled functions that run as written.

Both hold whether the compiler has been imported or not.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

_EXPECTED_WARNINGS = (
    r"Using `torch\.compile\(module\)` when there are global hooks|flex_attention called without torch\.compile"
)
# The compiler's stance is one setting for all threads, so traces that overlap share it and the last one resets it.
_lock = threading.Lock()
_open = 0
_stance = ExitStack()


class EagerMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is never compiled, even if a model compiles part of itself while it is open.

    torch's own switch, `_should_skip_dynamo`, imports the compiler at the first operation: over a second in every
    process that compiles nothing. The compiler's table of skipped frames can be written without it.
    """

    def whole(self, call: Any, run: Callable[[Any], Any]) -> Any:
        """Run an attention of this package that takes several operations; a mode that records may note it as one.

        Args:
            call: The call.
            run: Computes it.
        """
        return run(call)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(cls.__torch_dispatch__.__code__, frames._FrameExecStrategy(skip, skip))


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
