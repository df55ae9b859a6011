"""Callbacks of transformers' Trainer, and of what is made from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sqrtdk._extras import load
from sqrtdk.repair.hook import QKClip

if TYPE_CHECKING:
    from sqrtdk.repair.ranks import Ranks

_callback: Any = load("transformers", "hf").TrainerCallback


class QKClipCallback(_callback):  # type: ignore[misc]
    """QK-clip after each optimizer step of a Trainer.

    Args:
        threshold: see `sqrtdk.qk_clip_`.
        balance: see `sqrtdk.qk_clip_`.
        every: optimizer steps from one clip to the next.
        group: ranks whose maxima are merged, see `sqrtdk.qk_clip_`.

    Attributes:
        clip: the `QKClip` of the run, with the records of its last step; None before training.

    Example:
        >>> from sqrtdk.integrations.trainer import QKClipCallback
        >>> callbacks = [QKClipCallback(threshold=100.0)]
    """

    def __init__(self, threshold: float = 100.0, balance: float = 0.5, *, every: int = 1, group: Ranks = None) -> None:
        self._options: dict[str, Any] = {"threshold": threshold, "balance": balance, "every": every, "group": group}
        self.clip: QKClip | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin to measure."""
        self.clip = QKClip(model, **self._options)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Clip."""
        assert self.clip is not None
        self.clip.step(optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hooks away."""
        if self.clip is not None:
            self.clip.remove()
