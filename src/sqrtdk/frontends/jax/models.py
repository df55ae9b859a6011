"""What may stand in place of a JAX function: modules of flax linen, flax nnx and equinox, as functions of parameters.

    linen      module.apply(variables, *inputs); scopes name the modules
    nnx        the module's state is its parameters
    equinox    the module's arrays are its parameters

Neither nnx nor equinox notes which module runs. While such a module is traced, the `__call__` of the classes of its
parts is wrapped so that each pushes a scope with its path; afterwards the classes are as they were.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

from sqrtdk.errors import InvalidTypeError, ModelError
from sqrtdk.frontends.jax.arrays import jax
from sqrtdk.frontends.jax.places import MARK
from sqrtdk.messages import Message

_MOST_NESTED = 32  # modules and containers in one another


@dataclass(frozen=True, slots=True)
class JaxModel:
    """A model as JAX calls it.

    Attributes:
        call: called with the parameters and the inputs.
        parameters: the tree of parameters.
        name: name of the function, or class of the module.
        inputs: names of its arguments behind the parameters, without those of `*args`.
        root: scope that names the whole model; "" if there is none.
        dropped: beginnings of parameters' paths that name no module: flax's "params".
    """

    call: Callable[..., Any]
    parameters: Any
    name: str
    inputs: tuple[str, ...]
    root: str = ""
    dropped: tuple[str, ...] = ()


def jax_model(function: Any, parameters: Any) -> JaxModel:
    """Return a function, or a module of flax or equinox, as a model that is called with parameters and inputs.

    Args:
        function: A function of parameters and inputs, or a module.
        parameters: The tree of parameters, or the variables of a module of linen; None for a module that holds its own.

    Raises:
        InvalidTypeError: It is neither a function nor such a module.
        ModelError: A module of linen comes without variables.
    """
    linen, nnx, equinox = (sys.modules.get(name) for name in ("flax.linen", "flax.nnx", "equinox"))
    bound = getattr(function, "__self__", None)
    if linen is not None and isinstance(bound, linen.Module) and getattr(function, "__name__", "") == "apply":
        function = bound
    if linen is not None and isinstance(function, linen.Module):
        return _linen(function, parameters)
    if nnx is not None and isinstance(function, nnx.Module):
        return _nnx(nnx, function)
    if equinox is not None and isinstance(function, equinox.Module):
        return _equinox(equinox, function)
    if not callable(function) or isinstance(function, type):
        kind = function.__name__ if isinstance(function, type) else type(function).__name__
        raise InvalidTypeError(Message("frontends.no_function", kind=kind), hint=Message("frontends.hint.function"))
    name = getattr(function, "__name__", type(function).__name__)
    return JaxModel(function, parameters, name, _arguments(function, 1))


def _arguments(function: Any, skipped: int) -> tuple[str, ...]:
    """Return the names of a function's positional arguments behind the first."""
    try:
        parameters = [*inspect.signature(function).parameters.values()][skipped:]
    except (ValueError, TypeError):  # a function of C has none
        return ()
    return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY))


def _linen(module: Any, variables: Any) -> JaxModel:
    name = type(module).__name__
    if not hasattr(variables, "keys"):
        raise ModelError(Message("frontends.no_variables", kind=name), hint=Message("frontends.hint.variables"))
    return JaxModel(
        module.apply, variables, name, _arguments(type(module).__call__, 1), module.name or name, ("params",)
    )


def _nnx(nnx: Any, module: Any) -> JaxModel:
    graph, state = nnx.split(module)

    def call(state: Any, *args: Any, **named: Any) -> Any:
        model = nnx.merge(graph, state)
        with _marked(model, nnx.Module):
            return model(*args, **named)

    return JaxModel(call, state, type(module).__name__, _arguments(type(module).__call__, 1))


def _equinox(equinox: Any, module: Any) -> JaxModel:
    arrays, rest = equinox.partition(module, equinox.is_array)

    def call(arrays: Any, *args: Any, **named: Any) -> Any:
        model = equinox.combine(arrays, rest)
        with _marked(model, equinox.Module):
            return model(*args, **named)

    return JaxModel(call, arrays, type(module).__name__, _arguments(type(module).__call__, 1))


@contextmanager
def _marked(model: Any, kind: type) -> Iterator[None]:
    """Makes each part of a model push its path as a scope while it runs."""
    parts = dict(_parts(model, kind, "", 0))
    paths = {id(part): path for path, part in parts.items()}
    classes = {type(part) for part in parts.values()}
    # the class that writes `__call__`: a class below it would run a wrapped one twice
    owners = {owner for each in classes for owner in each.__mro__[:1] if "__call__" in vars(owner)}
    before = {owner: vars(owner)["__call__"] for owner in owners}
    for owner, written in before.items():
        setattr(owner, "__call__", _pushing(written, paths))  # noqa: B010
    try:
        yield
    finally:
        for owner, written in before.items():
            setattr(owner, "__call__", written)  # noqa: B010


def _pushing(written: Any, paths: dict[int, str]) -> Any:
    @wraps(written)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        path = paths.get(id(self))
        bound = written.__get__(self, type(self))
        if path is None:
            return bound(*args, **named)
        with jax().named_scope(f"{MARK}{path}"):
            return bound(*args, **named)

    return call


def _parts(value: Any, kind: type, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if depth > _MOST_NESTED:
        return
    inside: Any = ()
    if isinstance(value, kind):
        yield path, value
        inside = vars(value).items()
    elif isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list | tuple):
        inside = enumerate(value)
    for key, inner in inside:
        if not str(key).startswith("_"):
            yield from _parts(inner, kind, f"{path}.{key}" if path else str(key), depth + 1)
