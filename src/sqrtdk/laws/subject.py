"""A model with its inputs, which is run again and again with some of them changed.

The module is the user's own object. If it computes in float16 or bfloat16, a float32 copy is asked instead, because
rounding in half precision would hide what moves. Casts of the forward to half precision (`x.to(self.dtype)` between
modules of several dtypes) become casts to float32 in the copy. Only the law `finite` depends on the dtype: it asks the
model itself.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sqrtdk.audit.records import Finding, JudgedCall
from sqrtdk.errors import INTERRUPTS, ModelError, kind_and_text
from sqrtdk.laws.moved import HALF_DTYPES
from sqrtdk.laws.pace import Pace
from sqrtdk.messages import Message
from sqrtdk.models.copies import NotCopiedError, copied
from sqrtdk.models.modules import forward_arguments
from sqrtdk.models.records import Inputs
from sqrtdk.models.run import call
from sqrtdk.modules.structures import tensors_of

Outputs = dict[str, Tensor]
_MOST_REASON_CHARACTERS = 160  # characters of a reason that quotes the model's own error
_LEAST_ERROR_CHARACTERS = 20  # characters of that error, whatever the length of the names before it


class NotAsked(Exception):
    """A law does not apply to this model or these inputs, or can't be asked of them.

    Args:
        reason: Why.
        by_length: Whether the reason may lie in the number of tokens, or in which of them are the first.
    """

    def __init__(self, reason: str, *, by_length: bool = False) -> None:
        super().__init__(reason)
        self.reason = reason
        self.by_length = by_length


class RunEnded(BaseException):
    """Ends a run from within, once all that is asked of it is there. No `except Exception` of a model stops it."""


@dataclass(slots=True)
class Subject:
    """The model that laws are asked of.

    Attributes:
        module: The module, in evaluation mode.
        inputs: Inputs by the names of forward's arguments.
        positional: Names of the inputs that are passed by position.
        calls: The attentions of an ordinary run, judged.
        config: The model's config, or None.
        seed: Seed of every run.
        findings: Findings of the rules on the ordinary run.
        packed: The argument that takes all inputs in one dictionary, or None.
        first: The model with the first tokens of the inputs, where these may stand for all.
        traced: Result of a run under a trace, for the laws that share it.
        traced_cut: The same with other tokens from a cut on; what shows for any tokens is read from it.
        batches: The runs of one sample alone and in a batch, for the laws that share them.
        pace: The time that runs take, for this subject and those made of it.
        taken: Whether the outputs are those of the audit, which ran under a trace.
        returned_before: What forward returned in the run that the outputs were taken from, or None.
        itself: The model in its own half precision, if a float32 copy is asked; for what depends on the dtype.
        rows_apart: Whether changes of the inputs may be rows of one run: its samples do not see one another.
        steady: Whether two runs of the unchanged inputs agree; None if that was not looked at.
        moves: Whether some output was seen to move with the content of the inputs; None if no law has looked.
        earlier_stay: Whether later tokens of these very inputs were seen to move no earlier output.
        rows: Inputs that ran as rows of one run, and their outputs, for this subject and those made of it.
    """

    module: nn.Module
    inputs: dict[str, Any]
    positional: tuple[str, ...]
    calls: tuple[JudgedCall, ...] = ()
    config: Any = None
    seed: int = 0
    findings: tuple[Finding, ...] = ()
    packed: str | None = None
    first: Subject | None = field(default=None, repr=False)
    traced: Any = field(default=None, repr=False)
    traced_cut: Any = field(default=None, repr=False)
    batches: Any = field(default=None, repr=False)
    pace: Pace = field(default_factory=Pace, repr=False)
    taken: bool = False
    returned_before: Any = field(default=None, repr=False)
    itself: Subject | None = field(default=None, repr=False)
    rows_apart: bool = False
    steady: bool | None = None
    moves: bool | None = None
    earlier_stay: bool = False
    rows: list[tuple[dict[str, Any], Outputs]] = field(default_factory=list, repr=False)
    _base: Outputs | None = field(default=None, repr=False)
    _base_returned: Any = field(default=None, repr=False)

    @property
    def base(self) -> Outputs:
        """The outputs for the unchanged inputs, by name; computed by one run when first read, then kept."""
        if self._base is None:
            self._base = next((y for inputs, y in self.rows if _are_equal(inputs, self.inputs)), None)
        if self._base is None:
            self._base_returned = self.returned({})
            self._base = tensors_of(self._base_returned)
        return self._base

    @property
    def base_returned(self) -> Any:
        """What forward returned for the unchanged inputs; None if the outputs are those of another run."""
        return self._base_returned if self.base else None

    def take(self, outputs: Outputs, returned: Any = None) -> None:
        """Use the outputs of an earlier run for the unchanged inputs, so that `base` needs no run.

        Args:
            outputs: Outputs by name; with an empty dict `base` runs the model as usual.
            returned: What forward returned in that run, kept in `returned_before`.
        """
        self._base, self._base_returned, self.taken = outputs or None, None, bool(outputs)
        self.returned_before = returned

    def take_plain(self, outputs: Outputs) -> None:
        """Use the outputs of a plain run of the unchanged inputs, in place of the audit's."""
        self._base, self._base_returned, self.taken = outputs, None, False
        self.forget_runs()

    def leave_taken(self) -> None:
        """Drop outputs that were taken from an earlier run, so that `base` runs the model when it is next read."""
        if self.taken:
            self._base, self.taken = None, False

    @property
    def time_is_up(self) -> Message:
        """Why a law is not asked once `pace` allows no further run."""
        return Message("laws.asking.time_is_up", seconds=f"{self.pace.most or 0:g}")

    @property
    def shares_runs(self) -> bool:
        """Whether a law has made runs that another law may share."""
        return self.traced is not None or self.batches is not None

    def forget_runs(self) -> None:
        """Drop the traced run and the batch runs that laws share, so that the next law makes them anew."""
        self.traced = self.batches = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The inputs that are tensors, by name; other inputs (None, numbers, caches) are left out."""
        return {name: value for name, value in self.inputs.items() if isinstance(value, Tensor)}

    def run(self, changes: Mapping[str, Any], *, seed: int | None = None) -> Outputs:
        """Return every floating-point tensor of the model's output, by name, with some inputs changed.

        There are none if a hook ends the run by `RunEnded`.

        Raises:
            NotAsked: The model raises on these inputs.
        """
        return tensors_of(self.returned(changes, seed=seed))

    def returned(self, changes: Mapping[str, Any], *, seed: int | None = None, shared: Sequence[str] = ()) -> Any:
        """Return the model's output unchanged.

        Args:
            changes: New values of some inputs.
            seed: Seed of the run; None takes the subject's own.
            shared: Names of inputs that are passed without a copy, so that the model may fill them.

        Raises:
            NotAsked: The model raises on these inputs, or the time of the laws is up.
        """
        if self.pace.is_up:
            raise NotAsked(self.time_is_up, by_length=True)
        named = {**self.inputs, **changes}
        try:  # a forward may write into its inputs or add to a cache
            own = copied({name: value for name, value in named.items() if name not in shared}, strict=True)
        except NotCopiedError as error:
            raise NotAsked(Message("laws.asking.input_not_copied", type=error.args[0].__name__)) from error
        named |= dict(own)
        inputs: Inputs = named
        if self.packed is not None:
            inputs = (named,) if self.positional else {self.packed: named}
        elif self.positional:
            inputs = tuple(named[name] for name in self.positional)
        torch.manual_seed(self.seed if seed is None else seed)
        try:
            with self.pace.run(), contextlib.nullcontext() if self.itself is None else _HalfAsFloat32():
                return call(self.module, inputs, own_inputs=True)
        except ModelError as error:
            if isinstance(error.__cause__, RunEnded):
                return None
            raise NotAsked(self._raised(error.__cause__ or error), by_length=True) from error

    def _raised(self, error: BaseException) -> Message:
        model = type(self.module).__name__
        said = "laws.asking.model_raised" if self.itself is None else "laws.asking.copy_raised"
        room = _MOST_REASON_CHARACTERS - len(str(Message(said, model=model, error=f"{type(error).__name__}: ")))
        return Message(said, model=model, error=kind_and_text(error, max(room, _LEAST_ERROR_CHARACTERS)))

    def over(self, inputs: Mapping[str, Any]) -> Subject:
        """Return a new subject with the same module, calls, config and seed, and with other inputs.

        Kept runs are not carried over, except runs of stacked rows; the time limit is shared.
        """
        return Subject(
            self.module, dict(inputs), self.positional, self.calls, self.config, self.seed, self.findings, self.packed,
            pace=self.pace, itself=self.itself, rows=self.rows,
        )  # fmt: skip

    def by_name(self) -> Subject:
        """Return the subject with every input passed by name, so that others can be added.

        Raises:
            NotAsked: An input has no name.
        """
        if self.packed is not None:
            return self
        takes = forward_arguments(self.module)
        if unnamed := [name for name in self.positional if name not in takes]:
            raise NotAsked(Message("laws.asking.unnamed_argument", name=unnamed[0]))
        named = self.over(self.inputs)
        # The outputs are the same, so they are not run again.
        named.rows_apart = self.rows_apart
        named.positional, named._base, named._base_returned = (), self._base, self._base_returned
        return named


def _are_equal(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two sets of inputs have the same names and values."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)
        return type(a) is type(b) and a is b

    return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())


def subject_of(
    module: nn.Module, inputs: Inputs, calls: tuple[JudgedCall, ...] = (), config: Any = None, *, seed: int = 0,
    large: bool = False,
) -> Subject:  # fmt: skip
    """Return a model in the form in which laws are asked of it.

    Args:
        module: The module, in evaluation mode.
        inputs: Inputs by name, or in the order of forward's arguments.
        calls: The judged attentions of an ordinary run.
        config: The model's config, or None.
        seed: Seed of every run.
        large: Whether the model is large. Any other model with half-precision weights is copied to float32.

    Raises:
        NotAsked: The model computes in half precision and can't be copied.
    """
    named, positional = {}, ()  # type: dict[str, Any], tuple[str, ...]
    if isinstance(inputs, dict):
        named = dict(inputs)
    else:
        names = [*forward_arguments(module)][: len(inputs)]
        names += [f"argument {place}" for place in range(len(names), len(inputs))]
        named, positional = dict(zip(names, inputs, strict=True)), tuple(names)
    packed = _packed(named)
    if packed is not None:
        named = dict(named[packed])
    subject = Subject(module, named, positional, calls, config, seed, packed=packed)
    if not large and any(parameter.dtype in HALF_DTYPES for parameter in module.parameters()):
        copied = {name: _float32(value) for name, value in named.items()}
        itself = subject
        subject = Subject(_in_float32(module), copied, positional, calls, config, seed, packed=packed, itself=itself)
    return subject


def _packed(named: Mapping[str, Any]) -> str | None:
    """Return the only argument if it is a dictionary of inputs: `model({"ids": ids, "padding_mask": mask})`."""
    if len(named) != 1:
        return None
    ((name, value),) = named.items()
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        return None
    return name if any(isinstance(entry, Tensor) for entry in value.values()) else None


def _in_float32(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module).float()
    except INTERRUPTS:
        raise
    except BaseException as error:  # a user's __deepcopy__ may raise anything
        raise NotAsked(Message("laws.asking.half_precision", error=kind_and_text(error, 120))) from error


class _HalfAsFloat32(TorchFunctionMode):
    """Makes every cast to half precision, and every new tensor in it, one in float32."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wide = {name: _wide_dtype(value) for name, value in (kwargs or {}).items()}
        func = Tensor.float if func in (Tensor.half, Tensor.bfloat16) else func
        return func(*map(_wide_dtype, args), **wide)


def _wide_dtype(value: Any) -> Any:
    return torch.float32 if isinstance(value, torch.dtype) and value in HALF_DTYPES else value


def _float32(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in HALF_DTYPES else value
