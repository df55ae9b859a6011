"""Copies of inputs, so that a forward that writes into them, `x.mul_(2)`, leaves the user's own."""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS
from sqrtdk.models.records import Inputs
from sqrtdk.models.tensor_state import has_memory, memory_of, span_of

_UNCOPIED = (int, float, str, bool, complex, bytes, type(None), nn.Module, type, types.FunctionType, types.ModuleType)
_WHOLE = 2**24  # storages up to 16 MiB are copied whole, so that views of one tensor stay views of one tensor


class NotCopiedError(Exception):
    """Raised for a value that can't be copied; its only argument is the value's type."""


def copied(inputs: Inputs, *, strict: bool = False) -> Inputs:
    """Return inputs with every tensor copied; one object stays one object: `attention(x, x, x)` sees q is k.

    A tensor keeps its strides. What can't be copied is passed as it is.

    Args:
        inputs: Arguments of a forward.
        strict: Raise instead of passing what can't be copied as it is.

    Raises:
        NotCopiedError: A value can't be copied, and `strict` is set.

    Example:
        >>> x = torch.zeros(2)
        >>> one, other = copied((x, x))
        >>> one is other, one is x
        (True, False)
    """
    memo: dict[Any, Any] = {}
    if isinstance(inputs, dict):
        return {name: _copy(value, memo, strict) for name, value in inputs.items()}
    return tuple(_copy(value, memo, strict) for value in inputs)


def _copy(value: Any, memo: dict[Any, Any], strict: bool) -> Any:
    """Return a deep copy of a value.

    Args:
        value: The value.
        memo: Copies by id, as for `copy.deepcopy`.
        strict: Whether to raise for a value that can't be copied, rather than to return it as it is.

    Raises:
        NotCopiedError: The value can't be copied.
    """
    if isinstance(value, _UNCOPIED):
        return value
    if id(value) in memo:
        return memo[id(value)]
    try:
        if isinstance(value, Tensor):
            made: Any = _of_tensor(value, memo)
        elif type(value) in (list, tuple):
            made = type(value)(_copy(entry, memo, strict) for entry in value)
        elif type(value) is dict:
            made = {key: _copy(entry, memo, strict) for key, entry in value.items()}
        else:
            made = copy.deepcopy(value, memo)
    except (*INTERRUPTS, NotCopiedError):
        raise
    except BaseException as error:  # a user's __deepcopy__, or a subclass that lacks the operation
        if strict:
            raise NotCopiedError(type(value)) from error
        made = value
    memo[id(value)] = made
    return made


def _of_tensor(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Return a copy of a tensor; tensors that share a storage share its copy.

    Of a storage that is much larger than the tensor, only the tensor's own bytes are copied.
    """
    if tensor.is_meta:
        return tensor
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and has_memory(tensor)
    if not plain or tensor.is_nested or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)
    storage: Any = tensor.untyped_storage()
    span = span_of(tensor)
    first = 0
    if storage.nbytes() <= max(_WHOLE, 2 * span[2]):
        key: Any = ("storage", span[0])
        made = memo[key] if key in memo else storage.clone()
        memo[key] = made
    else:
        made, first = memory_of(tensor).clone().untyped_storage(), span[1] // tensor.itemsize
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    out = empty.set_(made, tensor.storage_offset() - first, tensor.shape, tensor.stride())
    out.__dict__.update(tensor.__dict__)
    return out.requires_grad_(tensor.requires_grad)
