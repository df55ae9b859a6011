"""A JAX function as a torch module: traced to a jaxpr, which is walked and run operation by operation in torch."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS, InvalidValueError, ModelError, SqrtdkError, kind_and_text
from sqrtdk.frontends.jax.arrays import held_dtype, is_array, is_key, jax, to_jax, to_torch
from sqrtdk.frontends.jax.models import JaxModel, jax_model
from sqrtdk.frontends.jax.places import Places
from sqrtdk.frontends.jax.walk import walk_jaxpr
from sqrtdk.frontends.judge import beyond_rounding
from sqrtdk.frontends.layers import number_layers
from sqrtdk.frontends.module import Bound, ForeignModule, TracedProgram, foreign_module
from sqrtdk.messages import Message

# JAX runs as the program is written: no optimisation keeps digits that a conversion drops.
_AS_WRITTEN = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}


def from_jax(function: Any, parameters: Any, *inputs: Any, **named: Any) -> nn.Module:
    """Return a JAX function as a torch module.

    The module computes `function(parameters, *inputs)` with torch's operations, at the lines of the JAX code. The
    leaves of `parameters` are its parameters, by their paths. Its forward takes the inputs as tensors or arrays; for
    inputs of other shapes the function is traced anew. The outputs on these inputs are compared with JAX's own.

    Args:
        function: A JAX function that is called as `function(parameters, *inputs)`; or a module of flax linen, whose
            variables are `parameters`; or a module of flax nnx or of equinox, with `parameters` None.
        parameters: A tree of arrays: dicts, lists, states of flax, dataclasses.
        inputs: Arrays or trees of them. Numbers, strings and None are settings that the function is traced with.
        named: Inputs by name.

    Returns:
        The module, in eval mode, whose outputs nest as those of the function, with tensors in place of arrays.

    Raises:
        MissingExtraError: JAX is not installed, or too old.
        InvalidTypeError: `function` is no function and no module.
        ModelError: JAX can't trace the function, it has a primitive that is not read, or it draws random numbers that
            are not made from a key; or our outputs are not JAX's.

    Example:
        The page "Port from JAX" (docs/en/jax.md) has one that runs.
    """
    model = jax_model(function, parameters)
    source = JaxSource(model, len(inputs), tuple(named))
    bound = source.bind(inputs, named)
    module, _ = foreign_module(source, bound, model.name)
    _judge(module, source, bound)
    return module


@dataclass(frozen=True, slots=True)
class _Spec:
    """How the inputs of a call nest: the tree, and its leaves: a type of JAX for a tensor, else the leaf itself."""

    tree: Any
    leaves: tuple[Any, ...]


class _Setting:
    """A leaf of the inputs that is no array."""

    def __init__(self, value: Any) -> None:
        self.value = value


class JaxSource:
    """A JAX model that is traced for any shapes of its inputs.

    Args:
        model: How the model is called, and its parameters.
        count: Number of inputs by position.
        named: Names of the inputs that are given by name.

    Attributes:
        signature: Names of the inputs, of which those of `named` come last.
        by_name: The names in `named`.
        leaves: All leaves of the tree of parameters.
        arrays: Indices in `leaves` of those that are arrays.
        names: For each of these, the name of the parameter, its path joined by dots.
        tensors: The parameters by name.

    Raises:
        InvalidValueError: An input is given both by position and by name.
    """

    def __init__(self, model: JaxModel, count: int, named: tuple[str, ...]) -> None:
        self.model = model
        names = [*model.inputs[:count], *(f"input_{at}" for at in range(len(model.inputs[:count]), count))]
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        if twice := set(names) & set(named):
            raise InvalidValueError(Message("frontends.twice", name=min(twice)), hint=Message("frontends.hint.twice"))
        self.signature = inspect.Signature([inspect.Parameter(name, kind) for name in (*names, *named)])
        self.by_name = frozenset(named)
        leaves, self.tree = jax().tree.flatten(model.parameters)
        paths = [path for path, _ in jax().tree.flatten_with_path(model.parameters)[0]]
        self.leaves = leaves
        self.arrays = [at for at, leaf in enumerate(leaves) if is_array(leaf)]
        self.names = _unique([_name(paths[at], model.dropped) for at in self.arrays])
        self.tensors: Mapping[str, Tensor] = {
            name: to_torch(leaves[at]) for name, at in zip(self.names, self.arrays, strict=True)
        }
        self._examples: tuple[Any, ...] = ()

    def bind(self, args: tuple[Any, ...], named: Mapping[str, Any]) -> Bound:
        """Return the inputs of a call: their arrays as tensors, in the order of JAX's tree, and how they nest.

        Args:
            args: Inputs by position.
            named: Inputs by name.

        Raises:
            TypeError: They do not fit the signature.
        """
        bound = self.signature.bind(*args, **named)
        leaves, tree = jax().tree.flatten(dict(bound.arguments), is_leaf=lambda x: isinstance(x, Tensor))
        tensors, dtypes = [], []
        kinds: list[Any] = []
        for at, leaf in enumerate(leaves):
            if not is_array(leaf):
                kinds.append(_Setting(leaf))
                continue
            example = self._examples[at] if at < len(self._examples) else None
            kind, tensor = _kind_of(leaf, example)
            kinds.append(kind)
            tensors.append(tensor)
            dtypes.append(held_dtype(kind.dtype))
        self._examples = self._examples or tuple(kinds)
        key = (tree, *((k.shape, str(k.dtype)) if hasattr(k, "shape") else _hashed(k.value) for k in kinds))
        return Bound(tuple(tensors), tuple(dtypes), key, _Spec(tree, tuple(kinds)))

    def trace(self, bound: Bound, dtypes: Mapping[str, torch.dtype]) -> TracedProgram:
        """Return the program for inputs of these shapes, traced with `jax.make_jaxpr`.

        Args:
            bound: The inputs; only shapes, dtypes and settings are read.
            dtypes: Dtypes of parameters by name, in place of their own.

        Raises:
            ModelError: The model raised while JAX traced it, or uses operations that can't be translated.
        """
        held = [_struct(self.leaves[at], dtypes.get(name)) for name, at in zip(self.names, self.arrays, strict=True)]
        inputs = [leaf for leaf in bound.spec.leaves if not isinstance(leaf, _Setting)]
        try:
            closed, shapes = jax().make_jaxpr(self.flat(bound.spec), return_shape=True)(held, inputs)
        except (*INTERRUPTS, SqrtdkError):
            raise
        except Exception as error:  # the user's function, and JAX while it traces it, may raise anything
            raise ModelError(
                Message("frontends.not_traced", name=self.model.name, reason=kind_and_text(error)),
                hint=Message("frontends.hint.traceable"),
            ) from error
        places = Places(self.model.root)
        program, origins = walk_jaxpr(closed, [*self.names, *(None for _ in inputs)], places)
        if not places.scoped:
            program = replace(program, steps=number_layers(program.steps, program.parameters))
        kinds = [held_dtype(shape.dtype) for shape in jax().tree.leaves(shapes)]
        structure = jax().tree.structure(shapes)

        def outputs(results: Sequence[Any]) -> Any:
            made = [value if isinstance(value, Tensor) else torch.tensor(value, dtype=kind)
                    for value, kind in zip(results, kinds, strict=True)]  # fmt: skip
            return jax().tree.unflatten(structure, made)

        return TracedProgram(program, outputs, origins)

    def flat(self, spec: _Spec) -> Any:
        """Return the model as a function `flat(held, inputs)` of two lists of arrays, which JAX can trace.

        `held` are the parameters in the order of `names`, and `inputs` the arrays of a call. Its other inputs are
        fixed to those in `spec`, which is `Bound.spec` of a call.
        """

        def flat(held: list[Any], inputs: list[Any]) -> Any:
            leaves, given = list(self.leaves), iter(inputs)
            for at, value in zip(self.arrays, held, strict=True):
                leaves[at] = value
            filled = [leaf.value if isinstance(leaf, _Setting) else next(given) for leaf in spec.leaves]
            arguments = jax().tree.unflatten(spec.tree, filled)
            named = {name: arguments.pop(name) for name in self.by_name}
            ordered = [arguments[name] for name in self.signature.parameters if name in arguments]
            return self.model.call(jax().tree.unflatten(self.tree, leaves), *ordered, **named)

        return flat

    def compiled(self, bound: Bound) -> Callable[[Bound], list[Tensor]]:
        """Return a function that runs the model in JAX itself, compiled for inputs of these shapes.

        Args:
            bound: Inputs, whose values fix the settings.

        Returns:
            A function that takes the inputs of a call as `bind` returns them, and returns the leaves of the output as
            tensors, in the order of JAX's tree.
        """
        leaves = [self.leaves[at] for at in self.arrays]
        held = [to_jax(leaf, _struct(leaf, None)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

        def arrays(inputs: Bound) -> list[Any]:
            kinds = [leaf for leaf in inputs.spec.leaves if not isinstance(leaf, _Setting)]
            return [to_jax(tensor, kind) for tensor, kind in zip(inputs.tensors, kinds, strict=True)]

        program = jax().jit(self.flat(bound.spec)).lower(held, arrays(bound)).compile(compiler_options=_AS_WRITTEN)
        return lambda inputs: [to_torch(leaf) for leaf in jax().tree.leaves(program(held, arrays(inputs)))]


def tensors_of_inputs(inputs: Any) -> Any:
    """Return a tree of inputs with a tensor in place of each array; numbers, strings and None stay as they are."""
    leaf = lambda x: to_torch(x) if is_array(x) and not isinstance(x, Tensor) else x  # noqa: E731
    return jax().tree.map(leaf, inputs, is_leaf=lambda x: isinstance(x, Tensor))


def _judge(module: ForeignModule, source: JaxSource, bound: Bound) -> None:
    """Raises a `ModelError` unless the module's outputs are JAX's up to rounding."""
    try:
        theirs = source.compiled(bound)(bound)
    except INTERRUPTS:
        raise
    except Exception as error:  # the device may lack what the function needs
        raise ModelError(
            Message("frontends.not_run", name=source.model.name, reason=kind_and_text(error)),
            hint=Message("frontends.hint.runs"),
        ) from error
    with torch.no_grad():
        ours = _outputs(module, bound)
        exact = _outputs(copy.deepcopy(module).double(), bound, wide=True)
    for at, (right, made, wide) in enumerate(zip(theirs, ours, exact, strict=True)):
        if right.is_floating_point() or right.is_complex():
            off = beyond_rounding(right, made, wide)
        else:
            off = None if len(theirs) > 1 or torch.equal(right.long(), made.long()) else float("nan")
        if off is None:
            continue
        again = source.compiled(bound)(bound)[at]
        if not torch.equal(again.nan_to_num() if again.is_floating_point() else again,
                           right.nan_to_num() if right.is_floating_point() else right):  # fmt: skip
            raise ModelError(Message("frontends.random", name=source.model.name), hint=Message("frontends.hint.random"))
        raise ModelError(
            Message("frontends.other_outputs", name=source.model.name, gap=f"{off:.3g}", version=jax().__version__),
            hint=Message("frontends.hint.report"),
        )


def _outputs(module: nn.Module, bound: Bound, *, wide: bool = False) -> list[Tensor]:
    tensors = iter(bound.tensors)
    leaves = []
    for leaf in bound.spec.leaves:
        if isinstance(leaf, _Setting):
            leaves.append(leaf.value)
        else:
            tensor = next(tensors)
            leaves.append(tensor.double() if wide and tensor.is_floating_point() else tensor)
    made: list[Tensor] = jax().tree.leaves(module(**jax().tree.unflatten(bound.spec.tree, leaves)))
    return made


def _kind_of(leaf: Any, example: Any) -> tuple[Any, Tensor]:
    """Return the type that JAX has for an input, and the input as a tensor.

    A tensor of whole numbers may stand for unsigned ones, or for a key, if the first inputs had these. One in a wider
    dtype than theirs is a run without rounding.
    """
    struct = jax().ShapeDtypeStruct
    if not isinstance(leaf, Tensor):
        dtype = leaf.dtype if is_key(leaf.dtype) else jax().dtypes.canonicalize_dtype(leaf.dtype)
        return struct(leaf.shape, dtype), to_torch(leaf)
    shape, dtype = tuple(leaf.shape), getattr(example, "dtype", None)
    if dtype is not None and is_key(dtype):
        return struct(shape[: len(shape) - 1], dtype), leaf
    name = str(leaf.dtype).removeprefix("torch.")
    if dtype is not None and held_dtype(dtype) is leaf.dtype:
        return struct(shape, dtype), leaf
    if dtype is not None and leaf.is_floating_point() and held_dtype(dtype).is_floating_point and (
            held_dtype(dtype).itemsize < leaf.dtype.itemsize):  # fmt: skip
        return struct(shape, dtype), leaf
    own = jax().numpy.dtype("bfloat16" if name == "bfloat16" else name)
    return struct(shape, jax().dtypes.canonicalize_dtype(own)), leaf


def _struct(leaf: Any, dtype: torch.dtype | None) -> Any:
    if isinstance(leaf, Tensor):
        own: Any = jax().numpy.dtype(str(leaf.dtype).removeprefix("torch."))
    else:
        own = leaf.dtype
    if dtype is not None:
        own = jax().numpy.dtype(str(dtype).removeprefix("torch."))
    return jax().ShapeDtypeStruct(tuple(leaf.shape), own if is_key(own) else jax().dtypes.canonicalize_dtype(own))


def _hashed(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return id(value)
    return value


def _name(path: Any, dropped: Sequence[str]) -> str:
    """Return the name of a parameter: its path, with dots; haiku's "linear/w" has slashes."""
    parts: list[str] = []
    for key in path:
        text = str(next((getattr(key, kind) for kind in ("key", "idx", "name") if hasattr(key, kind)), key))
        parts += [part.replace(".", "_") for part in text.split("/") if part and part != "~"]
    while parts and parts[0] in dropped and len(parts) > 1:
        parts.pop(0)
    if len(parts) > 1 and parts[-1] == "value":  # a variable of nnx
        parts.pop()
    return ".".join(parts) or "value"


def _unique(names: Sequence[str]) -> list[str]:
    made: list[str] = []
    for name in names:
        made.append(name if name not in made else f"{name}_{len(made)}")
    return made
