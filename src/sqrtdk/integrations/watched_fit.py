"""What the callbacks of training frameworks share: a watch that counts optimizer steps and sees training alone.

A framework says when a forward pass of training may come and when it is over; what runs in between, as an evaluation,
does not count. It tells of a step's loss late, so a step is ended when the next one begins.
"""

from __future__ import annotations

import atexit
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from sqrtdk.monitor.watch import Watch, watch


class WatchedFit:
    """The watch of one training run of a framework.

    Args:
        options: of `watch`.

    Attributes:
        watch: of the latest run; None before the first.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.watch: Watch | None = None
        self._options = options
        self._open = ExitStack()
        self._pause = ExitStack()
        self._ended = self._running = False
        self._loss: Tensor | float | None = None

    def begin(self, model: nn.Module, first_step: int) -> None:
        """Begin a run; one that ended without a word is closed."""
        self.close(RuntimeError("the run before ended without a word"))
        self.watch = self._open.enter_context(watch(model, **{"first_step": first_step, **self._options}))
        self._running = True
        atexit.register(self.close)  # a run that raises may never be told to be over: keep its records
        self.pause()

    def resume(self) -> None:
        """Forward passes count from here on; ends the step before, if there is one to end."""
        self._end_step()
        self._pause.close()

    def pause(self) -> None:
        """Forward passes do not count from here on."""
        if self.watch is not None:
            self._pause.close()
            self._pause.enter_context(self.watch.paused())

    def stepped(self, loss: Tensor | float | None = None) -> None:
        """The optimizer has made its step."""
        self._ended, self._loss = True, loss

    def told(self, loss: float) -> None:
        """The loss of the step that was made last."""
        if self._ended:
            self._loss = loss

    def flush(self) -> None:
        """A checkpoint is saved: end the step that was made last, and write the records up to it."""
        self._end_step()
        if self.watch is not None and self._running:
            self.watch.flush()

    def close(self, error: BaseException | None = None) -> None:
        """End the run, and the step before, if there is one to end; a second time does nothing.

        Args:
            error: that ended it; None: it is over.
        """
        atexit.unregister(self.close)
        try:
            self._end_step()
        finally:
            self._running = False
            self._pause.close()
            self._open.__exit__(None if error is None else type(error), error, None)

    def _end_step(self) -> None:
        ended, loss, self._ended, self._loss = self._ended, self._loss, False, None
        if ended and self.watch is not None:
            self.watch.step(loss)
