"""What a training loop hands to a watch: the options and the losses, checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn

from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.monitor.samples import Alarm
from sqrtdk.tracing import hint_for

OnAlarm = str | Callable[[Alarm], None]


class LossScaler(Protocol):
    """What multiplies a loss before its backward pass, as torch.amp.GradScaler."""

    def get_scale(self) -> float:
        """The factor."""


def check_options(model: object, on_alarm: object, rows: object, first_step: object, scaler: LossScaler | None) -> None:
    """Refuse options of `watch` out of their range, before anything is opened.

    Raises:
        InvalidTypeError: no module, or no scaler.
        InvalidValueError: a value that an option does not have.
    """
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(
            f"watch() takes an nn.Module, got {type(model).__name__}",
            hint=hint_for(model, "Pass the model itself."),
        )
    if on_alarm not in ("warn", "raise") and not callable(on_alarm):
        raise InvalidValueError(
            f'on_alarm is "warn", "raise" or a function of the alarm; got {on_alarm!r}', hint='Pass "warn".'
        )
    _whole_number("rows", rows, 2, "None: all rows.")
    _whole_number("first_step", first_step, 1, "None: after the last recorded step.")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise InvalidTypeError(
            f"scaler is a torch.amp.GradScaler; got {type(scaler).__name__}",
            hint="None: no loss scale.",
        )


def _whole_number(name: str, value: object, least: int, hint: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise InvalidValueError(f"{name} is a whole number from {least} on, or None; got {value!r}", hint=hint)


def one_number(loss: Tensor | float | None) -> Tensor | float | None:
    """A copy of a loss: what a tensor holds may be overwritten by the next step.

    Raises:
        InvalidValueError: it has several numbers.
        InvalidTypeError: it is no number.

    Example:
        >>> one_number(2), one_number(None)
        (2.0, None)
    """
    hint = "Pass the loss that backward() was called on."
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise InvalidValueError(f"a loss is one number; got the shape {tuple(loss.shape)}", hint=hint)
        return loss.detach().clone()
    try:
        return None if loss is None else float(loss)
    except (TypeError, ValueError, OverflowError):
        raise InvalidTypeError(f"a loss is a number or a tensor; got {type(loss).__name__}", hint=hint) from None
