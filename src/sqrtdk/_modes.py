"""Dispatch modes that torch's compiler leaves alone, whether it has been imported or not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack


class EagerMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is never compiled, even if a model compiles part of itself while it is open.

    torch's own switch, `_should_skip_dynamo`, imports the compiler at the first operation: over a second in every
    process that compiles nothing. The compiler's table of skipped frames can be written without it.
    """

    def whole(self, call: Any, run: Callable[[Any], Any]) -> Any:
        """Run an attention of this package that takes several operations; a mode that records may note it as one."""
        return run(call)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(cls.__torch_dispatch__.__code__, frames._FrameExecStrategy(skip, skip))


def as_one(call: Any, run: Callable[[Any], Any]) -> Any:
    """Return `run(call)`, which every open mode gets as one attention, whatever operations it takes."""
    if not torch.compiler.is_compiling():
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, EagerMode):
                run = partial(mode.whole, run=run)
    return run(call)
