"""Tells the framework of `(function, parameters, inputs)`: by the types of what is in them.

    an array of JAX, a module of flax or equinox      JAX
    an array of MLX, a module of mlx.nn               MLX
    numbers of NumPy or torch alone                   the one whose modules the function's file uses

Nothing is imported: what is in them has been imported already.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from sqrtdk.errors import ModelError
from sqrtdk.messages import Message

_PACKAGES = {"jax": "jax", "jaxlib": "jax", "flax": "jax", "equinox": "jax", "haiku": "jax", "mlx": "mlx"}
_DEEPEST_TRIO = 16  # containers in one another


def framework_of(model: str, function: Any, parameters: Any, inputs: Any) -> str:
    """Return "jax" or "mlx".

    Args:
        model: What named the factory, for the error.
        function: A function, or a module.
        parameters: A tree of arrays, or None.
        inputs: A tree of arrays.

    Raises:
        ModelError: They have parts of both, or of none.
    """
    owner = getattr(function, "__self__", None)
    found = {name for part in (function, owner, parameters, inputs) for name in _frameworks(part, 0)}
    if not found:
        found = {name for value in _used(function) for name in _of_names(value)}
    if len(found) == 1:
        return found.pop()
    message = "frontends.two_frameworks" if found else "frontends.no_framework"
    raise ModelError(Message(message, model=repr(model)), hint=Message("frontends.hint.framework"))


def uses_framework(value: Any) -> bool:
    """Return whether a value is or holds an array, a module or a function of JAX or MLX, or of one of their libraries.

    Example:
        >>> uses_framework((1, [2.0]))
        False
    """
    return any(_frameworks(value, 0))


def _frameworks(value: Any, depth: int) -> Iterator[str]:
    kinds = type(value).__mro__
    names = {name for kind in kinds for name in _of_names(kind.__module__)}
    yield from names
    if names or depth > _DEEPEST_TRIO:
        return
    if isinstance(value, dict):
        inside: Any = value.values()
    elif isinstance(value, list | tuple):
        inside = value
    else:  # a dataclass, a cache
        inside = vars(value).values() if hasattr(value, "__dict__") and not callable(value) else ()
    for part in inside:
        yield from _frameworks(part, depth + 1)


def _used(function: Any) -> Iterator[str]:
    """Yield the modules that the globals of a function's file come from."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    function = getattr(function, "func", function)  # of a partial
    code = function if hasattr(function, "__globals__") else type(function).__call__
    for value in getattr(code, "__globals__", {}).values():
        yield str(getattr(value, "__name__", "")) if type(value).__name__ == "module" else str(
            getattr(value, "__module__", ""))  # fmt: skip


def _of_names(module: str) -> Iterator[str]:
    package = module.partition(".")[0]
    if package in _PACKAGES:
        yield _PACKAGES[package]
