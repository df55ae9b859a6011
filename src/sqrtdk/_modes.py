"""Dispatch modes that torch's compiler leaves alone, whether it has been imported or not."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class EagerMode(TorchDispatchMode):
    """A mode whose `__torch_dispatch__` is never compiled, even if a model compiles part of itself while it is open.

    torch's own switch, `_should_skip_dynamo`, imports the compiler at the first operation: over a second in every
    process that compiles nothing. The compiler's table of skipped frames can be written without it.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)  # type: ignore[no-untyped-call]
        frames: Any = torch._C._dynamo.eval_frame
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(cls.__torch_dispatch__.__code__, frames._FrameExecStrategy(skip, skip))
