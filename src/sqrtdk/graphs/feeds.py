"""Inputs of the other side as those of a graph: by name, with the dtype and the sizes that it was exported for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.errors import ModelError
from sqrtdk.graphs.model_file import EXTRA

_SHOWN = 12  # names in a message


def feeds(inputs: tuple[Any, ...], tensors: Mapping[str, Any] | tuple[Any, ...]) -> dict[str, np.ndarray[Any, Any]]:
    """What a graph is run with.

    Args:
        inputs: of the graph, `ValueInfoProto`s.
        tensors: by the names that forward has for them, or in the order of the graph's inputs.

    Returns:
        Arrays by name. Whole numbers get the dtype that the graph takes, where they fit into it; so do bools and
        floating-point numbers among themselves.

    Raises:
        ModelError: an input is missing, or is not the graph's, or has another shape, or another kind of numbers.
    """
    names = [value.name for value in inputs]
    if isinstance(tensors, tuple):
        if len(tensors) > len(names):
            raise ModelError(f"the graph takes {len(names)} inputs, got {len(tensors)}", hint=_takes(inputs))
        tensors = dict(zip(names, tensors, strict=False))
    given = {name: value for name, value in tensors.items() if name in names or not says_nothing(name, value)}
    given = {name: value for name, value in given.items() if value is not None}
    given |= empty_caches(inputs, given)
    extra = [str(name)[:100] for name in given if name not in names]
    missing = [name[:100] for name in names if name not in given]
    if missing:
        but = f", and got {', '.join(extra[:_SHOWN])}, which it does not take" if extra else ""
        raise ModelError(f"the graph lacks its inputs {', '.join(missing[:_SHOWN])}{but}", hint=_takes(inputs))
    if extra:
        raise ModelError(
            f"the graph takes no input {', '.join(extra[:_SHOWN])}: what they say was not exported",
            hint=_takes(inputs),
        )
    return {value.name: _fit(value, given[value.name]) for value in inputs}


def says_nothing(name: str, value: Any) -> bool:
    """Whether a graph without this input computes the same: a mask that hides nothing, or what is no tensor.

    What is no tensor (use_cache, return_dict) was fixed when the graph was exported.
    """
    if isinstance(value, Tensor):
        return name == "attention_mask" and value.dim() == 2 and not value.is_meta and bool((value == 1).all())
    return not isinstance(value, np.ndarray | list | tuple)


def empty_caches(inputs: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Keys and values of no token, for the inputs of a graph that take a cache of any length and were given none."""
    first = next((value for value in given.values() if isinstance(value, Tensor) and value.dim()), None)
    found = {}
    for value in inputs:
        sizes = _sizes(value) or []
        free = [axis for axis, size in enumerate(sizes) if isinstance(size, str)]
        if value.name in given or not value.name.startswith("past") or len(sizes) != 4 or 2 not in free:
            continue
        if first is None or not set(free) <= {0, 2}:
            continue
        shape = [first.shape[0], sizes[1], 0, sizes[3]]
        shape[0] = sizes[0] if isinstance(sizes[0], int) else first.shape[0]
        found[value.name] = torch.zeros(*(int(size) for size in shape))
    return found


def usual(inputs: tuple[Any, ...], given: Mapping[str, Any]) -> dict[str, Tensor]:
    """Positions and types of tokens, where a graph takes them and they were not given: 0, 1, 2, ... and 0."""
    names = {value.name for value in inputs}
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return {}
    made = {"position_ids": torch.arange(ids.shape[1]).expand(ids.shape).clone(), "token_type_ids": 0 * ids.long()}
    return {name: tensor for name, tensor in made.items() if name in names and name not in given}


def fixed(inputs: tuple[Any, ...]) -> tuple[int | None, int | None]:
    """Rows and tokens that a graph was exported for; None where they are free, or not told."""
    for value in inputs:
        sizes = _sizes(value) or []
        if value.name == "input_ids" and len(sizes) == 2:
            rows, tokens = (size if isinstance(size, int) else None for size in sizes)
            return rows, tokens
    return None, None


def _takes(inputs: tuple[Any, ...]) -> str:
    listed = ", ".join(f"{value.name[:60]} {_shown(_sizes(value))}" for value in inputs[:_SHOWN])
    return f"The graph takes {listed or 'nothing'}. Export it again for other inputs, or give these."


def _shown(sizes: list[int | str] | None) -> str:
    return "" if sizes is None else f"({', '.join(str(size)[:40] for size in sizes)})"


def _sizes(value: Any) -> list[int | str] | None:
    """Sizes that the graph takes: numbers, and names of those that are free; None where it does not say."""
    kind = value.type.tensor_type
    if not kind.HasField("shape"):
        return None
    return [d.dim_value if d.HasField("dim_value") else d.dim_param or "?" for d in kind.shape.dim]


def _fit(value: Any, tensor: Any) -> np.ndarray[Any, Any]:
    """One input as the graph takes it."""
    name = value.name[:100]
    if not value.type.HasField("tensor_type"):
        raise ModelError(
            f"the input {name!r} of the graph is no tensor: sequences and maps are not given to it",
            hint="Export a graph that takes tensors alone.",
        )
    tensor = tensor if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
    if tensor.is_meta or tensor.is_nested or tensor.layout is not torch.strided:
        raise ModelError(f"the input {name!r} has no plain values to run a graph with", hint="Give a plain tensor.")
    _refuse_sizes(name, _sizes(value), tuple(tensor.shape))
    helper = _extras.load("onnx.helper", EXTRA)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
    tensor = tensor.detach().cpu()
    array: np.ndarray[Any, Any] = (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy()
    if array.dtype == dtype:
        return np.ascontiguousarray(array)
    whole = ("i", "u", "b")
    if (array.dtype.kind in whole) != (dtype.kind in whole):
        raise ModelError(
            f"the input {name!r} is of dtype {array.dtype}; the graph takes {dtype}", hint="Give numbers of its kind."
        )
    fitted = np.ascontiguousarray(array.astype(dtype))
    if dtype.kind in whole and not np.array_equal(fitted.astype(array.dtype), array):
        raise ModelError(
            f"the input {name!r} holds numbers from {array.min()} to {array.max()}, which {dtype} does not have",
            hint="The graph takes no such numbers: export it with int64.",
        )
    return fitted


def _refuse_sizes(name: str, wanted: list[int | str] | None, shape: tuple[int, ...]) -> None:
    if wanted is None:
        return
    fits = len(wanted) == len(shape) and all(
        isinstance(size, str) or size == have for size, have in zip(wanted, shape, strict=True)
    )
    if not fits:
        raise ModelError(
            f"the input {name!r} is {shape}, and the graph was exported for {_shown(wanted)}",
            hint="Give inputs of that size (--batch, --seq-len), or export with dynamic_shapes.",
        )
