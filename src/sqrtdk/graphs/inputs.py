"""Prepares the inputs of a graph: the caller's tensors, matched by name, dtype and shape, or invented ones."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.errors import ModelError
from sqrtdk.graphs.graph import load_graph
from sqrtdk.graphs.model_file import ONNX_EXTRA
from sqrtdk.messages import Message

PADDING_MASK_NAME = re.compile(r"(^|_)(attention|padding|pixel|input)_mask$")  # names of padding masks
_MOST_NAMES_LISTED = 12  # names listed in a message
_MOST_TERMS = 8  # terms of a sum of sizes, such as "past + tokens"


# -- the caller's ------------------------------------------------------------------------------------------------------


def inputs_by_name(what: str, names: Sequence[str], tensors: Any, hint: str) -> dict[str, Any]:
    """Return the inputs of a graph as a dict.

    Args:
        what: What the error calls the graph, "ONNX graph".
        names: Names of the graph's inputs, in order.
        tensors: A mapping by name, or a tuple in the order of `names`.
        hint: The hint of the error.

    Returns:
        The inputs by name. Those that the graph does not take are left out if they would not change its result, such as
        a mask that hides nothing; others are kept.

    Raises:
        ModelError: A tuple has more items than the graph has inputs.
    """
    if isinstance(tensors, tuple):
        if len(tensors) > len(names):
            raise ModelError(f"the {what} takes {len(names)} inputs, got {len(tensors)}", hint=hint)
        tensors = dict(zip(names, tensors, strict=False))
    return {name: value for name, value in tensors.items() if name in names or not _says_nothing(name, value)}


def _says_nothing(name: str, value: Any) -> bool:
    """Return whether the input changes no result: a mask of ones, or a flag such as use_cache."""
    if isinstance(value, Tensor):
        return name == "attention_mask" and value.dim() == 2 and not value.is_meta and bool((value == 1).all())
    return not isinstance(value, np.ndarray | list | tuple)


def feeds(inputs: tuple[Any, ...], tensors: Mapping[str, Any] | tuple[Any, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """Return the arrays to run a graph with, by name.

    Integers and bools are cast to the dtype that the graph takes if every value fits; floats are cast among floats.

    Args:
        inputs: the graph's inputs, as `ValueInfoProto`s.
        tensors: by name, or in the order of `inputs`.

    Raises:
        ModelError: an input is missing, or has another shape or kind of number.
    """
    names = [value.name for value in inputs]
    listed = ", ".join(f"{value.name[:60]} {_shown(_sizes(value))}" for value in inputs[:_MOST_NAMES_LISTED])
    hint = f"The graph takes {listed or 'nothing'}. Export it again for other inputs, or give these."
    given = {name: value for name, value in inputs_by_name("graph", names, tensors, hint).items() if value is not None}
    given |= _empty_caches(inputs, given)
    extra = [str(name)[:100] for name in given if name not in names][:_MOST_NAMES_LISTED]
    missing = [name[:100] for name in names if name not in given]
    if missing:
        but = f", and got {', '.join(extra)}, which it does not take" if extra else ""
        raise ModelError(f"the graph lacks its inputs {', '.join(missing[:_MOST_NAMES_LISTED])}{but}", hint=hint)
    if extra:
        raise ModelError(f"the graph takes no input {', '.join(extra)}: what they say was not exported", hint=hint)
    return {value.name: _fit(value, given[value.name]) for value in inputs}


def _empty_caches(inputs: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return empty keys and values for cache inputs of free length that the caller left out."""
    first = next((value for value in given.values() if isinstance(value, Tensor) and value.dim()), None)
    found: dict[str, Tensor] = {}
    for value in inputs:
        match _sizes(value):
            # ("batch", 8, "past_sequence_length", 64): the length has a name, so it is free and may be 0
            case [rows, int(heads), str(), int(width)] if value.name.startswith("past") and value.name not in given:
                if first is not None:
                    rows = rows if isinstance(rows, int) else first.shape[0]
                    found[value.name] = torch.zeros(rows, heads, 0, width)
    return found


