"""The shared part of the training callbacks: a watch that counts optimizer steps and measures training alone.

A callback resumes the watch before the forward passes of training and pauses it afterwards, so that an evaluation in
between is not measured. Frameworks report a step's loss late, so a step ends when the next one begins.
"""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from sqrtdk.monitor.watch import Watch, watch


class WatchedFit:
    """The watch of one training run of a framework.

    Args:
        options: options of `watch`.

    Attributes:
        watch: the watch of the latest run; None before the first run.
    """

    def __init__(self, options: dict[str, Any]) -> None:
        self.watch: Watch | None = None
        self._options = options
        self._open = ExitStack()
        self._pause = ExitStack()
        self._ended = self._running = False
        self._loss: Tensor | float | None = None

    def begin(self, model: nn.Module, first_step: int, optimizers: Sequence[Any]) -> None:
        """Begin a run, in the paused state, and close a previous run that was never ended.

        Args:
            model: The model that is trained.
            first_step: Number of the first step.
            optimizers: Optimizers of the training; objects without `param_groups` are left out.
        """
        self.close(RuntimeError("the run before ended without a word"))
        # some frameworks have objects in their place, without groups
        known = [optimizer for optimizer in optimizers if hasattr(optimizer, "param_groups")]
        options = {"first_step": first_step, "optimizer": known, **self._options}
        self.watch = self._open.enter_context(watch(model, **options))
        self._running = True
        atexit.register(self.close)  # frameworks may not call back after an error: write the records at exit
        self.pause()

    def resume(self) -> None:
        """Measure forward passes from here on. Ends the previous step if it is open."""
        self._end_step()
        self._pause.close()

    def pause(self) -> None:
        """Do not measure forward passes from here on."""
        if self.watch is not None:
            self._pause.close()
            self._pause.enter_context(self.watch.paused())

    def stepped(self, loss: Tensor | float | None = None) -> None:
        """Note that the optimizer has stepped; the step ends with the next `resume`, `flush` or `close`.

        Args:
            loss: Loss of the step; None if it is not known yet.
        """
        self._ended, self._loss = True, loss

    def note_loss(self, loss: float) -> None:
        """Note the loss of the last step."""
        if self._ended:
            self._loss = loss

    def flush(self) -> None:
        """End the last step and write the records, because a checkpoint is saved."""
        self._end_step()
        if self.watch is not None and self._running:
            self.watch.flush()

    def close(self, error: BaseException | None = None) -> None:
        """End the run and its open step, if any. A second call does nothing.

        Args:
            error: the error that ended the run; None if it is complete.
        """
        atexit.unregister(self.close)
        try:
            self._end_step()
        finally:  # the last step may raise, and the hooks have to go all the same
            self._running = False
            self._pause.close()
            self._open.__exit__(None if error is None else type(error), error, None)

    def _end_step(self) -> None:
        ended, loss, self._ended, self._loss = self._ended, self._loss, False, None
        if ended and self.watch is not None:
            self.watch.step(loss)
