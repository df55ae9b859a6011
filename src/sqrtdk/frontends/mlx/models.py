"""What may stand in place of an MLX function, as a function of parameters and inputs.

function, parameters           function(parameters, *inputs); a tree of arrays
function, model                function(model, *inputs), as loss functions of MLX are; the model's parameters
model, None                    model(*inputs), or one of its methods
model, parameters              the same with other numbers
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqrtdk.frontends.names import argument_names
from sqrtdk.frontends.source import ArrayModel, function_names


@dataclass(frozen=True, slots=True, eq=False)
class MlxModel(ArrayModel):
    """A model as MLX calls it.

    Attributes:
        modules: the modules by path; {} for a function.
    """

    modules: Mapping[str, Any] = field(default_factory=dict)

    @property
    def classes(self) -> dict[str, str]:
        """Class names of the modules by path."""
        return {path: type(module).__name__ for path, module in self.modules.items()}

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """The eps of each norm, by its path.

        Other attributes, as a scale, would look as if they had no effect: the program does not read them again.
        """
        parts = ((path, getattr(module, "eps", None)) for path, module in self.modules.items())
        return {path: {"eps": eps} for path, eps in parts if isinstance(eps, float)}


def mlx_model(function: Any, parameters: Any) -> MlxModel:
    """Return a function, or a module of mlx.nn, as a model that is called with parameters and inputs.

    Args:
        function: A function of parameters and inputs, a module, or a method of one.
        parameters: A tree of arrays, or a module; None for a module's own.

    Raises:
        InvalidTypeError: It is neither a function nor a module.
    """
    owner = getattr(function, "__self__", None)
    if _is_module(function) or _is_module(owner):
        module = function if owner is None or not _is_module(owner) else owner
        run = type(module).__call__ if module is function else function.__func__
        name = type(module).__name__
        return _of_module(module, parameters, function, name, argument_names(run, 1))
    name, names = function_names(function, "MLX", "frontends.hint.mlx_function")
    if _is_module(parameters):
        return _of_module(parameters, None, lambda *args, **named: function(parameters, *args, **named), name, names)
    return MlxModel(function, parameters, name, names)


def _is_module(value: Any) -> bool:
    nn = sys.modules.get("mlx.nn")  # a module of it can't be without it
    return nn is not None and isinstance(value, nn.Module)


def _of_module(module: Any, parameters: Any, run: Any, name: str, names: tuple[str, ...]) -> MlxModel:
    own = module.parameters()

    def call(held: Any, *args: Any, **named: Any) -> Any:
        with _updated(module, held, own):
            return run(*args, **named)

    return MlxModel(call, own if parameters is None else parameters, name, names, dict(module.named_modules()))


@contextmanager
def _updated(module: Any, parameters: Any, own: Any) -> Iterator[None]:
    """Gives a module other parameters for a while."""
    module.update(parameters)
    try:
        yield
    finally:
        module.update(own)
