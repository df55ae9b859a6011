"""Copies of a module that share parameters: the tree of modules is new, and whatever a module holds is shared.

`copy.deepcopy` takes as long as a run of a small model, and dozens of copies are made. It is used only for a module
that holds another one where the tree does not show it, such as a bound method.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

_REGISTERED = ("_parameters", "_buffers", "_modules")


def shared_copy(module: nn.Module) -> nn.Module:
    """Return a copy whose modules, configs and hooks may be changed without changing the original.

    Parameters and buffers are shared until they are replaced; modules that stand in several places stay one.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> other = shared_copy(layer)
        >>> other.weight is layer.weight
        True
        >>> other.bias = None
        >>> layer.bias is None
        False
    """
    if any(_hides_a_module(value) for part in module.modules() for value in _attributes(part)):
        return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    configs: dict[int, Any] = {}
    copies: dict[int, nn.Module] = {}

    def copied(old: nn.Module) -> nn.Module:
        if id(old) in copies:
            return copies[id(old)]
        new = old.__class__.__new__(old.__class__)
        copies[id(old)] = new
        held = dict(old.__dict__)
        for name, value in held.items():
            if name in _REGISTERED or (name.startswith("_") and name.endswith("hooks")) or "_hooks_" in name:
                held[name] = copy.copy(value)
            elif name == "config":
                held[name] = copy.deepcopy(value, configs)
        held["_modules"] = {name: child and copied(child) for name, child in old._modules.items()}
        new.__dict__.update(held)
        return new

    return copied(module)


def _attributes(module: nn.Module) -> Iterator[Any]:
    """Yield what a module holds beside its parameters, buffers, modules, hooks and config."""
    for name, value in module.__dict__.items():
        if name not in _REGISTERED and name != "config" and "hooks" not in name:
            yield value


def _hides_a_module(value: Any) -> bool:
    """Return whether a value refers to a module."""
    if isinstance(value, MethodType):
        return isinstance(value.__self__, nn.Module)
    if isinstance(value, partial):
        return any(map(_hides_a_module, (value.func, *value.args, *value.keywords.values())))
    if isinstance(value, list | tuple | set):
        return any(map(_hides_a_module, value))
    if isinstance(value, dict):
        return any(map(_hides_a_module, value.values()))
    return isinstance(value, nn.Module)
