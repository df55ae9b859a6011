"""Builds a model from the user's own code: `package.module:factory`.

A factory returns a torch module, with or without inputs; or `(function, parameters, inputs)` with a function of JAX or
MLX, or a module of one of their libraries, in its place.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text
from sqrtdk.frontends.frameworks import framework_of, uses_framework
from sqrtdk.messages import Message
from sqrtdk.models.alone import alone
from sqrtdk.models.names import file_as_module
from sqrtdk.models.records import Inputs


def imported_target(model: str) -> Any:
    """Import `package.module` and return what `package.module:name` names, which is not called.

    The current directory is importable, as with `python -m`.

    Raises:
        ModelError: There is no such module or name (the text may name a file instead), or importing it raises.
    """
    module_name, _, attribute = model.partition(":")
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
        importlib.invalidate_caches()
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # The module itself is missing, and not one that it imports.
        if error.name and (module_name == error.name or module_name.startswith(error.name + ".")):
            raise ModelError(
                Message("errors.model.no_module", name=repr(error.name), model=repr(model)),
                hint=file_as_module(model) or Message("errors.hint.run_where"),
            ) from error
        raise _broken("errors.model.importing_raised", model, error) from error
    except INTERRUPTS:
        raise
    except BaseException as error:  # a user's module may raise anything, SystemExit included
        raise _broken("errors.model.importing_raised", model, error) from error
    for part in attribute.split("."):
        if not hasattr(target, part):
            raise ModelError(
                Message("errors.model.no_attribute", module=repr(module_name), attribute=repr(attribute)),
                hint=Message("errors.hint.factory_signature"),
            )
        target = getattr(target, part)
    return target


@alone()
def call_factory(
    model: str | Callable[[], Any], *, static: bool = False, seed: int = 0
) -> tuple[nn.Module, Inputs | None]:
    """Import `package.module`, call `factory()`, and return the module, and the inputs if it gives any.

    A function is called as it is.

    A function of JAX or MLX with its parameters and inputs becomes a module by `sqrtdk.frontends.from_jax` or
    `from_mlx`.

    The current directory is importable, as with `python -m`. With `static` the factory runs under
    `torch.device("meta")`. The random state is seeded before the call and restored afterwards. If the code forks, the
    child process ends when it returns here.

    Raises:
        ModelError: There is no such module or name (the text may name a file instead), the factory raises, or it
            returns neither a module nor (module, inputs) nor (function, parameters, inputs), or one with parts of
            both JAX and MLX or of neither; or see `from_jax` and `from_mlx`.
        MissingExtraError: It returns a function of a framework that is missing.
    """
    name = model if isinstance(model, str) else f"{model.__module__}:{getattr(model, '__qualname__', '')}"
    try:
        target = imported_target(model) if isinstance(model, str) else model
        if not callable(target) or isinstance(target, nn.Module):
            result: Any = target
        else:
            with torch.random.fork_rng(devices=[]), torch.device("meta") if static else contextlib.nullcontext():
                torch.manual_seed(seed)
                result = target()
        return _unpack(name, result)
    except (*INTERRUPTS, SqrtdkError):
        raise
    except BaseException as error:  # a user's factory may raise anything
        raise _broken("errors.model.calling_raised", name, error) from error


def _unpack(model: str, result: Any) -> tuple[nn.Module, Inputs | None]:
    """Return the module and the inputs that a factory returned.

    Raises:
        ModelError: It returned something else.
    """
    if isinstance(result, nn.Module):
        return result, None
    if isinstance(result, (tuple, list)) and len(result) == 3 and callable(result[0]) and not _is_torch(result[0]):
        return _foreign(model, *result)
    if isinstance(result, (tuple, list)) and len(result) == 2 and isinstance(result[0], nn.Module):
        module, inputs = result
        if isinstance(inputs, torch.Tensor):
            return module, (inputs,)
        if isinstance(inputs, list):
            return module, tuple(inputs)
        if isinstance(inputs, tuple) or (isinstance(inputs, dict) and all(isinstance(k, str) for k in inputs)):
            return module, inputs
        returned = Message("errors.model.gave_inputs", kind=type(inputs).__name__)
    else:
        returned = Message("errors.model.gave_object", kind=type(result).__name__)
    raise ModelError(
        Message("errors.model.gave", model=repr(model), returned=returned),
        hint=Message(f"errors.hint.{_hint_of(result)}"),
    )


def _hint_of(result: Any) -> str:
    """Return the name of the hint for what a factory returned in place of a module."""
    first = next(iter(result), None) if isinstance(result, (tuple, list)) else result
    if first is None:
        return "return_module_not_none"
    # `return model`, or `return model, (tokens,)`, with a model of flax or mlx.nn
    return "return_trio" if uses_framework(result) else "return_module"


def _is_torch(value: Any) -> bool:
    return isinstance(value, nn.Module)


def _foreign(model: str, function: Any, parameters: Any, inputs: Any) -> tuple[nn.Module, Inputs]:
    """Return a function of JAX or MLX as a module, and its inputs as tensors."""
    if hasattr(inputs, "shape"):
        inputs = (inputs,)
    if not isinstance(inputs, tuple | list | dict) or (
        isinstance(inputs, dict) and not all(isinstance(k, str) for k in inputs)
    ):
        raise ModelError(
            Message("frontends.no_trio", model=repr(model), kind=type(inputs).__name__),
            hint=Message("frontends.hint.trio"),
        )
    convert: Any
    if framework_of(model, function, parameters, inputs) == "jax":
        from sqrtdk.frontends.jax.front import from_jax as convert
    else:
        from sqrtdk.frontends.mlx.front import from_mlx as convert
    if isinstance(inputs, dict):
        module = convert(function, parameters, **inputs)
        return module, dict(module.example)
    module = convert(function, parameters, *inputs)
    return module, tuple(module.example[name] for name in inspect.signature(module.forward).parameters)


def _broken(id: str, model: str, error: BaseException) -> ModelError:
    return ModelError(
        Message(id, model=repr(model), reason=kind_and_text(error)),
        hint=Message("errors.hint.run_in_python"),
    )
