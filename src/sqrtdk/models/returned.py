"""Lists every tensor in the output of a forward, by a dotted name."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
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
    found: dict[str, Tensor] = {}
    for name, tensor in walk(returned):
        if len(found) >= _MAX_OUTPUT_TENSORS:
            break
        if (tensor.is_floating_point() or tensor.is_complex()) and not tensor.is_meta:
            found.setdefault(name or "0", _plain(tensor))
    return found


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


def _walk(value: Any, name: str, depth: int, seen: dict[int, Any], objects: bool) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
        return
    if depth > _MAX_OUTPUT_DEPTH or id(value) in seen:
        return
    seen[id(value)] = value  # kept, so that no other object gets its id; an object held twice is walked once
    for key, part in _parts(value, objects):
        yield from _walk(part, f"{name}.{key}" if name else key, depth + 1, seen, objects)


def _parts(value: Any, objects: bool) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a structure: a mapping, a sequence, a cache of keys and values, or the fields of an object."""
    if isinstance(value, Mapping):
        yield from ((str(key), part) for key, part in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, tuple | list):
        yield from ((str(place), part) for place, part in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value))
    elif objects:
        yield from _of_object(value)


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    fields = getattr(value, "__dict__", None)
    if not isinstance(fields, dict) or isinstance(value, nn.Module | type) or callable(value):
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
