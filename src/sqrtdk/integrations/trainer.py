"""Callbacks for transformers' Trainer and trainers built on it, such as TRL's: `AttentionWatch` and `QKClip`.

    trainer = Trainer(model, arguments, callbacks=[watch := AttentionWatch(every=1), QKClip(watch, threshold=100)])

A Trainer logs the loss of a step after the step has ended, so a watched step ends when the next one begins. That is
where a clip by the watch happens.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from sqrtdk._extras import load_extra
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.integrations.watched_fit import WatchedFit
from sqrtdk.monitor.watch import Watch
from sqrtdk.repair import hook

if TYPE_CHECKING:
    from sqrtdk.repair.clip import ClipRecord
    from sqrtdk.repair.ranks import Ranks

_callback: Any = load_extra("transformers", "hf").TrainerCallback


class AttentionWatch(_callback):  # type: ignore[misc]
    """Watches the model that a Trainer trains.

    A step is an optimizer step, whatever the number of batches it takes. Evaluation is not measured. A resumed run
    continues at the step of its checkpoint. The recorded loss is the one that the Trainer logs: with `logging_steps=1`
    the loss of each step, else at each n-th step the mean of the last n. When a checkpoint is saved, the records up to
    it are written.

    After a training that raised, `close()` ends the watch. So do the next training and the end of the process.

    Args:
        options: options of `sqrtdk.watch`: every, rows, to, on_alarm, sinks, ...

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
        >>> model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1))
        >>> rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
        >>> callback = AttentionWatch(every=2)
        >>> with TemporaryDirectory() as folder:  # doctest: +ELLIPSIS
        ...     quiet = dict(save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True)
        ...     arguments = TrainingArguments(folder, max_steps=3, **quiet)
        ...     done = Trainer(model, arguments, train_dataset=rows, callbacks=[callback]).train()
        {...}
        >>> [sample.step for sample in callback.watch.samples]
        [1, 2]
    """

    def __init__(self, **options: Any) -> None:
        self._fit = WatchedFit(options)

    @property
    def watch(self) -> Watch | None:
        """The watch of the latest training, with samples and alarms; None before the first training."""
        return self._fit.watch

    def close(self) -> None:
        """End the watch of a training that raised."""
        self._fit.close(RuntimeError("the training raised"))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Begin a watch of `model` and `optimizer`; its first step is the one after the Trainer's `global_step`.

        The Trainer calls it; `args`, `state` and `control` are the Trainer's.
        """
        self._fit.begin(model, state.global_step + 1, [optimizer])

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Resume measuring for the batches of an optimizer step; the Trainer calls it."""
        self._fit.resume()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pause after an optimizer step, because an evaluation may follow; the Trainer calls it.

        The step ends later, when its loss may be known.
        """
        self._fit.pause()
        self._fit.stepped()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Note the loss that the Trainer logs, as `logs["loss"]`; the Trainer calls it.

        The loss is NaN where `logs["grad_norm"]` is NaN, except with fp16, because `logging_nan_inf_filter` logs a
        finite number in place of such a loss.
        """
        if logs is None or "loss" not in logs:
            return
        loss, gradient = float(logs["loss"]), float(logs.get("grad_norm", 0.0))
        # with fp16 the gradients of a step that the scaler skips are NaN, and its loss is not
        self._fit.note_loss(math.nan if math.isnan(gradient) and not args.fp16 else loss)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the records up to the checkpoint that was saved; the Trainer calls it."""
        self._fit.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the watch, whose records are then complete; the Trainer calls it."""
        self._fit.close()


class QKClip(_callback):  # type: ignore[misc]
    """QK-clip after each optimizer step of a Trainer.

    With a watch the model is not traced twice and may be compiled. The clip then acts at sampled steps, so only
    `AttentionWatch(every=1)` clips at each step. There is no clip after the last step.

    Args:
        watch: an `AttentionWatch` among the same Trainer's callbacks, in any order; its maxima are used. None: the
            callback traces the forward passes itself.
        threshold: see `sqrtdk.qk_clip_`.
        balance: see `sqrtdk.qk_clip_`.
        every: optimizer steps from one clip to the next; a watch has its own.
        group: ranks whose maxima are merged, see `sqrtdk.qk_clip_`.

    Raises:
        InvalidTypeError: `watch` is no `AttentionWatch`.
        InvalidValueError: `every` is given beside a watch, or the watch is not among the Trainer's callbacks.

    Example:
        >>> watch = AttentionWatch(every=1)
        >>> callbacks = [watch, QKClip(watch, threshold=100.0)]
    """

    def __init__(
        self,
        watch: AttentionWatch | None = None,
        threshold: float = 100.0,
        balance: float = 0.5,
        *,
        every: int = 1,
        group: Ranks = None,
    ) -> None:
        if watch is not None and not isinstance(watch, AttentionWatch):
            raise InvalidTypeError(
                f"watch is an AttentionWatch; got {type(watch).__name__}",
                hint="Without a watch: QKClip(threshold=100).",
            )
        if watch is not None and every != 1:
            raise InvalidValueError(f"a watch has its own cadence; got every={every!r}", hint="Pass it to the watch.")
        self._options: dict[str, Any] = {"threshold": threshold, "balance": balance, "every": every, "group": group}
        self._watch = watch
        self._clip: hook.QKClip | None = None

    @property
    def records(self) -> tuple[ClipRecord, ...]:
        """What the latest clip measured and scaled, one record for each attention; empty before the first clip."""
        return self._clip.records if self._clip is not None else ()

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Install the hooks that trace `model`, unless a watch measures it; the Trainer calls it."""
        self._clip = None if self._watch is not None else hook.QKClip(model, **self._options)

    def on_step_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """End the watch's previous step, in whichever order the callbacks are listed, and clip by its maxima.

        The Trainer calls it. Without a watch it does nothing.

        Raises:
            InvalidValueError: The watch is not among the callbacks of the same Trainer.
        """
        if self._watch is None:
            return
        self._watch.on_step_begin(args, state, control)
        if self._watch.watch is None:
            raise InvalidValueError(
                "the watch is a callback of the same Trainer; it has not begun",
                hint="callbacks=[watch, QKClip(watch)]",
            )
        if self._clip is None:
            self._clip = hook.QKClip(model, stats=self._watch.watch, **self._options)
        self._clip.step(optimizer)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Clip by the maxima that were traced, unless a watch measures; the Trainer calls it after the optimizer."""
        if self._watch is None and self._clip is not None:
            self._clip.step(optimizer)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Remove the hooks that trace the model; the Trainer calls it."""
        if self._clip is not None:
            self._clip.remove()
