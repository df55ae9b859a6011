"""`sqrtdk.watch` as a callback for Lightning's Trainer."""

from __future__ import annotations

import sys
from contextlib import suppress
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from sqrtdk.errors import InvalidValueError, MissingExtraError
from sqrtdk.integrations.watched_fit import WatchedFit
from sqrtdk.monitor.watch import Watch

_LIGHTNING_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _lightning() -> Any:
    """Return the Lightning package in use, or None if none is installed.

    A package that is already imported comes first: the Trainer of one package rejects callbacks of the other.
    """
    for name in sorted(_LIGHTNING_PACKAGES, key=lambda name: name not in sys.modules):
        with suppress(ImportError):
            return import_module(name)
    return None


_package = _lightning()
_Callback: Any = object if _package is None else _package.Callback


class AttentionWatch(_Callback):  # type: ignore[misc]
    """Watches the model that a LightningModule trains.

    A step ends with a batch after which an optimizer stepped, whatever the number of accumulated batches or optimizers.
    Validation is not measured. When a checkpoint is saved, the records up to it are written. A resumed run continues at
    its checkpoint's `global_step`, which counts the steps of all optimizers. The recorded loss is the mean over the
    batches of a step, because Lightning passes each batch's loss to callbacks divided by their number.

    Args:
        module: dotted path of the module that `training_step` calls, within the LightningModule. None is the
            LightningModule itself if it has a `forward`, else its only child with parameters.
        options: options of `sqrtdk.watch`: every, rows, to, on_alarm, sinks, ...

    Raises:
        MissingExtraError: lightning is not installed.
    """

    def __init__(self, module: str | None = None, **options: Any) -> None:
        if _package is None:
            raise MissingExtraError(
                "lightning is not installed", hint="pip install 'sqrtdk[lightning]' brings lightning."
            )
        self._module = module
        self._fit = WatchedFit(options)
        self._steps = 0
        self._loss: Tensor | None = None

    @property
    def watch(self) -> Watch | None:
        """The watch of the latest training, with samples and alarms; None before the first training."""
        return self._fit.watch

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin a watch, whose first step is the one after the Trainer's `global_step`; Lightning calls it."""
        self._steps, self._loss = trainer.global_step, None
        self._fit.begin(called_module(pl_module, self._module), self._steps + 1, trainer.optimizers)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Resume measuring for a batch; Lightning calls it."""
        self._fit.resume()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Pause, because a validation may follow, and note a step if an optimizer stepped; Lightning calls it.

        `outputs` is what `training_step` returned, from which the loss is read.
        """
        self._fit.pause()
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor):
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()
        if trainer.global_step > self._steps:  # not after each batch: gradients may be accumulated over several
            self._steps = trainer.global_step
            self._fit.stepped(self._loss)
            self._loss = None

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Write the records up to the checkpoint that is saved; Lightning calls it."""
        self._fit.flush()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """End the watch, whose records are then complete; Lightning calls it."""
        self._fit.close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """End the watch of a training that raised `exception`; Lightning calls it."""
        self._fit.close(exception)


def called_module(module: nn.Module, path: str | None) -> nn.Module:
    """Return the module whose forward pass a `training_step` runs; see `AttentionWatch`.

    Raises:
        InvalidValueError: `path` names no module, or there is no `path` and not exactly one candidate.

    Example:
        >>> module = nn.Module()
        >>> module.net = nn.Linear(2, 2)
        >>> called_module(module, None), called_module(module.net, None)
        (Linear(in_features=2, out_features=2, bias=True), Linear(in_features=2, out_features=2, bias=True))
    """
    names = [name for name, _ in module.named_modules()]
    if path is not None:
        if path not in names:
            raise InvalidValueError(
                f"{type(module).__name__} has no module {path!r}", hint=f"It has {', '.join(names[1:6])}, ..."
            )
        return module.get_submodule(path)
    # a forward that is not overridden only raises, so training_step must call a child: self.model(batch)
    inherited = (nn.Module.forward, None if _package is None else _package.LightningModule.forward)
    if type(module).forward not in inherited:
        return module
    children = {name: child for name, child in module.named_children() if any(True for _ in child.parameters())}
    if len(children) != 1:
        raise InvalidValueError(
            f"{type(module).__name__} has no forward() and {len(children)} children with parameters"
            + (f": {', '.join(children)}" if children else ""),
            hint="Say which one training_step calls: AttentionWatch(module='model').",
        )
    return next(iter(children.values()))
