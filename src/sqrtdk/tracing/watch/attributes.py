"""The tensors that a model holds: parameters, buffers, plain attributes, and tables of a rotation that lie deeper."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from types import ModuleType

import torch
from torch import Tensor, nn

_DEEPEST = 4  # objects and containers in one another: rotation.tables[device][length] = (cosines, sines)
_WIDEST = 64  # what holds more than that is no cache of tables
_PURE = 1e-6


def module_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Each with its name: what is in a container counts as well, what lies deeper only if it is a table of angles."""
    yield from model.named_parameters()
    yield from model.named_buffers()
    known: set[int] = set()
    for path, module in model.named_modules():
        for key, item in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            name = f"{path}.{key}".lstrip(".")
            if isinstance(item, Tensor):
                yield name, item
            elif isinstance(item, (list, tuple, dict)):
                for inner in _items(item):
                    if isinstance(inner, Tensor):
                        yield name, inner
            for table in _tables(item, _DEEPEST, known):
                yield name, table


def _items(item: object) -> list[object]:
    """What an object or a container holds, without its own methods; nothing of a module, which has its turn."""
    if isinstance(item, dict):
        return list(dict.values(item))
    if isinstance(item, list):
        return list(list.__iter__(item))
    if isinstance(item, tuple):
        return list(tuple.__iter__(item))
    if isinstance(item, (nn.Module, ModuleType)):
        return []
    held: object = None
    with suppress(Exception):  # a stranger's object may refuse anything
        held = getattr(item, "__dict__", None)  # of a class it is no dict
    return list(dict.values(held)) if isinstance(held, dict) else []


def _tables(item: object, deep: int, known: set[int]) -> Iterator[Tensor]:
    """Tables of angles in an object that is no module, as a class of the model's own keeps them."""
    if isinstance(item, Tensor):
        if _holds_angles(item):
            yield item
    elif deep and id(item) not in known and len(inside := _items(item)) <= _WIDEST:
        known.add(id(item))
        for inner in inside:
            yield from _tables(inner, deep - 1, known)


def _holds_angles(tensor: Tensor) -> bool:
    """Whether it can be cosines and sines by position: those of the first, 0, are all 0 or the amplitude."""
    if tensor.is_meta or tensor.is_nested or tensor.dim() < 2 or not tensor.is_floating_point() or len(tensor) < 2:
        return False
    sizes = tensor.detach().abs().to(torch.float32)
    first, largest = sizes[0], sizes.max()
    return bool(largest > 0) and bool(((first == 0) | (first >= largest * (1 - _PURE))).all())
