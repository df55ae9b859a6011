"""`sqrtdk.watch` as a callback for transformers' Trainer and trainers built on it, such as TRL's."""

from __future__ import annotations

from typing import Any

from sqrtdk.errors import MissingExtraError
from sqrtdk.integrations.watched_fit import WatchedFit
from sqrtdk.monitor.watch import Watch

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise MissingExtraError(
        "transformers is not installed", hint="pip install 'sqrtdk[hf]' brings transformers."
    ) from error


class AttentionWatch(TrainerCallback):  # type: ignore[misc]
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

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Begin at the step after the Trainer's `global_step`."""
        self._fit.begin(model, state.global_step + 1)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Resume measuring for the batches of a step."""
        self._fit.resume()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Pause after an optimizer step, because an evaluation may follow; the loss is logged later."""
        self._fit.pause()
        self._fit.stepped()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **kwargs: Any) -> None:
        """Note the loss."""
        if logs is not None and "loss" in logs:
            self._fit.told(float(logs["loss"]))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the records up to a checkpoint."""
        self._fit.flush()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the watch."""
        self._fit.close()
