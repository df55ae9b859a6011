"""An MLX function as a torch module: its graph is walked and run operation by operation in torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS, ModelError, SqrtdkError, kind_and_text
from sqrtdk.frontends.arrays import DTYPES_OF_BOTH
from sqrtdk.frontends.layers import number_layers
from sqrtdk.frontends.mlx.arrays import dtype_name, holds_numbers, mlx, mlx_dtype, tensor_from_mlx, to_mlx
from sqrtdk.frontends.mlx.models import MlxModel, mlx_model
from sqrtdk.frontends.mlx.places import NOT_EXPORTED, Marks, marked, unread_calls
from sqrtdk.frontends.mlx.trees import flatten, unflatten
from sqrtdk.frontends.mlx.walk import MLX_OPERATIONS, walk_graph
from sqrtdk.frontends.module import Bound, TracedProgram
from sqrtdk.frontends.names import refuse_unread
from sqrtdk.frontends.source import ArrayFramework, ArraySource, array_module, as_tensors
from sqrtdk.messages import Message


def from_mlx(function: Any, parameters: Any, *inputs: Any, **named: Any) -> nn.Module:
    """Return an MLX function or module as a torch module.

    The module computes `function(parameters, *inputs)` with torch's operations, at the lines of the MLX code. The
    parameters keep their paths. Its forward takes the inputs as tensors or arrays; for inputs of other shapes the
    function is traced anew. The outputs on these inputs are compared with MLX's own.

    Args:
        function: A function that is called as `function(parameters, *inputs)`; or a module of mlx.nn, or a method of
            it, with `parameters` None for its own.
        parameters: A tree of arrays, or a module that the function takes as its first argument.
        inputs: Arrays or trees of them; a cache is one. Numbers, strings and None are settings that the function is
            traced with.
        named: Inputs by name.

    Returns:
        The module, in eval mode, whose outputs nest as those of the function, with tensors in place of arrays.

    Raises:
        MissingExtraError: MLX is not installed, or too old.
        InvalidTypeError: `function` is no function and no module.
        ModelError: MLX can't trace the function, it has a primitive that is not read, or it draws random numbers that
            are not made from a key; or our outputs are not MLX's.

    Example:
        The page "Port to MLX" (docs/en/mlx.md) has one that runs.
    """
    mlx()  # before the arguments are looked at: nothing can be one of MLX without it
    return array_module(MlxSource(mlx_model(function, parameters), len(inputs), tuple(named)), inputs, named)


@dataclass(frozen=True, slots=True)
class MlxKind:
    """Shape and dtype that MLX has for an input."""

    shape: tuple[int, ...]
    dtype: str


def _kind_of(leaf: Any, example: MlxKind | None) -> tuple[MlxKind, Tensor]:
    """Return shape and dtype that MLX has for an input, and the input as a tensor.

    A tensor takes the dtype of the first inputs where it is of their kind: ids in int64 those in int32, and a run
    without rounding is one in float64.
    """
    if isinstance(leaf, mlx().array):
        return MlxKind(tuple(leaf.shape), dtype_name(leaf.dtype)), tensor_from_mlx(leaf)
    tensor = leaf if isinstance(leaf, Tensor) else tensor_from_mlx(leaf)
    own = _own_dtype(leaf)
    if example is not None:
        first = DTYPES_OF_BOTH[example.dtype]
        whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype is torch.bool)
        wider = tensor.is_floating_point() and first.is_floating_point and first.itemsize < tensor.dtype.itemsize
        if first is tensor.dtype or wider or (whole and not first.is_floating_point and first is not torch.bool):
            own = example.dtype
    return MlxKind(tuple(tensor.shape), own), tensor


_MLX = ArrayFramework(
    "MLX", mlx, lambda value: flatten(value)[::2], unflatten, lambda model: flatten(model.parameters)[1], holds_numbers,
    lambda leaf: leaf if isinstance(leaf, Tensor) else tensor_from_mlx(leaf), _kind_of, DTYPES_OF_BOTH.__getitem__,
    "frontends.hint.mlx_runs", "frontends.hint.mlx_random",
)  # fmt: skip


class MlxSource(ArraySource):
    """An MLX model that is traced for any shapes of its inputs; see `ArraySource`."""

    model: MlxModel
    framework = _MLX

    def trace(self, bound: Bound, dtypes: Mapping[str, torch.dtype]) -> TracedProgram:
        """Return the program for inputs of these shapes, traced with `mx.export_function`.

        Args:
            bound: The inputs; only shapes, dtypes and settings are read.
            dtypes: Dtypes of parameters by name, in place of their own.

        Raises:
            ModelError: The model raised while MLX traced it, or uses operations that can't be translated.
        """
        core = mlx()
        held = self.parameters(dtypes)
        inputs = [core.zeros(kind.shape, mlx_dtype(kind.dtype)) for kind in bound.spec.arrays]
        core.eval(held, inputs)
        nesting: list[Any] = []

        def flat(*arrays: Any) -> list[Any]:
            made, _, tree = flatten(self.call(bound.spec, arrays[: len(held)], arrays[len(held) :]))
            nesting[:] = [tree, made]
            return [leaf for leaf in made if holds_numbers(leaf)]

        records, marks = _traced(self.model, flat, [*held, *inputs])
        program, gives = walk_graph(records, [*self.names, *(None for _ in inputs)], marks)
        if not marks.scoped:
            program = replace(program, steps=number_layers(program.steps, program.parameters))
        tree, made = nesting
        settings = [None if holds_numbers(leaf) else (leaf,) for leaf in made]
        kinds = [aval.held for aval in gives]

        def outputs(results: Sequence[Any]) -> Any:
            tensors = iter(as_tensors(results, kinds))
            return unflatten(tree, [next(tensors) if each is None else each[0] for each in settings])

        origins = {name: (name, ()) for name in self.names}
        return TracedProgram(program, outputs, origins, self.model.classes, self.model.settings)

    def parameters(self, dtypes: Mapping[str, torch.dtype]) -> list[Any]:
        """Return the parameters as arrays of MLX, in the order of `names`, some of them in other dtypes."""
        made = []
        for name, at in zip(self.names, self.arrays, strict=True):
            leaf = self.leaves[at]
            own = leaf if isinstance(leaf, mlx().array) else to_mlx(leaf, _own_dtype(leaf))
            dtype = dtypes.get(name)
            made.append(own if dtype is None else own.astype(mlx_dtype(str(dtype).removeprefix("torch."))))
        return made

    def outputs(self, bound: Bound) -> list[Tensor]:
        """Return the leaves of MLX's own output for the inputs of a call, computed on the CPU."""
        core = mlx()
        with core.stream(core.cpu):
            arrays = [to_mlx(x, kind.dtype) for x, kind in zip(bound.tensors, bound.spec.arrays, strict=True)]
            made = flatten(self.call(bound.spec, self.parameters({}), arrays))[0]
            return [tensor_from_mlx(leaf) for leaf in made if holds_numbers(leaf)]


