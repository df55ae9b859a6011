"""Reading a field of any kind of configuration object. `declared.py` decides which object governs a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from sqrtdk._wrappers import innermost
from sqrtdk.errors import INTERRUPTS

# The base classes' own methods: those of a subclass may be overridden.
_OWN_METHODS: dict[type, Callable[[Any], Any]] = {
    float: float.__float__,
    int: int.__int__,
    str: str.__str__,
    list: list.copy,
}


def _pythons(value: Any) -> Any:
    """Return a number, text or list of a user's subclass as Python's own type: its own methods may raise anything."""
    kind = type(value)  # not `__class__`, which an object can fake
    if kind is bool or kind in _OWN_METHODS:
        return value
    return next((read(value) for cls, read in _OWN_METHODS.items() if issubclass(kind, cls)), value)


def _safely(read: Callable[..., Any], *args: Any) -> Any:
    """Return what is read, or None: a property, `__getattr__` or `__iter__` of a user's class may raise anything."""
    try:
        return read(*args)
    except INTERRUPTS:
        raise
    except BaseException:
        return None


def _entry(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def field(config: Any, path: str) -> Any:
    """Return the value at a dotted path of a dict or object, or None if it is absent or can't be read.

    Numbers, texts and lists are returned as Python's own types.

    >>> field({"attn_config": {"softmax_scale": 0.5}}, "attn_config.softmax_scale")
    0.5
    """
    for name in path.split("."):
        if config is None:
            return None
        config = _safely(_entry, config, name)
    return _pythons(config)


def mapping(config: Any, path: str) -> dict[str, Any] | None:
    """Return a copy of the mapping at a dotted path, or None if there is no mapping or its keys can't be listed.

    Args:
        config: A dict or an object with attributes.
        path: Names joined by dots, "text_config.rope_scaling".

    Returns:
        The entries whose keys are strings. An entry that raises when it is read has the value None.
    """
    entries = field(config, path)
    names = _safely(list, entries) if isinstance(entries, Mapping) else None
    return None if names is None else {name: field(entries, name) for name in names if isinstance(name, str)}


def present(config: Any, name: str) -> bool:
    """Return whether an object has an attribute; False if looking for it raises."""
    return _safely(hasattr, config, name) is True


def own_fields(config: Any) -> Mapping[str, Any]:
    """Return an object's own `__dict__`, or an empty mapping if it has none."""
    attributes = field(config, "__dict__")
    return attributes if isinstance(attributes, Mapping) else {}


def contexts(owner: Any) -> Iterator[tuple[str, Sequence[Any]]]:
    """Yield each pair of context sizes that a config or module declares, as (field name, (before, after)).

    The fields are `window_size` and `att_context_size`; `window_size = (255, 0)` lets a query see 255 keys before its
    own and none after it. The two numbers are not checked.
    """
    for name in ("window_size", "att_context_size"):
        pair = field(owner, name)
        if isinstance(pair, list | tuple) and len(pair) == 2:
            yield name, pair


def module_at(model: nn.Module, site: str) -> nn.Module | None:
    """Return the submodule at a dotted path, or None if the model has none there.

    "" stands for the model itself. Unlike `get_submodule` it raises no error and works with TorchScript.
    """
    module: Any = innermost(model)
    for name in site.split(".") if site else ():
        module = field(module, name)  # TorchScript refuses get_submodule
        if not isinstance(module, nn.Module):
            return None
        module = innermost(module)
    return module  # type: ignore[no-any-return]


def number_at(config: Any, path: str) -> float | None:
    """Return the finite number at `path`, else None; a bool does not count as a number."""
    return as_number(field(config, path))


def as_number(value: Any) -> float | None:
    """Return a Python number as a finite float, else None; bools and ints beyond the range of floats give None.

    >>> as_number(2), as_number(True), as_number(10**400)
    (2.0, None, None)
    """
    value = _pythons(value)
    if type(value) not in (int, float):  # bool is a subclass of int
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:
        return None


def model_type(config: Any) -> str:
    """Return `config.model_type`, or the empty string."""
    value = field(config, "model_type")
    return value if isinstance(value, str) else ""


def is_transformers(config: Any) -> bool:
    """Return whether the config's class is defined in the package transformers, and not in a user's or a hub's code."""
    return type(config).__module__.startswith("transformers.")
