"""What a row of the table of causes compares outside attention, and what it returns.

A row (`MODULE_CAUSE_ROWS` in `sqrtdk.compare.causes`) compares one kind of part of two modules: a tensor or a value
that they hold, the modules themselves, or the numbers that they compute. `sqrtdk.compare.inside.suspect` has the same
for the parts of an attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sqrtdk.messages import Message, catalogue_text, placeholders
from sqrtdk.tracing.probe.gates import Gate

# "tensor" and "value": one that both modules hold, under one name. "module": the two modules. The others are read off
# the numbers where the outputs of two modules begin to differ.
PartKind = Literal["tensor", "value", "module", "shape", "gate", "numbers"]
ModuleKind = Literal["norm", "linear", "activation", "embedding", "other"]
HeldValue = bool | int | float | str | None | Callable[..., Any]
OfCheckpoint = Literal["other numbers", "rounded", "not rounded"]
Texts = str | tuple[str, str]  # an id of the catalogue; or two: B has none, A has none

# attribute names under which implementations store the same eps
EPS_NAMES = ("eps", "epsilon", "variance_epsilon", "layer_norm_eps", "layer_norm_epsilon", "norm_eps")
LAYER_NUMBER = re.compile(r"(?<=[.`])\d+(?=[.`])")  # a layer's number in a path
# GELUActivation, NewGELU, nn.SiLU, QuickGELU; nn.Identity beside one of these
_ACTIVATION = re.compile(r"act|elu$|elu[A-Z]|gelu|silu|swish|mish|tanh|sigmoid|softplus", re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class ModulePair:
    """A module of A and its partner in B.

    Attributes:
        a: the module of A.
        b: the module of B.
        others: all modules of A by path, which may hold what B's module holds.
        partners: modules of B by the paths of their partners in A.
    """

    a: nn.Module
    b: nn.Module
    others: Mapping[str, nn.Module] = field(default_factory=dict)
    partners: Mapping[str, nn.Module] = field(default_factory=dict)

    @property
    def kind(self) -> ModuleKind:
        """Return "norm", "linear", "activation" or "embedding", the kind of both modules; else "other".

        A norm or an activation on one side is enough. Modules with submodules are "norm" or "other".
        """
        if any(map(is_norm, (self.a, self.b))):
            return "norm"
        if any(any(module.children()) for module in (self.a, self.b)):
            return "other"
        if all(isinstance(module, nn.Embedding) for module in (self.a, self.b)):
            return "embedding"
        if all(_is_matrix(getattr(module, "weight", None)) for module in (self.a, self.b)):
            return "linear"
        return "activation" if any(map(is_activation, (self.a, self.b))) else "other"

    @property
    def path(self) -> str:
        """Return the path of A's module in A; "" if it is unknown, or the model itself."""
        return next((path for path, module in self.others.items() if module is self.a), "")


@dataclass(frozen=True, slots=True, eq=False)
class TensorPair:
    """A parameter or buffer of both modules that differs by more than its storage.

    Attributes:
        modules: the modules.
        name: its name in both.
        a: A's tensor; None without one.
        b: B's tensor, on A's device; None without one.
        off: which entries differ by more than the rounding of both dtypes; None if the shapes differ.
    """

    modules: ModulePair
    name: str
    a: Tensor | None
    b: Tensor | None
    off: Tensor | None = None

    @property
    def shown(self) -> str:
        """Return the name of the tensor in backquotes, as sentences have it."""
        return f"`{self.name}`"

    @property
    def numbers(self) -> tuple[Tensor, Tensor] | None:
        """Return both tensors in float64; None if one is missing or the shapes differ."""
        return None if self.a is None or self.b is None or self.off is None else (self.a.double(), self.b.double())


@dataclass(frozen=True, slots=True, eq=False)
class ValuePair:
    """A number, text or function that both modules, or their configs, hold and that differs.

    Attributes:
        modules: the modules.
        holder: the attribute that holds it: "config"; "" for the module itself.
        name: its name in A.
        name_b: its name in B: the eps of a norm has several.
        a: A's value.
        b: B's value.
    """

    modules: ModulePair
    holder: str
    name: str
    name_b: str
    a: HeldValue
    b: HeldValue


