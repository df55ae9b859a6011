"""A JAX function as a torch module: traced to a jaxpr, which is walked and run operation by operation in torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text
from sqrtdk.frontends.jax.arrays import held_dtype, is_array, is_key, jax, to_jax, to_torch
from sqrtdk.frontends.jax.models import JaxModel, jax_model
from sqrtdk.frontends.jax.places import Places, line_of_error
from sqrtdk.frontends.jax.walk import walk_jaxpr
from sqrtdk.frontends.layers import number_layers
from sqrtdk.frontends.module import Bound, TracedProgram
from sqrtdk.frontends.source import ArrayFramework, ArraySource, array_module, as_tensors
from sqrtdk.messages import Message, joined

# JAX runs as the program is written: no optimisation keeps digits that a conversion drops.
_AS_WRITTEN = {"xla_allow_excess_precision": False, "xla_backend_optimization_level": 0}
# settings under which a product of float32 arrays has all its digits
_ALL_DIGITS = (None, "float32", "highest")
_DOUBLE = "float64"


def from_jax(function: Any, parameters: Any, *inputs: Any, **named: Any) -> nn.Module:
    """Return a JAX function as a torch module.

    The module computes `function(parameters, *inputs)` with torch's operations, at the lines of the JAX code. The
    leaves of `parameters` are its parameters, by their paths. Its forward takes the inputs as tensors or arrays; for
    inputs of other shapes the function is traced anew. The outputs on these inputs are compared with JAX's own.

    Args:
        function: A JAX function that is called as `function(parameters, *inputs)`; or a module of flax linen, whose
            variables are `parameters`; or a module of flax nnx, of equinox or of Keras, with `parameters` None.
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
    source = JaxSource(jax_model(function, parameters), len(inputs), tuple(named))
    module = array_module(source, inputs, named)
    module.notes = _conventions(source.leaves)
    return module


def _flatten(value: Any) -> tuple[list[Any], Any]:
    leaves, tree = jax().tree.flatten(value, is_leaf=lambda x: isinstance(x, Tensor))
    return leaves, tree


def _paths(model: JaxModel) -> list[str]:
    return [_name(path, model.dropped) for path, _ in jax().tree.flatten_with_path(model.parameters)[0]]


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
    return ".".join(parts)


_JAX = ArrayFramework(
    "JAX", jax, _flatten, lambda tree, leaves: jax().tree.unflatten(tree, leaves), _paths, is_array, to_torch, _kind_of,
    held_dtype, "frontends.hint.runs", "frontends.hint.random",
)  # fmt: skip


class JaxSource(ArraySource):
    """A JAX model that is traced for any shapes of its inputs; see `ArraySource`."""

    model: JaxModel
    framework = _JAX

    def trace(self, bound: Bound, dtypes: Mapping[str, torch.dtype]) -> TracedProgram:
        """Return the program for inputs of these shapes, traced with `jax.make_jaxpr`.

        Args:
            bound: The inputs; only shapes, dtypes and settings are read.
            dtypes: Dtypes of parameters by name, in place of their own.

        Raises:
            ModelError: The model raised while JAX traced it, or uses operations that can't be translated.
        """
        held = [_struct(self.leaves[at], dtypes.get(name)) for name, at in zip(self.names, self.arrays, strict=True)]
        inputs = bound.spec.arrays
        try:
            closed, shapes = jax().make_jaxpr(partial(self.call, bound.spec), return_shape=True)(held, inputs)
        except (*INTERRUPTS, SqrtdkError):
            raise
        except Exception as error:  # the user's function, and JAX while it traces it, may raise anything
            line = line_of_error(error)
            # what JAX says next names our `call`, which the user did not write
            reason = kind_and_text(error).partition(" The error occurred while tracing")[0]
            raise ModelError(
                Message(
                    "frontends.not_traced",
                    framework="JAX",
                    name=self.model.name + (f" ({line})" if line else ""),
                    reason=reason,
                ),
                hint=Message("frontends.hint.traceable"),
            ) from error
        places = Places(self.model.root)
        program, origins = walk_jaxpr(closed, [*self.names, *(None for _ in inputs)], places)
        if not places.scoped:
            program = replace(program, steps=number_layers(program.steps, program.parameters))
        kinds = [held_dtype(shape.dtype) for shape in jax().tree.leaves(shapes)]
        structure = jax().tree.structure(shapes)

        def outputs(results: Sequence[Any]) -> Any:
            return jax().tree.unflatten(structure, as_tensors(results, kinds))

        return TracedProgram(program, outputs, origins)

    def outputs(self, bound: Bound) -> list[Tensor]:
        """Return the leaves of JAX's own output for the inputs of a call."""
        return self.compiled(bound)(bound)

    def compiled(self, bound: Bound) -> Callable[[Bound], list[Tensor]]:
        """Return a function that runs the model in JAX itself, compiled for inputs of these shapes.

        Args:
            bound: Inputs, whose values fix the settings.

        Returns:
            A function that takes the inputs of a call as `bind` returns them, and returns the leaves of the output as
            tensors, in the order of JAX's tree.
        """
        held, arrays = self.held_arrays(), self.input_arrays
        lowered = jax().jit(partial(self.call, bound.spec)).lower(held, arrays(bound))
        program = lowered.compile(compiler_options=_AS_WRITTEN)
        return lambda inputs: [to_torch(leaf) for leaf in jax().tree.leaves(program(held, arrays(inputs)))]

    def held_arrays(self) -> list[Any]:
        """Return the parameters as arrays of JAX, in the order of `names`."""
        leaves = [self.leaves[at] for at in self.arrays]
        return [to_jax(leaf, _struct(leaf, None)) if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def input_arrays(self, bound: Bound) -> list[Any]:
        """Return the inputs of a call as arrays of JAX."""
        return [to_jax(tensor, kind) for tensor, kind in zip(bound.tensors, bound.spec.arrays, strict=True)]


def _conventions(leaves: Sequence[Any]) -> tuple[str, ...]:
    """Return sentences on the settings of JAX that change numbers, and on the dtypes of parameters.

    The precision of matrix products (`jax.default_matmul_precision`) counts on accelerators: sqrtdk multiplies with all
    digits, as JAX does on a CPU. Without `jax_enable_x64` JAX holds arrays of float64 in float32.

    Args:
        leaves: the leaves of the tree of parameters.
    """
    notes: list[str] = []
    precision = jax().config.jax_default_matmul_precision
    if precision not in _ALL_DIGITS:
        notes.append(Message("frontends.note.precision", precision=str(precision)))
    names = [str(leaf.dtype).removeprefix("torch.") for leaf in leaves if is_array(leaf) and not is_key(leaf.dtype)]
    kinds = Counter(name for name in names if "float" in name)
    is_wide = bool(jax().config.jax_enable_x64)
    if is_wide:
        notes.append(Message("frontends.note.x64"))
    elif kinds[_DOUBLE]:
        notes.append(Message("frontends.note.narrowed", count=kinds.pop(_DOUBLE), name=_DOUBLE))
    if len(kinds) > 1:
        listed = [Message("frontends.note.of_dtype", count=count, dtype=dtype) for dtype, count in kinds.most_common()]
        notes.append(Message("frontends.note.dtypes", dtypes=joined(listed, "comma")))
    return tuple(notes)
