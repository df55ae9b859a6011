"""Subclasses of Tensor as arguments: read as stored, understood, or refused by name.

A subclass may mean something else than its memory holds: `causal_lower_right(8, 12)` of `torch.nn.attention.bias` is a
tensor of uninitialised memory that only torch's own function can read. Four kinds pass:

- a class without operations of its own: `class Activation(Tensor): ...`;
- a class with `__torch_dispatch__`, which every operation calls: `FakeTensor`, `DTensor`, a quantised wrapper. An
  operation that it can't run becomes an error that names it;
- a class with `__torch_function__` alone, if torch's attention gives the same for it as for its memory;
- torch's causal bias, as a mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.masked import MaskedTensor
from torch.nn import Parameter, UninitializedParameter
from torch.utils._python_dispatch import _disable_current_modes

from sqrtdk.errors import InvalidTypeError, InvalidValueError, SqrtdkError, UnsupportedError, short_text

# torch's own, even if `torch.nn.functional.scaled_dot_product_attention` has been replaced by `sqrtdk.attention`
torch_attention = torch._C._nn.scaled_dot_product_attention
PLAIN_TYPES = (Tensor, Parameter)
_MASK_NAMES = ("attn_mask", "attention_mask", "bias", "key_padding_mask", "position_bias", "visible", "float_mask")
_AS_STORED = "Pass x.as_subclass(torch.Tensor) if the numbers that it stores are meant."


def check_class(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that can't be read as numbers of its shape.

    Args:
        name: of the argument; a mask is tested as a mask.
        tensor: any tensor.

    Raises:
        InvalidTypeError: It is nested or masked, a lazy parameter without values, a causal bias, or of a class whose
            attention differs from that of its stored numbers.
    """
    kind = type(tensor)
    if is_causal_bias(tensor):  # first: in torch 2.6 it refuses every question, `is_nested` too
        raise InvalidTypeError(f"{name} is numbers; got a CausalBias, which has none", hint="It is an attn_mask.")
    if tensor.is_nested:
        raise InvalidTypeError(
            f"{name} is one dense tensor; got a nested one ({kind.__name__}, {tensor.layout})",
            hint="Pad it (torch.nested.to_padded_tensor) and hide the padding with attn_mask.",
        )
    if kind in PLAIN_TYPES:
        return
    if isinstance(tensor, MaskedTensor):
        raise InvalidTypeError(
            f"{name} is a plain tensor; got a MaskedTensor",
            hint="Pass its get_data(), and the keys to hide as attn_mask.",
        )
    if isinstance(tensor, UninitializedParameter):
        raise InvalidTypeError(
            f"{name} holds numbers; got {kind.__name__} without values", hint="Run the lazy module once before."
        )
    if _has_function(kind) and not _has_dispatch(kind) and not _is_its_memory(name, tensor):
        raise InvalidTypeError(
            f"{name} is a {kind.__name__}, of which torch's attention makes something else than of its numbers",
            hint=_AS_STORED,
        )


def is_causal_bias(tensor: Any) -> bool:
    """Return whether it is the result of `torch.nn.attention.bias.causal_upper_left` or `causal_lower_right`.

    The class is recognised by name, because importing that module imports torch's compiler.
    """
    if tensor is None or type(tensor) in PLAIN_TYPES:
        return False
    return any(c.__name__ == "CausalBias" and c.__module__ == "torch.nn.attention.bias" for c in type(tensor).__mro__)


def causal_diagonal(name: str, mask: Any, length: int, keys: int) -> int:
    """Return d of the causal bias's rule "row i sees keys j <= i + d".

    Args:
        name: of the argument.
        mask: see `is_causal_bias`.
        length: L, the rows of the call.
        keys: S, its keys.

    Raises:
        InvalidValueError: It was made for other sizes.
    """
    if (mask.seq_len_q, mask.seq_len_kv) != (length, keys):
        raise InvalidValueError(
            f"{name} is a causal bias of {mask.seq_len_q} rows and {mask.seq_len_kv} keys; got {length} and {keys}",
            hint=f"causal_lower_right({length}, {keys}), for one.",
        )
    return keys - length if mask.variant.name == "LOWER_RIGHT" else 0


