"""What may stand in place of a JAX function: modules of flax, equinox and Keras, as functions of parameters.

    linen      module.apply(variables, *inputs); scopes name the modules
    nnx        the module's state is its parameters
    equinox    the module's arrays are its parameters
    Keras      layer.stateless_call(trainable, non_trainable, *inputs); its variables are its parameters, by their paths

Of these, only linen notes which module runs. While another one is traced, the `__call__` of the classes of its parts is
wrapped so that each pushes a scope with its path; afterwards the classes are as they were.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from sqrtdk.errors import ModelError
from sqrtdk.frontends.frames import wrapped_calls
from sqrtdk.frontends.jax.arrays import jax
from sqrtdk.frontends.jax.places import MARK
from sqrtdk.frontends.names import argument_names
from sqrtdk.frontends.source import ArrayModel, function_names
from sqrtdk.messages import Message

_MOST_NESTED = 32  # modules and containers in one another


@dataclass(frozen=True, slots=True, eq=False)
class JaxModel(ArrayModel):
    """A model as JAX calls it.

    Attributes:
        root: scope that names the whole model; "" if there is none.
        dropped: beginnings of parameters' paths that name no module: flax's "params".
    """

    root: str = ""
    dropped: tuple[str, ...] = ()


def jax_model(function: Any, parameters: Any) -> JaxModel:
    """Return a function, or a module of flax, equinox or Keras, as a model that is called with parameters and inputs.

    Args:
        function: A function of parameters and inputs, or a module.
        parameters: The tree of parameters, or the variables of a module of linen; None for a module that holds its own.

    Raises:
        InvalidTypeError: It is neither a function nor such a module.
        ModelError: A module of linen comes without variables; or a layer of Keras is not built, or runs on another
            backend than JAX.
    """
    linen, nnx, equinox, keras = (sys.modules.get(name) for name in ("flax.linen", "flax.nnx", "equinox", "keras"))
    bound = getattr(function, "__self__", None)
    if linen is not None and isinstance(bound, linen.Module) and getattr(function, "__name__", "") == "apply":
        function = bound
    if linen is not None and isinstance(function, linen.Module):
        return _linen(function, parameters)
    if nnx is not None and isinstance(function, nnx.Module):
        return _nnx(nnx, function)
    if equinox is not None and isinstance(function, equinox.Module):
        return _equinox(equinox, function)
    if keras is not None and isinstance(function, keras.Layer):
        return _keras(keras, function)
    name, names = function_names(function, "JAX", "frontends.hint.function")
    return JaxModel(function, parameters, name, names)


def _linen(module: Any, variables: Any) -> JaxModel:
    name = type(module).__name__
    if not hasattr(variables, "keys"):
        raise ModelError(Message("frontends.no_variables", kind=name), hint=Message("frontends.hint.variables"))
    return JaxModel(
        module.apply, variables, name, argument_names(type(module).__call__, 1), module.name or name, ("params",)
    )


def _nnx(nnx: Any, module: Any) -> JaxModel:
    graph, state = nnx.split(module)

    def call(state: Any, *args: Any, **named: Any) -> Any:
        model = nnx.merge(graph, state)
        with _marked(model, nnx.Module):
            return model(*args, **named)

    return JaxModel(call, state, type(module).__name__, argument_names(type(module).__call__, 1))


def _equinox(equinox: Any, module: Any) -> JaxModel:
    arrays, rest = equinox.partition(module, equinox.is_array)

    def call(arrays: Any, *args: Any, **named: Any) -> Any:
        model = equinox.combine(arrays, rest)
        with _marked(model, equinox.Module):
            return model(*args, **named)

    return JaxModel(call, arrays, type(module).__name__, argument_names(type(module).__call__, 1))


def _keras(keras: Any, layer: Any) -> JaxModel:
    name = type(layer).__name__
    if (backend := keras.backend.backend()) != "jax":
        raise ModelError(
            Message("frontends.keras_backend", kind=name, backend=backend), hint=Message("frontends.hint.keras_backend")
        )
    if not layer.built:
        raise ModelError(Message("frontends.keras_unbuilt", kind=name), hint=Message("frontends.hint.keras_unbuilt"))
    root = f"{layer.path}/"
    parts = {part.path.removeprefix(root).replace("/", "."): part for part in layer._flatten_layers() if part.path}
    split = len(layer.trainable_variables)
    values: dict[str, Any] = {}
    for variable in (*layer.trainable_variables, *layer.non_trainable_variables):
        path = variable.path.removeprefix(root)  # names of a model's inner layers need not begin with its own
        values[path if path not in values else f"{path}_{len(values)}"] = variable.value
    names = [*values]

    def call(values: Any, *args: Any, **named: Any) -> Any:
        held = [values[name] for name in names]
        with wrapped_calls(parts | {"": layer}, _scope, [keras.Layer]):
            return layer.stateless_call(held[:split], held[split:], *args, **named)[0]

    return JaxModel(call, values, name, argument_names(type(layer).call, 1))


def _marked(model: Any, kind: type) -> AbstractContextManager[None]:
    """Makes each part of a model push its path as a scope while it runs."""
    return wrapped_calls(dict(_parts(model, kind, "", 0)), _scope)


def _scope(path: str) -> Any:
    return jax().named_scope(f"{MARK}{path}")


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
