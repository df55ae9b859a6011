"""Checks of the arguments of `attention` and `measure`: every refusal in one place, with the numbers received."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sqrtdk._subclasses import check_class
from sqrtdk.errors import InvalidTypeError, InvalidValueError
from sqrtdk.impl.call import broadcast

if TYPE_CHECKING:
    from jaxtyping import Float

    from sqrtdk._shapes import AnyKey, Query, Value

WIDEST_WINDOW = 2**40  # a wider window hides nothing, and sums with it would overflow int64

_FLOAT_DTYPES = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16})
_OF_MODELS = (
    "A model is checked by sqrtdk.check(model, inputs), watched while it trains by sqrtdk.watch(model), and "
    "sqrtdk.record(model, inputs, path) writes its q, k and v."
)


def fit_at_a_glance(query: Any, key: Any, value: Any) -> bool:
    """Return whether the three tensors surely fit each other.

    It takes a microsecond, while the full checks take twenty; False means that the full checks are needed.
    """
    if not (type(query) is type(key) is type(value) is Tensor):
        return False
    if query.is_nested or key.is_nested or value.is_nested:  # nested tensors have no shape
        return False
    a, b, c = query.shape, key.shape, value.shape
    return (
        query.dtype == key.dtype == value.dtype
        and query.dtype in _FLOAT_DTYPES
        and query.device == key.device == value.device
        and query.layout is key.layout is value.layout is torch.strided
        and len(a) == len(b) == len(c) > 1
        and a[:-2] == b[:-2] == c[:-2]
        and b[-2] == c[-2]
        and a[-1] == b[-1] > 0
    )


def check_tensors(query: Any, key: Any, value: Any) -> None:
    """Check that query, key and value are floating tensors of one dtype and device, and key and value of one length.

    Raises:
        InvalidTypeError: One is not a tensor, or has another dtype.
        InvalidValueError: Devices or lengths differ.
    """
    named = {"query": query, "key": key, "value": value}
    for name, tensor in named.items():
        if not isinstance(tensor, Tensor):
            hint = _OF_MODELS if isinstance(tensor, torch.nn.Module) else "Pass torch tensors."
            raise InvalidTypeError(f"{name} is a tensor; got {type(tensor).__name__}", hint=hint)
        check_class(name, tensor)
        if tensor.dtype not in _FLOAT_DTYPES:
            raise InvalidTypeError(f"{name} has a real floating dtype; got {tensor.dtype}", hint="Convert it first.")
        if tensor.layout != torch.strided:
            raise InvalidTypeError(f"{name} is a dense tensor; got {tensor.layout}", hint="Use to_dense().")
        if tensor.ndim < 2:
            raise InvalidValueError(
                f"{name} has the shape (..., heads, length, dim); got {tuple(tensor.shape)}",
                hint="Add the missing dimensions.",
            )
    if autocast_dtype(query) is None and len({tensor.dtype for tensor in named.values()}) > 1:
        names, each = _told_apart(query.dtype, key.dtype, value.dtype)
        raise InvalidTypeError(f"{names} have one dtype; got {each}", hint="Cast them.")
    if len({tensor.device for tensor in named.values()}) > 1:
        names, each = _told_apart(query.device, key.device, value.device)
        raise InvalidValueError(f"{names} are on one device; got {each}", hint="Move them.")
    if key.shape[-2] != value.shape[-2]:
        raise InvalidValueError(
            f"key and value have one length; got {key.shape[-2]} and {value.shape[-2]}",
            hint="Pass a value for every key.",
        )


def check_widths(query: Query, key: AnyKey) -> None:
    """Check that query and key have the same head dimension, E.

    Raises:
        InvalidValueError: They have not.
    """
    if query.shape[-1] != key.shape[-1]:
        raise InvalidValueError(
            f"query and key have one head dimension; got {query.shape[-1]} and {key.shape[-1]}",
            hint="Project them to the same size, or give a score that takes both (scores.bilinear).",
        )


def check_scored(query: Query, key: AnyKey) -> None:
    """Check that the head dimension of query and key is not 0; only the dot product is defined there.

    Raises:
        InvalidValueError: One is 0.
    """
    if 0 in (query.shape[-1], key.shape[-1]):
        raise InvalidValueError(
            f"the head dimension is at least 1; got {query.shape[-1]} for query and {key.shape[-1]} for key",
            hint="Only the dot product of no dimensions is a number, 0.",
        )


def check_head_counts(
    query: Float[Tensor, "... L E"], key: Float[Tensor, "... S Ek"], value: Float[Tensor, "... S Ev"], enable_gqa: bool
) -> None:
    """Check that leading dimensions broadcast, and that key and value heads divide the query's with `enable_gqa`.

    Raises:
        InvalidValueError: They don't.
    """
    shapes = [tuple(t.shape) for t in (query, key, value)]
    leads = [shape[:-2] for shape in shapes]
    if enable_gqa and all(leads):
        heads = [lead[-1] for lead in leads]
        if any(n == 0 or heads[0] % n for n in heads[1:]):
            names, each = _told_apart(heads[0], heads[1], heads[2])
            raise InvalidValueError(
                f"the heads of {names.removeprefix('query and ').removeprefix('query, ')} divide those of query; "
                f"got heads of {each}",
                hint="Query heads that share a key head are neighbours.",
            )
        leads = [lead[:-1] for lead in leads]
    try:
        broadcast(*leads)
    except RuntimeError:
        fewer = not enable_gqa and all(leads) and not any(not lead[-1] or leads[0][-1] % lead[-1] for lead in leads)
        cure = "pass enable_gqa=True: query heads share key heads" if fewer else "expand the batch"
        names, each = _told_apart(shapes[0], shapes[1], shapes[2], shapes[1][:-2] == shapes[2][:-2])
        raise InvalidValueError(
            f"the leading dimensions of {names} broadcast; got {each}", hint=f"{cure[0].upper()}{cure[1:]}."
        ) from None


def check_broadcast(name: str, tensor: Tensor, shape: Sequence[int]) -> None:
    """Check that a tensor broadcasts to a shape.

    Raises:
        InvalidValueError: It does not; `name` is the argument that the error names.
    """
    try:
        fits = broadcast(tensor.shape, shape) == tuple(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise InvalidValueError(
            f"{name} broadcasts to {tuple(shape)}; got {tuple(tensor.shape)}", hint=_aligned(name, tensor.shape, shape)
        )


def _aligned(name: str, shape: Sequence[int], full: Sequence[int]) -> str:
    """Return how a tensor of another layout is brought to (..., Hq, L, S), if the layout is a known one."""
    batch, heads, length, keys = (*(1,) * (4 - len(full)), *full)[-4:]
    layouts = {
        (heads,): ("[:, None, None]", f"one number a head, ({heads}, 1, 1)"),
        (batch, heads): ("[:, :, None, None]", f"one number a head of each batch element, ({batch}, {heads}, 1, 1)"),
        (batch, keys): ("[:, None, None, :]", f"one number a key of each batch element, ({batch}, 1, 1, {keys})"),
        (batch, length, keys): ("[:, None]", f"the same for all heads, ({batch}, 1, {length}, {keys})"),
        (batch * heads, length, keys): (
            f".view({batch}, {heads}, {length}, {keys})",
            "as torch.nn.MultiheadAttention stores them",
        ),
    }
    if tuple(shape) not in layouts:
        per_head = f" One number a head is ({heads},)." if name == "scale" else ""
        return f"Align the dimensions from the right.{per_head}"
    cure, meaning = layouts[tuple(shape)]
    return f"Pass {name}{cure}: {meaning}."


def check_mask(mask: Any, shape: Sequence[int], value: Value) -> None:
    """Check that an attn_mask is a bool or floating dense tensor that broadcasts to (..., Hq, L, S).

    Raises:
        InvalidTypeError: It is not such a tensor.
        InvalidValueError: It does not broadcast.
    """
    if isinstance(mask, Tensor):
        check_class("attn_mask", mask)
        if mask.layout != torch.strided:
            raise InvalidTypeError(f"attn_mask is a dense tensor; got {mask.layout}", hint="Use to_dense().")
    if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        keys_alone = isinstance(mask, Tensor) and len(shape) > 3 and tuple(mask.shape) == (shape[0], shape[-1])
        cure = "attention_mask.bool()[:, None, None, :]" if keys_alone else "mask.bool()"
        raise InvalidTypeError(
            f"attn_mask is a bool tensor (True takes part) or a floating one (added); got {got}",
            hint=f"Convert a mask of 1 and 0 with {cure}.",
        )
    if mask.ndim == 0:
        raise InvalidValueError("attn_mask has at least one dimension; got none", hint="One number hides all or none.")
    check_device("attn_mask", mask, value)
    if mask.dtype not in (torch.bool, torch.float32, value.dtype) and autocast_dtype(value) is None:
        raise InvalidTypeError(
            f"a floating attn_mask is float32 or has the dtype of query; got {mask.dtype} beside {value.dtype}",
            hint="Cast it, or pass a bool mask.",
        )
    check_broadcast("attn_mask", mask, shape)


def check_device(name: str, tensor: Tensor, query: Query) -> None:
    """Check that a tensor is on the query's device; a single number (no dimensions) may be on the CPU.

    Raises:
        InvalidValueError: It is on another; `name` is the argument that the error names.
    """
    if tensor.device != query.device and (tensor.ndim or tensor.device.type != "cpu"):
        raise InvalidValueError(
            f"{name} is on the device of query; got {tensor.device} and {query.device}", hint="Move it."
        )


def finite_number(name: str, value: Any, *, above: float = -math.inf) -> float:
    """Return an argument as a float.

    Args:
        name: Name of the argument, for the error.
        value: The argument.
        above: Number that it must exceed.

    Raises:
        InvalidTypeError: It is not a number, or a bool.
        InvalidValueError: It is NaN, infinite, or not above `above`.

    Example:
        >>> finite_number("softcap", 50, above=0.0)
        50.0
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidTypeError(f"{name} is a number; got {value!r}", hint="Pass a float.")
    found = float(value)
    if torch.compiler.is_compiling():
        return found  # while compiling it may be symbolic
    if not math.isfinite(found) or found <= above:
        bound = "" if above == -math.inf else f" above {above:g}"
        raise InvalidValueError(f"{name} is a finite number{bound}; got {found}", hint="Check where it comes from.")
    return found


