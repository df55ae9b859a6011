"""Callbacks for transformers' Trainer and its subclasses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqrtdk._extras import load_extra
from sqrtdk.errors import InvalidValueError
from sqrtdk.repair.hook import QKClip

if TYPE_CHECKING:
    from sqrtdk.integrations.watch_transformers import AttentionWatch
    from sqrtdk.repair.ranks import Ranks

_callback: Any = load_extra("transformers", "hf").TrainerCallback


class QKClipCallback(_callback):  # type: ignore[misc]
    """QK-clip after each optimizer step of a Trainer.

    With a `watch` the model is not traced twice and may be compiled. The watch learns a step's loss late, so it ends a
    step when the next one begins. The clip happens there, and there is none after the last step.

    Args:
        threshold: see `sqrtdk.qk_clip_`.
        balance: see `sqrtdk.qk_clip_`.
        every: optimizer steps from one clip to the next.
        group: ranks whose maxima are merged, see `sqrtdk.qk_clip_`.
        watch: an `AttentionWatch` among the same Trainer's callbacks. The clip then uses its maxima at sampled steps.

    Attributes:
        clip: the `QKClip` of the run, with the records of its last step; None before training.

    Raises:
        InvalidValueError: `every` is given beside a watch, or the watch is not among the Trainer's callbacks.

    Example:
        >>> from sqrtdk.integrations.trainer import QKClipCallback
        >>> callbacks = [QKClipCallback(threshold=100.0)]
    """

    def __init__(
        self,
        threshold: float = 100.0,
        balance: float = 0.5,
        *,
        every: int = 1,
        group: Ranks = None,
        watch: AttentionWatch | None = None,
    ) -> None:
        if watch is not None and every != 1:
            raise InvalidValueError(f"a watch has its own cadence; got every={every!r}", hint="Pass it to the watch.")
        self._options: dict[str, Any] = {"threshold": threshold, "balance": balance, "every": every, "group": group}
        self._watch = watch
        self.clip: QKClip | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin to trace, unless a watch measures."""
        self.clip = None if self._watch is not None else QKClip(model, **self._options)

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """End the watch's previous step, whichever callback is listed first, and clip by its maxima."""
        if self._watch is None:
            return
        self._watch.on_step_begin(args, state, control)
        if self._watch.watch is None:
            raise InvalidValueError(
                "the watch is a callback of the same Trainer; it has not begun",
                hint="callbacks=[watch, QKClipCallback(watch=watch)]",
            )
        if self.clip is None:
            self.clip = QKClip(model, stats=self._watch.watch, **self._options)
        self.clip.step(optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Clip by the traced maxima."""
        if self._watch is None and self.clip is not None:
            self.clip.step(optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hooks."""
        if self.clip is not None:
            self.clip.remove()
