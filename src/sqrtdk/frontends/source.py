"""A model of an array framework as the source of a torch module: what JAX and MLX have in common.

    attention(params, x, cache, causal=True)      a tree of parameters, then a tree of inputs

The leaves of both trees that are arrays become tensors. All other leaves are settings, which the program is traced
with: a call with other settings is another program.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sqrtdk.errors import INTERRUPTS, InvalidTypeError, ModelError, kind_and_text
from sqrtdk.frontends.judge import judge_outputs
from sqrtdk.frontends.module import Bound, ForeignModule, TracedProgram, foreign_module
from sqrtdk.frontends.names import argument_names, input_signature, setting_key, unique_names
from sqrtdk.messages import Message


@dataclass(frozen=True, slots=True, eq=False)
class ArrayModel:
    """A model as its framework calls it.

    Attributes:
        call: Called with the tree of parameters and the inputs.
        parameters: That tree.
        name: Name of the function, or class of the module.
        inputs: Names of its arguments behind the parameters, without those of `*args`.
    """

    call: Callable[..., Any]
    parameters: Any
    name: str
    inputs: tuple[str, ...]


def function_names(function: Any, framework: str, hint: str) -> tuple[str, tuple[str, ...]]:
    """Return the name of a function of parameters and inputs, and the names of its arguments behind the parameters.

    Args:
        function: The function.
        framework: Name of the framework, for the error.
        hint: Id of the error's hint.

    Raises:
        InvalidTypeError: It is no function.
    """
    if not callable(function) or isinstance(function, type):
        kind = function.__name__ if isinstance(function, type) else type(function).__name__
        raise InvalidTypeError(Message("frontends.no_function", framework=framework, kind=kind), hint=Message(hint))
    return getattr(function, "__name__", type(function).__name__), argument_names(function, 1)


@dataclass(frozen=True, slots=True)
class Setting:
    """An input that is no array: a number, a string, None."""

    value: Any


@dataclass(frozen=True, slots=True, eq=False)
class InputTree:
    """How the inputs of a call nest.

    Attributes:
        tree: The framework's own note of it.
        leaves: Shape and dtype of each array, with the attributes `shape` and `dtype`; a `Setting` for all else.
    """

    tree: Any
    leaves: tuple[Any, ...]

    @property
    def arrays(self) -> list[Any]:
        """Shapes and dtypes of the arrays."""
        return [leaf for leaf in self.leaves if not isinstance(leaf, Setting)]

    def filled(self, arrays: Iterable[Any]) -> list[Any]:
        """Return the leaves with these arrays, and with the values of the settings."""
        given = iter(arrays)
        return [leaf.value if isinstance(leaf, Setting) else next(given) for leaf in self.leaves]


@dataclass(frozen=True, slots=True, eq=False)
class ArrayFramework:
    """What an array framework does in its own way.

    Attributes:
        name: Its name.
        package: Returns its package, which has `__version__`.
        flatten: Returns the leaves of a tree, and how they nest, equal for two trees that nest in the same way.
        unflatten: Makes a tree of what `flatten` returned second, and of leaves.
        paths: Returns the paths of all leaves of a model's parameters, with dots.
        is_array: Whether a leaf is an array of the framework or of NumPy, or a tensor.
        as_tensor: Makes a tensor of such a leaf.
        kind_of: Returns shape and dtype that the framework has for an input, and the input as a tensor. Its second
            argument is the shape and dtype of the first call's, or None.
        held: Returns the dtype of the tensors that stand for arrays of a dtype.
        run_hint: Id of the hint for a model that doesn't run.
        random_hint: Id of the hint for a model whose outputs differ from run to run.
    """

    name: str
    package: Callable[[], Any]
    flatten: Callable[[Any], tuple[list[Any], Any]]
    unflatten: Callable[[Any, Sequence[Any]], Any]
    paths: Callable[[Any], list[str]]
    is_array: Callable[[Any], bool]
    as_tensor: Callable[[Any], Tensor]
    kind_of: Callable[[Any, Any], tuple[Any, Tensor]]
    held: Callable[[Any], torch.dtype]
    run_hint: str
    random_hint: str


class ArraySource(ABC):
    """A model of an array framework that is traced for any shapes of its inputs.

    Args:
        model: How the model is called, and its parameters.
        count: Number of inputs by position.
        named: Names of the inputs that are given by name.

    Attributes:
        framework: The framework's functions.
        signature: Names of the inputs, of which those of `named` come last.
        by_name: The names in `named`.
        leaves: All leaves of the tree of parameters.
        arrays: Indices in `leaves` of those that are arrays.
        names: For each of these, the name of the parameter, its path joined by dots.
        tensors: The parameters by name.

    Raises:
        InvalidValueError: An input is given both by position and by name.
    """

    model: Any
    framework: ClassVar[ArrayFramework]

    def __init__(self, model: ArrayModel, count: int, named: tuple[str, ...]) -> None:
        self.model = model
        self.signature = input_signature(model.inputs, count, named)
        self.by_name = frozenset(named)
        self.leaves, self.tree = self.framework.flatten(model.parameters)
        paths = self.framework.paths(model)
        self.arrays = [at for at, leaf in enumerate(self.leaves) if self.framework.is_array(leaf)]
        self.names = unique_names([paths[at] or "value" for at in self.arrays])
        tensors = (self.framework.as_tensor(self.leaves[at]) for at in self.arrays)
        self.tensors: Mapping[str, Tensor] = dict(zip(self.names, tensors, strict=True))
        self._examples: tuple[Any, ...] = ()

    @abstractmethod
    def trace(self, bound: Bound, dtypes: Mapping[str, torch.dtype]) -> TracedProgram:
        """Return the program for inputs of these shapes; see `Source.trace`."""

    @abstractmethod
    def outputs(self, bound: Bound) -> list[Tensor]:
        """Return the leaves of the framework's own output for the inputs of a call."""

    def tensor(self, name: str, indices: tuple[int, ...]) -> Tensor:
        """Return a copy of a parameter, or of a layer of it; see `Source.tensor`."""
        return self.tensors[name][indices].clone()

    def bind(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Bound:
        """Return the inputs of a call: their arrays as tensors, in the order of the tree, and how they nest.

        Args:
            args: Inputs by position.
            named: Inputs by name.

        Raises:
            TypeError: They do not fit the signature.
        """
        leaves, tree = self.framework.flatten(dict(self.signature.bind(*args, **named).arguments))
        tensors: list[Tensor] = []
        kinds: list[Any] = []
        for at, leaf in enumerate(leaves):
            if not self.framework.is_array(leaf):
                kinds.append(Setting(leaf))
                continue
            example = self._examples[at] if at < len(self._examples) else None
            kind, tensor = self.framework.kind_of(leaf, None if isinstance(example, Setting) else example)
            kinds.append(kind)
            tensors.append(tensor)
        self._examples = self._examples or tuple(kinds)
        inputs = InputTree(tree, tuple(kinds))
        key = (tree, *(setting_key(k.value) if isinstance(k, Setting) else (k.shape, str(k.dtype)) for k in kinds))
        return Bound(tuple(tensors), tuple(self.framework.held(k.dtype) for k in inputs.arrays), key, inputs)

    def call(self, inputs: InputTree, held: Sequence[Any], arrays: Sequence[Any]) -> Any:
        """Return the model's outputs.

        Args:
            inputs: `Bound.spec` of a call, which has the settings.
            held: The parameters in the order of `names`, as arrays of the framework.
            arrays: The arrays among the inputs.
        """
        leaves = list(self.leaves)
        for at, value in zip(self.arrays, held, strict=True):
            leaves[at] = value
        arguments = self.framework.unflatten(inputs.tree, inputs.filled(arrays))
        named = {name: arguments.pop(name) for name in self.by_name}
        ordered = [arguments[name] for name in self.signature.parameters if name in arguments]
        return self.model.call(self.framework.unflatten(self.tree, leaves), *ordered, **named)


def as_tensors(results: Sequence[Any], kinds: Sequence[torch.dtype]) -> list[Tensor]:
    """Return a program's outputs as tensors: an output that is a number has one of these dtypes."""
    return [value if isinstance(value, Tensor) else torch.tensor(value, dtype=kind)
            for value, kind in zip(results, kinds, strict=True)]  # fmt: skip


def array_module(source: ArraySource, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> ForeignModule:
    """Return a module of a source, whose outputs for these inputs are the framework's.

    Args:
        source: The model.
        inputs: Its inputs by position.
        named: Its inputs by name.

    Raises:
        ModelError: The model can't be traced or run, or more than rounding differs.
    """
    framework, name = source.framework, source.model.name
    version = f"{framework.name} {framework.package().__version__}"
    bound = source.bind(inputs, named)
    module, _ = foreign_module(source, bound, name)
    module.framework = version
    leaves, tree = framework.flatten(dict(source.signature.bind(*inputs, **named).arguments))
    arrays = (framework.is_array(leaf) and not isinstance(leaf, Tensor) for leaf in leaves)
    tensors = [framework.as_tensor(leaf) if array else leaf for leaf, array in zip(leaves, arrays, strict=True)]
    module.example = framework.unflatten(tree, tensors)
    try:
        theirs = source.outputs(bound)
    except INTERRUPTS:
        raise
    except Exception as error:  # the device may lack what the function needs
        raise ModelError(
            Message("frontends.not_run", framework=framework.name, name=name, reason=kind_and_text(error)),
            hint=Message(framework.run_hint),
        ) from error
    with torch.no_grad():
        ours = _outputs(module, framework, bound)
        exact = _outputs(copy.deepcopy(module).double(), framework, bound, wide=True)
    judge_outputs(name, version, theirs, ours, exact, lambda: source.outputs(bound), Message(framework.random_hint))
    return module


def _outputs(module: ForeignModule, framework: ArrayFramework, bound: Bound, *, wide: bool = False) -> list[Tensor]:
    tensors = (x.double() if wide and x.is_floating_point() else x for x in bound.tensors)
    made = module(**framework.unflatten(bound.spec.tree, bound.spec.filled(tensors)))
    return [leaf for leaf in framework.flatten(made)[0] if isinstance(leaf, Tensor)]