def place(name: str, value: Any) -> int:
    """Return an argument that is an int.

    Raises:
        InvalidTypeError: It is not, or a bool; `name` is the argument that the error names.
    """
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise InvalidTypeError(f"{name} is a whole number; got {value!r}", hint="Count rows and keys from 0.")
    return value  # type: ignore[return-value]


def check_flags(**flags: Any) -> None:
    """Check that flags are bools, as torch does: the string "no" would count as true.

    Raises:
        InvalidTypeError: One is not.
    """
    for name, value in flags.items():
        if type(value) is not bool and not isinstance(value, torch.SymBool):
            raise InvalidTypeError(f"{name} is True or False; got {value!r}", hint="Pass a bool.")


def scale_number(scale: Any) -> float:
    """Return a scale that is neither a rule nor a tensor as a float.

    Raises:
        InvalidTypeError: It is not a number.
        InvalidValueError: It is NaN or infinite.
    """
    if isinstance(scale, bool) or not isinstance(scale, Real):
        hint = "Call it: scales.log_n()." if callable(scale) else "0.125 or scales.log_n(), for one."
        raise InvalidTypeError(f"scale is a number, a rule or a tensor; got {scale!r}", hint=hint)
    return finite_number("scale", scale)


def dropout_rate(name: str, value: Any) -> float:
    """Return a dropout rate p, 0 <= p <= 1, as a float.

    Raises:
        InvalidValueError: It is not such a number; `name` is the argument that the error names.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0.0 <= float(value) <= 1.0:
        raise InvalidValueError(f"{name} is from 0 to 1; got {value!r}", hint="0.0: no dropout.")
    return float(value)


def window_sides(window: Any) -> tuple[int | None, int | None]:
    """Return a window as (left, right), the numbers of keys that a row sees on each side; None is unbounded.

    Raises:
        InvalidTypeError: It is not a pair.
        InvalidValueError: A side is not a size; -1 and None are unbounded.

    Example:
        >>> window_sides((1023, 0)), window_sides((-1, 0))
        ((1023, 0), (None, 0))
    """
    if not isinstance(window, Sequence) or len(window) != 2 or any(isinstance(side, bool) for side in window):
        raise InvalidTypeError(
            f"window is (left, right), two sizes, or in a causal call a number of keys; got {window!r}",
            hint="(1023, 0) looks back 1023 keys.",
        )
    sides = []
    for side in window:
        if side is not None and (not isinstance(side, int) or side < -1):
            raise InvalidValueError(
                f"a side of the window is a size from 0, or None or -1 for no bound; got {side!r}",
                hint="(1023, 0) looks back 1023 keys.",
            )
        sides.append(None if side in (None, -1) or side > WIDEST_WINDOW else side)
    return sides[0], sides[1]


def autocast_dtype(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of autocast on a tensor's device; None if autocast is off there."""
    kind = tensor.device.type
    if kind == "meta":
        return None
    try:  # torch.compile of torch 2.11 can't read `torch.amp.is_autocast_available`
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    except RuntimeError:  # the device has no autocast
        return None


def _told_apart(query: object, key: object, value: object, alike: bool | None = None) -> tuple[str, str]:
    """Return the names that an error is about, and what each has; a value as its key is not named: `measure` has none.

    Args:
        query: what the query has; `key` and `value` likewise.
        key: what the key has.
        value: what the value has.
        alike: whether the value is as the key; None: they are compared.

    Example:
        >>> _told_apart(8, 3, 3)
        ('query and key', 'query 8, key 3')
    """
    if value == key if alike is None else alike:
        return "query and key", f"query {query}, key {key}"
    return "query, key and value", f"query {query}, key {key}, value {value}"
