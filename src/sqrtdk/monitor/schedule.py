"""The checked options and losses of a training loop, and the schedule: which steps of a run are sampled.

A schedule is frozen data and one pure function of the step. Steps count from 1; every schedule samples the first step,
because all later ones are compared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast

from torch import Tensor, nn

from sqrtdk._wrappers import hint_for
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.monitor.samples import Alarm

OnAlarm = str | Callable[[Alarm], None]


class LossScaler(Protocol):
    """An object that multiplies the loss before its backward pass, such as `torch.amp.GradScaler`."""

    def get_scale(self) -> float:
        """Return the factor on the loss, by which gradients are divided before they are recorded."""


def check_options(
    model: object, on_alarm: object, rows: object, first_step: object, scaler: LossScaler | None,
    gradient: object = False,
) -> None:  # fmt: skip
    """Check options of `watch`, before a folder or a logger is opened.

    Args:
        model: The model to watch.
        on_alarm: What an alarm does.
        rows: Largest number of rows of a sequence that are measured.
        first_step: Number of the first step.
        scaler: The scaler of the loss; None for none.
        gradient: Whether, or at which of the sampled steps, backward passes are judged.

    Raises:
        InvalidTypeError: The model is not a module, or the scaler no scaler.
        InvalidValueError: An option has an unknown value.
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
    if not isinstance(gradient, bool):
        _whole_number("gradient", gradient, 1, "True: at every sampled step.")
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise InvalidTypeError(
            f"scaler is a torch.amp.GradScaler; got {type(scaler).__name__}",
            hint="None: no loss scale.",
        )


def _whole_number(name: str, value: object, least: int, hint: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
        raise InvalidValueError(f"{name} is a whole number from {least} on, or None; got {value!r}", hint=hint)


def copied_loss(loss: Tensor | float | None) -> Tensor | float | None:
    """Copy a loss, as the next step may overwrite the tensor in place.

    Raises:
        InvalidValueError: It has several numbers.
        InvalidTypeError: It is not a number.

    Example:
        >>> copied_loss(2), copied_loss(None)
        (2.0, None)
    """
    hint = "Pass the loss that backward() was called on."
    if isinstance(loss, Tensor):
        if loss.numel() != 1:
            raise InvalidValueError(f"a loss is one number; got the shape {tuple(loss.shape)}", hint=hint)
        # A copy: training loops add up losses in place, and the number is read steps later.
        return loss.detach().clone()
    try:
        return None if loss is None else float(loss)
    except (TypeError, ValueError, OverflowError):
        raise InvalidTypeError(f"a loss is a number or a tensor; got {type(loss).__name__}", hint=hint) from None


class Schedule(Protocol):
    """Decides which steps of a run are sampled."""

    def due(self, step: int, worsening: bool = False) -> bool:
        """Return whether a step is sampled.

        Args:
            step: Number of the step, from 1.
            worsening: Whether a trend is bad, so that samples may be taken more often.
        """


@dataclass(frozen=True, slots=True)
class Every:
    """Every n-th step, and every `urgent`-th while a trend is bad.

    Attributes:
        steps: n.
        urgent: None: a bad trend changes nothing.

    Example:
        >>> [step for step in range(1, 31) if Every(10).due(step)]
        [1, 10, 20, 30]
        >>> [step for step in range(1, 11) if Every(10, urgent=5).due(step, worsening=True)]
        [1, 5, 10]
    """

    steps: int
    urgent: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("steps", self.steps), ("urgent", self.urgent)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise InvalidValueError(f"{name} is a whole number from 1 on; got {value!r}", hint="Pass every=100.")

    def due(self, step: int, worsening: bool = False) -> bool:
        """Return whether a step is sampled.

        These are step 1 and the multiples of `steps`, or of `urgent` while a trend is bad.

        Args:
            step: Number of the step, from 1.
            worsening: Whether a trend is bad.
        """
        often = self.urgent if worsening and self.urgent is not None else self.steps
        # Step 1 always: faults of initialisation show there, and the scale ratio of later steps is compared with it.
        return step == 1 or step % often == 0 or step % self.steps == 0


@dataclass(frozen=True, slots=True)
class Logarithmic:
    """A number of steps per decade, evenly spaced in their logarithm: 1, 2, 3, 5, 8, 13, 20, ...

    Attributes:
        a_decade: samples from one power of ten to the next.

    Example:
        >>> [step for step in range(1, 101) if Logarithmic(4).due(step)]
        [1, 2, 3, 6, 10, 18, 32, 56, 100]
    """

    a_decade: int = 10

    def __post_init__(self) -> None:
        if isinstance(self.a_decade, bool) or not isinstance(self.a_decade, int) or self.a_decade < 1:
            raise InvalidValueError(
                f"a_decade is a whole number from 1 on; got {self.a_decade!r}", hint="Pass Logarithmic(10)."
            )

    def due(self, step: int, worsening: bool = False) -> bool:
        """Return whether a step is sampled: one of `a_decade` steps per factor of 10, evenly spaced on a log scale.

        Args:
            step: Number of the step, from 1.
            worsening: Whether a trend is bad; not used.
        """
        place = round(self.a_decade * math.log10(step))
        # The neighbours too, because rounding log10 may land one place off.
        return any(round(10 ** (near / self.a_decade)) == step for near in (place - 1, place, place + 1))


@dataclass(frozen=True, slots=True)
class When:
    """The steps for which a function returns True, and the first step.

    Attributes:
        says: step -> bool.

    Example:
        >>> [step for step in range(1, 8) if When(lambda step: step in (3, 7)).due(step)]
        [1, 3, 7]
    """

    says: Callable[[int], bool]

    def due(self, step: int, worsening: bool = False) -> bool:
        """Return whether a step is sampled: step 1, and each step for which the function returns True.

        Args:
            step: Number of the step, from 1.
            worsening: Whether a trend is bad; not used.
        """
        return step == 1 or bool(self.says(step))


def schedule_of(every: int | Schedule | Callable[[int], bool]) -> Schedule:
    """Return the schedule for a number of steps, a schedule or a function of the step.

    Raises:
        InvalidValueError: The number is below 1.
        InvalidTypeError: It is anything else.

    Example:
        >>> schedule_of(100)
        Every(steps=100, urgent=None)
    """
    # A class has `due` too, but as a plain function: `every=Logarithmic` without brackets is refused below.
    if isinstance(every, Every | Logarithmic | When):
        return every
    if isinstance(every, int):
        return Every(every)
    if callable(getattr(every, "due", None)) and not isinstance(every, type):
        return cast(Schedule, every)
    if callable(every) and not isinstance(every, type):
        return When(every)
    raise InvalidTypeError(
        f"every is a number of steps, a schedule, or a function of the step; got {type(every).__name__}",
        hint="Pass every=100, Logarithmic(10), or lambda step: step % 7 == 0.",
    )