@dataclass(frozen=True, slots=True, eq=False)
class ShapePair:
    """The shapes of both modules' outputs.

    Attributes:
        a: shape of A's output.
        b: shape of B's output.
    """

    a: torch.Size
    b: torch.Size


@dataclass(frozen=True, slots=True, eq=False)
class GatePair:
    """The gates that both sides apply where they begin to differ.

    Attributes:
        a: A's gate; without a name if nothing is gated.
        b: B's gate.
        ran: modules that ran in B, relative to the module around the gate.
    """

    a: Gate
    b: Gate
    ran: Collection[str]


@dataclass(frozen=True, slots=True, eq=False)
class NumberPair:
    """What both modules compute where they begin to differ.

    Attributes:
        a: A's numbers.
        b: B's numbers, in the same shape.
        before: tensors that are equal on both sides, with what they are: "the input of `layers.1`".
    """

    a: Tensor
    b: Tensor
    before: Sequence[tuple[str, Tensor]] = ()


@dataclass(frozen=True, slots=True, eq=False)
class ModuleDifference:
    """A difference of two parts.

    Attributes:
        a: what A has, as a number or short text; None if it has nothing of the kind, or no value says it.
        b: what B has.
        words: values of the sentences.
        edit: puts B's part into the module at a path of a copy of A: `edit(model, path)`. None if only numbers differ.
        text: id of the sentence in place of the row's.
    """

    a: str | float | None
    b: str | float | None
    words: Mapping[str, Any] = field(default_factory=dict)
    edit: Callable[[nn.Module, str], None] | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class ModuleCauseRow:
    """A row of the table of causes outside attention.

    Attributes:
        name: name of the cause, in JSON and in docs/en/diff.md.
        part: kind of part that it compares.
        modules: kinds of modules that it belongs to; empty for all.
        compare: returns the difference; None if the parts agree, or differ otherwise.
        text: id of half a sentence; or two: B has none, A has none. A difference may bring its own id instead.
        fix: id of what to change in B, in the same form; "" for no advice.
        of_checkpoint: what two whole checkpoints differ by, so that modules of all types differ alike.
    """

    name: str
    part: PartKind
    modules: tuple[ModuleKind, ...]
    compare: Callable[[Any], ModuleDifference | None]
    text: Texts
    fix: Texts = ""
    of_checkpoint: OfCheckpoint | None = None


@dataclass(frozen=True, slots=True, eq=False)
class NamedDifference:
    """A difference and the row of the table that found it.

    Attributes:
        row: the row, which names the cause.
        found: the difference.
    """

    row: ModuleCauseRow
    found: ModuleDifference

    @property
    def text(self) -> Message:
        """Return half a sentence on what A and B have: "`eps` is 1e-05 in A, 0.01 in B"."""
        return _filled(self.found.text or _of_absence(self.row.text, self.found), self.found.words)

    def fix(self, path: str) -> Message | None:
        """Return what to change in B's module; None if the row gives no advice.

        Args:
            path: path of the module in B; "" for the model itself.
        """
        module = f"`{path}`" if path else Message("outputs.place.model")
        id = _of_absence(self.row.fix, self.found)
        return _filled(id, {**self.found.words, "module": module}) if id else None


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a normalisation.

    It is if the name of its class ends with "norm", or if it has an attribute named as an eps and no submodules.
    """
    has_eps = any(hasattr(module, name) for name in EPS_NAMES) and not any(module.children())
    return has_eps or type(module).__name__.lower().endswith("norm")


def is_activation(module: nn.Module) -> bool:
    """Return whether a module is an activation: it has no parameters, and its class is named like one."""
    return not any(True for _ in module.parameters()) and bool(_ACTIVATION.search(type(module).__name__))


def is_activation_name(name: str) -> bool:
    """Return whether a name contains the name of an activation or "act", as "hidden_act" and "gelu" do."""
    return bool(_ACTIVATION.search(name))


def _is_matrix(weight: object) -> bool:
    return isinstance(weight, Tensor) and weight.dim() == 2


def _of_absence(texts: Texts, found: ModuleDifference) -> str:
    return texts if isinstance(texts, str) else texts[0 if found.b is None else 1]


def _filled(id: str, words: Mapping[str, Any]) -> Message:
    names = placeholders(catalogue_text(id).en)
    return Message(id, **{name: word for name, word in words.items() if name in names})