def as_bool_mask(name: str, mask: Any, length: int, keys: int, device: torch.device) -> Any:
    """Return torch's causal bias as a bool mask, (L, S), True where the row sees the key.

    Any other mask is checked to be a plain tensor, and returned as it is.

    Args:
        name: Name of the argument, for the error.
        mask: The mask.
        length: Number of rows, L.
        keys: Number of keys, S.
        device: Device of the bool mask.
    """
    if not is_causal_bias(mask):
        if isinstance(mask, Tensor):
            check_class(name, mask)
        return mask
    return torch.ones(length, keys, dtype=torch.bool, device=device).tril(causal_diagonal(name, mask, length, keys))


def named_in_errors(arguments: dict[str, Any]) -> AbstractContextManager[None]:
    """Name a tensor with operations of its own (`DTensor`) in any error from an operation that it can't run.

    Args:
        arguments: by name; a module stands for its parameters and buffers, any other object for the tensors in it.

    Raises:
        UnsupportedError: Instead of such an error, within the context.
    """
    if torch.compiler.is_compiling():
        return nullcontext()
    tensors = [(name, tensor) for name, value in arguments.items() for tensor in _tensors_of(value)]
    classes = {name: type(tensor).__name__ for name, tensor in tensors if _is_foreign(type(tensor))}
    return _named_in_errors(classes) if classes else nullcontext()


@contextmanager
def _named_in_errors(classes: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except SqrtdkError:
        raise
    except Exception as error:  # operations of a foreign class may raise anything
        named = ", ".join(f"{name} is a {kind}" for name, kind in classes.items())
        raise UnsupportedError(
            f"{named}, with operations of its own, and these can't run the call: {short_text(error)}",
            hint="Pass plain tensors: to_local() of a DTensor, dequantize() of a quantised one.",
        ) from error


def _tensors_of(value: Any) -> Iterable[Any]:
    if isinstance(value, Tensor):
        return (value,)
    if isinstance(value, nn.Module):  # a learned score, scale or position term
        return chain(value.parameters(), value.buffers())
    # a dataclass of tensors, such as Alibi with its slopes
    held = fields(value) if is_dataclass(value) and not isinstance(value, type) else ()
    return (getattr(value, field.name) for field in held)


def _is_foreign(kind: type) -> bool:
    """Return whether a class has operations of its own; torch's tracer classes count as plain tensors."""
    if kind in PLAIN_TYPES or not issubclass(kind, Tensor) or kind.__module__.startswith("torch._subclasses"):
        return False
    return _has_dispatch(kind) or _has_function(kind)


def _has_dispatch(kind: type) -> bool:
    return getattr(kind, "__torch_dispatch__", None) is not Tensor.__torch_dispatch__


def _has_function(kind: type) -> bool:
    own: Any = getattr(kind, "__torch_function__", None)
    own = getattr(own, "__func__", own)
    return own not in (Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl)  # type: ignore[attr-defined]


def _is_its_memory(name: str, tensor: Tensor) -> bool:
    """Return whether torch's attention, which the class may override, gives the same for it as for its stored numbers.

    With queries and keys of 0, a row's output is the mean of the values that a mask leaves. While compiling nothing can
    be compared: a mask is refused, and any other tensor, which came from operations, is trusted.
    """
    if torch.compiler.is_compiling():
        return name not in _MASK_NAMES
    with _disable_current_modes(), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        stored = tensor.detach().as_subclass(Tensor)
        if stored.ndim < 2 or stored.is_meta or not stored.numel():
            return True
        *lead, rows, columns = stored.shape
        dtype = stored.dtype if stored.is_floating_point() else torch.float32
        mask = name in _MASK_NAMES
        query = torch.zeros(*lead, rows if mask else 1, 1, dtype=dtype, device=stored.device)
        key = query.new_zeros(*lead, columns if mask else rows, 1)
        value = torch.arange(1.0, columns + 1, dtype=dtype, device=stored.device)[:, None].expand(*lead, columns, 1)
    found = []
    for one in (tensor, stored):
        try:
            with _disable_current_modes(), torch.no_grad():
                result = torch_attention(query, key, value, one) if mask else torch_attention(query, key, one)
        except (TypeError, ValueError, RuntimeError, AttributeError):
            return False
        with torch._C.DisableTorchFunctionSubclass():
            found.append(result.as_subclass(Tensor).nan_to_num())
    return torch.equal(*found)
