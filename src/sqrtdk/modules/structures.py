"""The tensors in what a module takes and returns: listed by a dotted name, copied, and put in place of others.

A structure is a tensor, or a mapping, sequence or dataclass of structures; transformers' outputs are mappings. A cache
of keys and values is an object, and is walked only where it is asked for. torch's `_pytree` is not used: it takes a
dataclass or a cache for one leaf unless its class was registered.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

_MAX_OUTPUT_DEPTH = 8  # levels of nesting
_MAX_OUTPUT_TENSORS = 4096  # tensors in one output
_CACHE_FIELDS = (("key_cache", "value_cache"),)  # a cache of older transformers: lists with an entry for each layer


def tensors_of(returned: Any) -> dict[str, Tensor]:
    """Return every floating-point tensor with values in the output of a forward, by name.

    Names are keys, fields and numbers, joined by dots; a tensor that is returned alone is "0".

    Example:
        >>> ones = torch.ones(2)
        >>> list(tensors_of({"logits": ones, "past": [(ones, ones)], "ids": torch.arange(2)}))
        ['logits', 'past.0.0', 'past.0.1']
        >>> list(tensors_of(ones)), list(tensors_of((ones, None, ones)))
        (['0'], ['0', '2'])
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in walk(returned):
        if len(tensors) >= _MAX_OUTPUT_TENSORS:
            break
        if (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta:
            tensors.setdefault(name or "0", _plain(tensor))
    return tensors


def walk(returned: Any, *, objects: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor in the output of a forward with its name, which is "" for a tensor that is returned alone.

    Args:
        returned: Tensors in mappings, sequences and dataclasses, nested to any depth.
        objects: Also look into other objects, such as caches of keys and values.

    Example:
        >>> [name for name, _ in walk({"logits": torch.ones(2), "past": [torch.ones(2)]})]
        ['logits', 'past.0']
    """
    yield from _walk(returned, "", 0, {}, objects)


def floating(value: Any) -> Iterator[Tensor]:
    """Yield the floating-point tensors of a structure, without those of caches; nested tensors are left out."""
    return (x for _, x in walk(value, objects=False) if x.is_floating_point() and not x.is_nested)


def first_tensor(value: Any) -> Tensor | None:
    """Return the first floating-point tensor of a structure, in the order of `floating`; None if it has none."""
    return next(floating(value), None)


def _plain(tensor: Tensor) -> Tensor:
    """Return a dense copy, because the next run may write into the tensor that this run returned."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return torch.cat([part.reshape(-1) for part in tensor.unbind()])
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.itemsize == 1:
        return tensor.float()  # float8 lacks most operations, and float32 holds its numbers exactly
    return torch.view_as_real(tensor).clone() if tensor.is_complex() else tensor.clone()


def _walk(value: Any, name: str, depth: int, walked: dict[int, Any], objects: bool) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    if depth > _MAX_OUTPUT_DEPTH or id(value) in walked:
        return
    walked[id(value)] = value  # kept, so that no other object gets its id; an object held twice is walked once
    fields = getattr(value, "_fields", None) if isinstance(value, tuple) else None
    for key, part in _parts(value, objects):
        own = str(key) if fields is None else fields[key]
        yield from _walk(part, f"{name}.{own}" if name else own, depth + 1, walked, objects)


def _parts(value: Any, objects: bool = False) -> Iterator[tuple[Any, Any]]:
    """Yield the parts of a structure by key, place or field; with `objects`, those of a cache or another object."""
    if isinstance(value, Mapping):
        yield from value.items()
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value))
    elif objects:
        yield from _of_object(value)


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    fields = getattr(value, "__dict__", None)
    if isinstance(value, nn.Module):
        base = getattr(sys.modules.get("transformers.cache_utils"), "Cache", None)
        if base is None or not isinstance(value, base):
            return
        fields = vars(value) | value._modules  # until 4.49 a cache is a module, and holds others: EncoderDecoderCache
    elif not isinstance(fields, dict) or isinstance(value, type) or callable(value):
        return
    layers = fields.get("layers")
    if isinstance(layers, list):  # DynamicCache(): layers[0].keys, layers[0].values
        for place, layer in enumerate(layers):
            for key, own in (("key", "keys"), ("value", "values")):
                yield f"{place}.{key}", getattr(layer, own, None)
        return
    for keys, values in _CACHE_FIELDS:
        if isinstance(fields.get(keys), list):
            for own, key in ((keys, "key"), (values, "value")):
                yield from ((f"{place}.{key}", part) for place, part in enumerate(fields.get(own) or ()))
            return
    yield from ((key, part) for key, part in fields.items() if not key.startswith("_"))


# -- structures with other tensors -------------------------------------------------------------------------------------


def copy_structure(output: Any) -> Any:
    """Return the structure with detached copies of its tensors.

    A list or tuple keeps its type, and a mapping becomes a dict. None, and an iterable of another type, such as a
    namedtuple, is returned itself, without a copy. Any other object becomes None.
    """
    if isinstance(output, Tensor):
        return output.detach().clone()
    if type(output) in (tuple, list):
        return type(output)(copy_structure(part) for part in output)
    if isinstance(output, Mapping):
        return {name: copy_structure(part) for name, part in output.items()}
    return output if output is None or isinstance(output, Iterable) else None


def restored(output: Any, before: Any) -> Any:
    """Return an output in which the tensors are copies of those of another run of the same module.

    Args:
        output: the output of this run.
        before: the output of the other run, as `copy_structure` kept it.

    Returns:
        A tensor, list, tuple or dict of the same form as `output`. Parts that are none of these types, or that differ
        in type, length or keys between the runs, are those of `output`.
    """
    if isinstance(output, Tensor) and isinstance(before, Tensor):
        return before.clone()
    # Exact types: a namedtuple can't be made from an iterator.
    if type(output) in (tuple, list) and type(before) is type(output) and len(before) == len(output):
        return type(output)(restored(one, other) for one, other in zip(output, before, strict=True))
    if type(output) is dict and type(before) is dict and before.keys() == output.keys():
        return {name: restored(one, before[name]) for name, one in output.items()}
    return output


def replaced(value: Any, others: Sequence[Tensor]) -> Any:
    """Return a result whose first floating tensor is replaced by the first of the others with its shape.

    Example:
        >>> replaced((torch.ones(2), None), [torch.zeros(3), torch.zeros(2)])
        (tensor([0., 0.]), None)
        >>> replaced({"weights": None, "out": torch.ones(2)}, [torch.zeros(2)])
        {'weights': None, 'out': tensor([0., 0.])}
    """
    if isinstance(value, Tensor):
        fits = (x for x in others if x.shape == value.shape and x.is_floating_point() and value.is_floating_point())
        other = next(fits, None)
        return value if other is None else other.to(value)
    for name, part in _parts(value):
        other = replaced(part, others)
        if other is not part:
            return _with_part(value, name, other)
    return value


def _with_part(value: Any, name: Any, other: Any) -> Any:
    """Return a copy of a tuple, list, mapping or dataclass with one part replaced."""
    if isinstance(value, tuple | list):
        parts = [*value[:name], other, *value[name + 1 :]]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    changed = copy.copy(value)
    if isinstance(value, Mapping):
        changed[name] = other
    else:
        # object.__setattr__: the dataclass of a model's output may be frozen
        object.__setattr__(changed, name, other)
    return changed
