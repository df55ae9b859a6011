"""Two modules of different classes: another activation, another norm, a bias that a layer holds and does not add.

A class is tried by putting a copy of B's module into A. Modules with inner modules on both sides are not exchanged: the
inner ones are compared themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import submodule
from sqrtdk.compare.causes.parameters import entries_off
from sqrtdk.compare.numbers import same
from sqrtdk.compare.outside.parts import ModuleDifference, ModulePair
from sqrtdk.errors import MODEL_ERRORS

_NORM_TOLERANCE = 1e-5  # relative: norms compute in float32 also when they get float64


def compare_added_bias(adds: str) -> Callable[[ModulePair], ModuleDifference | None]:
    """Return a function that finds a bias that only one side, "A" or "B", adds, in linear layers of one weight.

    In layers of one class a bias that is missing is missing among their parameters. A layer of another class may hold a
    bias and not add it, so the bias is added to what A gives, or taken from it. Each suspicion costs a run of A, so
    only layers of one weight are suspected.
    """

    def compare(both: ModulePair) -> ModuleDifference | None:
        a, b = both.a, both.b
        bias = getattr(a if adds == "A" else b, "bias", None)
        if type(a) is type(b) or not _same_weight(a, b):
            return None
        if not (isinstance(bias, Tensor) and bias.dim() == 1 and bias.is_floating_point()):
            return None
        words = {"one": adds, "name": "`bias`", "other": "B" if adds == "A" else "A"}
        if adds == "A":
            return ModuleDifference("bias", None, words, partial(_add_to_output, -bias.detach()))
        return ModuleDifference(None, "bias", words, partial(_add_to_output, bias.detach()))

    return compare


def compare_norm_offset(adds: str) -> Callable[[ModulePair], ModuleDifference | None]:
    """Return a function that finds norms of one weight of which one, "A" or "B", multiplies by 1 + weight.

    A's weight is changed by 1. Norms of two classes differ in many ways, and each suspicion costs a run of A, so both
    norms are first asked for one random tensor.
    """
    by = -1.0 if adds == "A" else 1.0

    def compare(both: ModulePair) -> ModuleDifference | None:
        if type(both.a) is type(both.b) or not _same_weight(both.a, both.b) or not _fits_with(both, by):
            return None
        words = {"name": "`weight`", "one": adds, "other": "B" if adds == "A" else "A"}
        a, b = ("1 + weight", "weight") if adds == "A" else ("weight", "1 + weight")
        return ModuleDifference(a, b, words, partial(_add_to_weight, by))

    return compare


def compare_class(both: ModulePair) -> ModuleDifference | None:
    """Return the difference of the classes; None if they are the same or both modules have submodules.

    `a` and `b` are the names of the classes. The edit puts a copy of B's module into A.
    """
    a, b = both.a, both.b
    if type(a) is type(b) or (any(a.children()) and any(b.children())):
        return None
    one, other = (type(module).__name__ for module in (a, b))
    if one == other:
        one, other = (f"{type(module).__module__}.{one}" for module in (a, b))
    return ModuleDifference(one, other, {"one": one, "other": other}, partial(_put_module, b))


def _fits_with(both: ModulePair, by: float) -> bool:
    """Return whether A's norm, with its weight changed by a number, gives what B's norm gives."""
    a, b = (copy.deepcopy(module).double() for module in (both.a, both.b))
    _add_to_weight(by, a, "")
    width = a.get_parameter("weight").shape[-1]
    x = torch.randn(4, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad():
            one, other = a(x.to(a.weight.device)), b(x.to(a.weight.device))  # type: ignore[arg-type]
    except MODEL_ERRORS:
        return False
    return same(one, other, _NORM_TOLERANCE)


def _same_weight(a: nn.Module, b: nn.Module) -> bool:
    x, y = (getattr(module, "weight", None) for module in (a, b))
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return False
    off = entries_off(x.detach(), y.detach().to(x.device))
    return off is not None and not bool(off.any())


def _add_to_output(bias: Tensor, model: nn.Module, path: str) -> None:
    """Add a vector to what the module at a path of the model gives."""

    def added(_: nn.Module, __: object, given: Any) -> Any:
        fits = isinstance(given, Tensor) and given.shape[-1:] == bias.shape
        return given + bias.to(given) if fits else None

    submodule(model, path).register_forward_hook(added)


def _add_to_weight(by: float, model: nn.Module, path: str) -> None:
    """Add a number to the weight of the module at a path of the model."""
    module = submodule(model, path)
    module.weight = nn.Parameter(module.get_parameter("weight").detach() + by, requires_grad=False)


def _put_module(module: nn.Module, model: nn.Module, path: str) -> None:
    """Put a copy of a module at a path of the model, in the model's dtype and training mode."""
    parent, _, name = path.rpartition(".")
    old = submodule(model, path)
    # A may run as a float64 copy, into which a float32 module of B has to fit.
    dtype = next((x.dtype for x in model.parameters() if x.is_floating_point()), torch.float64)
    submodule(model, parent).add_module(name, copy.deepcopy(module).to(dtype).train(old.training))
