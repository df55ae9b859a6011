"""What an edit is: a change of a model that stands for a known mistake, and how its number may be varied."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor, nn

from sqrtdk.answers.edited import Edited
from sqrtdk.messages import Message

Value = str | float | None
Change = Callable[[Edited], None]
SAME_NUMBER = 1e-9  # relative


@dataclass(frozen=True, slots=True)
class Number:
    """How the number of an edit may be varied.

    Attributes:
        low: Least value.
        high: Largest value.
        whole: Whether it is a whole number, as a window.
        make: The edit with another value.
    """

    low: float
    high: float
    whole: bool
    make: Callable[[float], Edit]


@dataclass(frozen=True, slots=True)
class Edit:
    """A change of a model.

    Attributes:
        cause: Name of the cause, as in `sqrtdk.diff`.
        what: What is changed, an entry of `answers.what`: "linear" of the cause `rope_base`.
        a: What the model has: a number, a name, an entry of `answers.value`; None if it has nothing of the kind.
        b: What the edit puts in its place.
        change: Applies it to a copy.
        number: How `b` may be varied; None where there is nothing to fit.
        fitted: Whether `b` was fitted to the answers.
    """

    cause: str
    what: str
    a: Value
    b: Value
    change: Change
    number: Number | None = None
    fitted: bool = False

    @property
    def key(self) -> tuple[str, str, Value]:
        """Return what tells it from other edits of one model."""
        return self.cause, self.what, self.b

    @property
    def text(self) -> Message:
        """Return what differs: "rotary base: 10000 in A, 500000 in B"."""
        return Message("answers.edit.text", what=Message(f"answers.what.{self.what}"), a=shown(self.a), b=shown(self.b))


def shown(value: Value) -> str:
    """Return a value as a report shows it."""
    if value is None:
        return Message("answers.value.none")
    if isinstance(value, float | int):
        return f"{value:.6g}"
    try:
        return Message(f"answers.value.{value}")
    except KeyError:  # the name of an activation
        return value


def edits_of_number(
    cause: str,
    what: str,
    a: Value,
    values: Iterable[float],
    bounds: tuple[float, float],
    change: Callable[[float], Change],
    *,
    whole: bool = False,
) -> Iterator[Edit]:
    """Return one edit for each value that is not A's own.

    Args:
        cause: See `Edit`.
        what: See `Edit`.
        a: A's number; None if it has none.
        values: What is tried.
        bounds: Least and largest value of a fit.
        change: Makes the change of a value.
        whole: Whether values are whole numbers.
    """

    def make(value: float) -> Edit:
        value = round(value) if whole else value
        return Edit(cause, what, a, value, change(value), Number(*bounds, whole, make))

    for value in dict.fromkeys(values):
        if not isinstance(a, float | int) or abs(value - a) > SAME_NUMBER * abs(a):
            yield make(value)


def put_parameter(module: nn.Module, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Put a changed parameter in place of one that the copy shares with the model."""
    old = getattr(module, name, None)
    if isinstance(old, Tensor):
        setattr(module, name, nn.Parameter(change(old.detach()), requires_grad=False))