def _own_dtype(value: Any) -> str:
    """Return the dtype that MLX gives a tensor or an array of NumPy: float64 becomes float32."""
    name = str(value.dtype).removeprefix("torch.")
    return {"float64": "float32", "complex128": "complex64"}.get(name, name)


def _traced(model: MlxModel, flat: Callable[..., Any], arrays: Sequence[Any]) -> tuple[list[Any], Marks]:
    """Return what `mx.export_function` tells of a function, and the calls that wrote it."""
    core = mlx()
    records: list[Any] = []

    def traced_call(*values: Any) -> Any:  # places.py knows this name: what is outside of it is not the user's code
        return flat(*values)

    try:
        with core.stream(core.cpu), _undisturbed() as drawn, marked(model) as marks:
            core.export_function(records.append, traced_call, *arrays)
            if drawn():
                raise ModelError(
                    Message("frontends.random", name=model.name), hint=Message("frontends.hint.mlx_random")
                )
    except (*INTERRUPTS, SqrtdkError):
        raise
    except Exception as error:  # the user's function, and MLX while it traces it, may raise anything
        if (match := NOT_EXPORTED.search(str(error))) is not None:
            with core.stream(core.cpu), _undisturbed():
                unread = unread_calls(lambda: traced_call(*arrays), MLX_OPERATIONS.__contains__)
            hint = Message("frontends.hint.mlx_unread")
            refuse_unread(unread or {match[1]: ""}, "MLX", str(core.__version__), hint)
        raise ModelError(
            Message("frontends.not_traced", framework="MLX", name=model.name, reason=kind_and_text(error)),
            hint=Message("frontends.hint.mlx_traceable"),
        ) from error
    return records, marks


@contextmanager
def _undisturbed() -> Iterator[Callable[[], bool]]:
    """Turns compilation off, since a compiled part has no primitives, and gives the random state back afterwards.

    Yields:
        Returns whether numbers were drawn from the random state, which are others in each run.
    """
    core = mlx()
    calls: list[int] = []

    def count(x: Any) -> Any:
        calls.append(1)
        return x + 1

    probe = core.compile(count)
    for _ in range(2):
        core.eval(probe(core.array(0.0)))
    high, low = core.random.state[0].tolist()
    core.disable_compile()
    try:
        yield lambda: core.random.state[0].tolist() != [high, low]
    finally:
        if len(calls) == 1:  # the second call ran compiled: it was on
            core.enable_compile()
        core.random.seed((high << 32) | low)  # a seed is the two words of a key