def usual_inputs(path: str | os.PathLike[str], given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return inputs that a graph takes and the caller did not give: position ids 0, 1, 2, ... and token types 0.

    Args:
        path: The ONNX file.
        given: Inputs by name; without `input_ids` (B, L), nothing is made.
    """
    names = {value.name for value in load_graph(path).inputs}
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return {}
    made = {"position_ids": torch.arange(ids.shape[1]).expand(ids.shape).clone(), "token_type_ids": 0 * ids.long()}
    return {name: tensor for name, tensor in made.items() if name in names and name not in given}


def fixed_sizes(path: str | os.PathLike[str]) -> tuple[int | None, int | None]:
    """Return the numbers of rows and tokens for which a graph was exported; each is None if it is free or unknown."""
    sizes = next((_sizes(value) for value in load_graph(path).inputs if value.name == "input_ids"), None)
    if sizes is None or len(sizes) != 2:
        return None, None
    rows, tokens = (size if isinstance(size, int) else None for size in sizes)
    return rows, tokens


def _shown(sizes: list[int | str] | None) -> str:
    return "" if sizes is None else f"({', '.join(str(size)[:40] for size in sizes)})"


def _sizes(value: Any) -> list[int | str] | None:
    """Return the shape that the graph declares, with names for free sizes, or None if it declares none."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim]


def _fit(value: Any, tensor: Any) -> np.ndarray[Any, Any]:
    """Return one input as an array of the dtype that the graph takes."""
    name = value.name[:100]
    if not value.type.HasField("tensor_type"):
        raise ModelError(
            f"the input {name!r} of the graph is no tensor: sequences and maps are not given to it",
            hint="Export a graph that takes tensors alone.",
        )
    tensor = tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        raise ModelError(f"the input {name!r} has no plain values to run a graph with", hint="Give a plain tensor.")
    wanted, shape = _sizes(value), tuple(tensor.shape)
    pairs = zip(wanted or shape, shape, strict=False)
    if wanted is not None and not (len(wanted) == len(shape) and all(isinstance(s, str) or s == n for s, n in pairs)):
        raise ModelError(
            f"the input {name!r} is {shape}, and the graph was exported for {_shown(wanted)}",
            hint="Give inputs of that size (--batch, --seq-len), or export with dynamic_shapes.",
        )
    helper = _extras.load_extra("onnx.helper", ONNX_EXTRA)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
    tensor = tensor.detach().cpu()
    # numpy has no bfloat16.
    array: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    if (array.dtype.kind in "iub") != (dtype.kind in "iub"):
        raise ModelError(
            f"the input {name!r} is of dtype {array.dtype}; the graph takes {dtype}", hint="Give numbers of its kind."
        )
    # A cast of ids to int32 or bool wraps silently if they do not fit, so it is compared with the original below.
    fitted = np.ascontiguousarray(array.astype(dtype, copy=False))
    if dtype.kind in "iub" and not np.array_equal(fitted.astype(array.dtype), array):
        raise ModelError(
            f"the input {name!r} holds numbers from {array.min()} to {array.max()}, which {dtype} does not have",
            hint="The graph takes no such numbers: export it with int64.",
        )
    return fitted


# -- sizes that a graph leaves free ------------------------------------------------------------------------------------


def shown_sizes(sizes: Mapping[str, int]) -> str:
    """Return a sentence that lists the free sizes of a graph and the numbers that were chosen for them."""
    names, numbers = ", ".join(name[:40] for name in [*sizes][:8]), ", ".join(map(str, [*sizes.values()][:8]))
    if len(sizes) > 8:
        names = Message("graphs.and_count", names=names, count=len(sizes) - 8)
    return Message("graphs.free_sizes", names=names, values=numbers)


def number_for(axis: int, sizes: Mapping[str, int], larger: bool) -> int:
    """Return a number for a free size of an input: small for a batch, else odd, unlike any head dimension.

    Args:
        axis: Axis of the input; 0 is the batch.
        sizes: Numbers chosen so far, by the size's name.
        larger: Whether to choose a second, larger set of numbers.

    Example:
        >>> number_for(0, {}, larger=False), number_for(1, {}, larger=False), number_for(1, {}, larger=True)
        (2, 37, 53)
    """
    if axis == 0:
        return 3 if larger else 2
    return (53 if larger else 37) + 2 * sum(1 for size in sizes.values() if size > 3)


def onnx_input_shape(value: Any, sizes: dict[str, int], larger: bool = False) -> list[int]:
    """Return the shape of an ONNX input, with numbers chosen for its free sizes.

    Args:
        value: A `ValueInfoProto`.
        sizes: Numbers chosen so far, by the size's name; those chosen here are added.
        larger: As for `number_for`.
    """
    return [
        int(d.dim_value) if d.HasField("dim_value") else size_of(d.dim_param, value.name, axis, sizes, larger)
        for axis, d in enumerate(value.type.tensor_type.shape.dim)
    ]


def size_of(symbol: str, of: str, axis: int, sizes: dict[str, int], larger: bool) -> int:
    """Return a number for the free size of one axis, and keep it in `sizes` under the size's name.

    Example:
        >>> sizes = {}
        >>> size_of("batch", "ids", 0, sizes, False), size_of("past", "k", 2, sizes, False)
        (2, 0)
        >>> size_of("tokens", "ids", 1, sizes, False), size_of("past + tokens", "mask", 1, sizes, False)
        (37, 37)
    """
    name = symbol or f"{of}.{axis}"
    terms = [term.strip() for term in name.split("+")]
    if 1 < len(terms) <= _MOST_TERMS:
        return sum(
            int(term) if term.isdecimal() and len(term) < 9 else size_of(term, of, 1, sizes, larger) for term in terms
        )
    if name not in sizes:
        # A cache, "past_sequence_length" or an unnamed third axis of "past_key", is read empty.
        cached = "past" in name or (not symbol and "past" in of and axis == 2)
        sizes[name] = 0 if cached else number_for(axis, sizes, larger)
    return sizes[name]
