"""What a program of another framework does in place of a module of A: its norm with another eps, its activation.

Such a program has no modules whose settings could be compared. But where it begins to differ, its numbers are known:
A's own module is tried with other settings on its own input, and the setting that gives B's numbers is a change of A.

    x * rsqrt(mean(x * x) + 1e-6) * w            for A's RMSNorm with eps 1e-5: the norm gives B's output
    gelu(x @ up) @ down                          for A's down(gelu_new(up(x))): what A's `down` adds is what B has more
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from sqrtdk._wrappers import submodule
from sqrtdk.compare.outside.changes import ModuleChange
from sqrtdk.compare.outside.modules import KeptTensor, ModuleStep
from sqrtdk.compare.outside.parts import (
    EPS_NAMES,
    ModuleCauseRow,
    ModuleDifference,
    NamedDifference,
    is_activation,
    is_norm,
)
from sqrtdk.errors import MODEL_ERRORS

_EPS = (0.0, 1e-12, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 0.1)
_NORM_NEAR = 1e-5  # relative: norms compute in float32 also when they get float64
_ONE_ACTIVATION = 1e-6  # relative and absolute: of two forms of one activation
_SHARE_LEFT = 0.1  # of the difference, at most, with the right setting
_KNOWN_ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu (tanh)": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * (1.702 * x).sigmoid(),
    "silu": functional.silu,
    "relu": torch.relu,
    "relu squared": lambda x: torch.relu(x).square(),
    "leaky_relu": functional.leaky_relu,
    "elu": functional.elu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
    "mish": functional.mish,
    "none": lambda x: x,
}
_OTHER = "outputs.module.other_value"
_ROW = partial(ModuleCauseRow, part="module", modules=(), compare=lambda _: None)


def trial_changes(
    call: ModuleStep, gives: Sequence[tuple[KeptTensor, KeptTensor]], steps: Sequence[ModuleStep], model: nn.Module
) -> Iterator[ModuleChange]:
    """Yield A's modules with other settings that give B's numbers, most specific first; none if nothing fits.

    Args:
        call: call of A whose input agrees and whose output does not.
        gives: outputs of it that differ: A's and B's.
        steps: all calls of A.
        model: A.
    """
    if not gives or any(kept.stride != 1 for kept in gives[0]) or gives[0][0].shape != gives[0][1].shape:
        return
    a, b = (kept.values.view(kept.shape).double() for kept in gives[0])
    inner = [step for step in steps if step.number == call.number or step.parent == call.number]
    inner += [step for step in steps if step.parent in {one.number for one in inner} and step not in inner]
    for step in inner:
        module = submodule(model, step.place[0])
        with torch.no_grad():
            if step.number == call.number and is_norm(module):
                yield from _norms(step, module, a, b)
            elif is_activation(module):
                yield from _activations(step, module, inner, model, b - a)


def _norms(step: ModuleStep, module: nn.Module, a: Tensor, b: Tensor) -> Iterator[ModuleChange]:
    """Yield a norm with another eps, or with a weight that is off by 1, that gives B's output for A's input."""
    if not step.takes or step.takes[0].stride != 1:
        return
    x = step.takes[0].values.view(step.takes[0].shape)
    name = next((name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)), "")
    tried: list[tuple[float, ModuleChange]] = []
    path = step.place[0]
    if name:
        own = getattr(module, name)
        for eps in _EPS:
            change = partial(_set, path, name, eps)
            words = {"name": f"`{name}`", "one": f"{own:g}", "other": f"{eps:g}", "partner": f"`{name}`"}
            row = _ROW("norm_eps", text=_OTHER, fix="fixes.setting.set")
            tried += _tried(module, x, b, change, NamedDifference(row, ModuleDifference(own, eps, words, change)))
    if isinstance(getattr(module, "weight", None), Tensor):
        for by, one, other in ((1.0, "B", "A"), (-1.0, "A", "B")):
            change = partial(_shift, path, by)
            sides = ("weight", "1 + weight") if by > 0 else ("1 + weight", "weight")
            words = {"name": "`weight`", "one": one, "other": other}
            fix = "fixes.norm_offset.drop" if by > 0 else "fixes.norm_offset.set"
            row = _ROW("norm_offset", text="outputs.module.offset", fix=fix)
            tried += _tried(module, x, b, change, NamedDifference(row, ModuleDifference(*sides, words, change)))
    size = float(b.norm()) or 1.0
    best = min(tried, key=lambda one: one[0], default=None)
    if best is not None and best[0] <= min(_NORM_NEAR, _SHARE_LEFT * float((a - b).norm()) / size):
        yield best[1]


def _tried(
    module: nn.Module, x: Tensor, b: Tensor, change: Callable[..., None], found: NamedDifference
) -> list[tuple[float, ModuleChange]]:
    """Return how far from B's output a copy of the module is that has the change; [] if it can't run so."""
    off = _distance(module, x, b, change)
    return [] if off is None else [(off, ModuleChange((found,), True))]


def _distance(module: nn.Module, x: Tensor, b: Tensor, change: Callable[..., None]) -> float | None:
    twin = copy.deepcopy(module).double()
    try:
        change(twin, "", whole=False)
        made = twin(x.to(next((p.device for p in twin.parameters()), x.device)))
    except MODEL_ERRORS:
        return None
    if not isinstance(made, Tensor) or made.shape != b.shape:
        return None
    return float((made.double().cpu() - b).norm() / b.norm()) if float(b.norm()) else 1.0


def holds_for(change: ModuleChange, module: nn.Module, partner: ModuleStep) -> bool:
    """Return whether a module of A with the change gives what its partner in B gives, for what that takes.

    Args:
        change: a change that `trial_changes` yielded.
        module: a module of A.
        partner: a call of its partner in B.
    """
    kept = (*partner.takes[:1], *partner.gives[:1])
    edit = change.parts[0].found.edit
    if len(kept) < 2 or any(one.stride != 1 for one in kept) or edit is None or not is_norm(module):
        return False
    x, b = (one.values.view(one.shape) for one in kept)
    with torch.no_grad():
        off = _distance(module, x, b.double(), edit)
    return off is not None and off <= _NORM_NEAR


def _activations(
    step: ModuleStep, module: nn.Module, inner: Sequence[ModuleStep], model: nn.Module, more: Tensor
) -> Iterator[ModuleChange]:
    """Yield another activation whose effect on the linear layer behind it is what B has more than A."""
    if not step.takes or not step.gives or any(kept.stride != 1 for kept in (step.takes[0], step.gives[0])):
        return
    x, y = (kept.values.view(kept.shape).double() for kept in (step.takes[0], step.gives[0]))
    behind = next(
        (other for other in inner if other.number > step.number and other.takes and other.takes[0].shape == y.shape
         and other.takes[0].stride == 1 and other.gives and other.gives[0].shape == more.shape), None,
    )  # fmt: skip
    if behind is None:
        return
    entering = behind.takes[0].values.view(y.shape).double()
    gate = torch.where(y.abs() > 1e-30, entering / y, 0.0)  # up(x) in act(gate(x)) * up(x); 1 without a gate
    layer = copy.deepcopy(submodule(model, behind.place[0])).double()
    best: tuple[float, str] | None = None
    for name, function in _KNOWN_ACTIVATIONS.items():
        try:
            made = layer(function(x) * gate) - layer(y * gate)
        except MODEL_ERRORS:
            return
        off = float((made.cpu() - more).norm() / more.norm())
        best = (off, name) if best is None or off < best[0] else best
    if best is None or best[0] > _SHARE_LEFT:
        return
    own = type(module).__name__
    known = (
        name
        for name, function in _KNOWN_ACTIVATIONS.items()
        if torch.allclose(function(x), y, _ONE_ACTIVATION, _ONE_ACTIVATION)
    )
    words = {"one": own, "own": next(known, own), "other": best[1]}
    change = partial(_activate, step.place[0], best[1])
    row = _ROW("activation", text="outputs.module.other_type", fix="fixes.activation.set")
    yield ModuleChange((NamedDifference(row, ModuleDifference(own, best[1], words, change)),), True)


class _Function(nn.Module):
    """An activation as a module."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of x."""
        return _KNOWN_ACTIVATIONS[self.name](x)


def _module(model: nn.Module, path: str, whole: bool) -> nn.Module:
    return submodule(model, path) if whole else model


def _set(home: str, name: str, value: float, model: nn.Module, path: str, *, whole: bool = True) -> None:
    """Set an attribute of a module; `path` is that of the place where it shows."""
    setattr(_module(model, path or home, whole), name, value)


def _shift(home: str, by: float, model: nn.Module, path: str, *, whole: bool = True) -> None:
    """Add a number to the weight of a module."""
    module = _module(model, path or home, whole)
    module.weight = nn.Parameter(module.get_parameter("weight").detach() + by, requires_grad=False)


def _activate(home: str, name: str, model: nn.Module, path: str) -> None:
    """Put another activation in place of the one at `home`, or at the same place below the module at `path`."""
    number = re.compile(r"(?<=\.)\d+(?=\.)")
    at = number.findall(f".{path}.")
    found = iter(at)
    same = number.sub(lambda old: next(found, old[0]), f".{home}.").strip(".")
    parent, _, last = same.rpartition(".")
    submodule(model, parent).add_module(last, _Function(name))
