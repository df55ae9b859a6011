"""Nested inputs and outputs: arrays in tuples, lists, dicts, and in objects, as a cache of mlx_lm is.

    (ids, [KVCache(keys, values, offset=7)])    leaves: ids, keys, values, 7

An object is taken apart by its attributes and put together as a copy of it, so that a function that writes into its
cache never changes the caller's.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from sqrtdk.frontends.mlx.arrays import holds_numbers


@dataclass(frozen=True, slots=True)
class Tree:
    """How leaves nest. Two that nest in the same way are equal.

    Attributes:
        keys: keys or names of what is inside, in order.
        inside: trees, with None for a leaf.
        build: makes the container of its parts.
        shape: what two trees that nest in the same way have in common.
    """

    keys: tuple[Any, ...] = field(compare=False)
    inside: tuple[Tree | None, ...] = field(compare=False)
    build: Callable[[Sequence[Any]], Any] = field(compare=False)
    shape: Hashable


def flatten(value: Any) -> tuple[list[Any], list[str], Tree | None]:
    """Return the leaves of a value, the path of each with dots, and how they nest.

    Example:
        >>> leaves, paths, tree = flatten({"layers": [1, 2], "norm": 3})
        >>> leaves, paths, unflatten(tree, [4, 5, 6])
        ([1, 2, 3], ['layers.0', 'layers.1', 'norm'], {'layers': [4, 5], 'norm': 6})
    """
    leaves: list[Any] = []
    paths: list[str] = []

    def visit(value: Any, path: str, around: tuple[int, ...]) -> Tree | None:
        parts = None if id(value) in around else _parts(value)
        if parts is None:
            leaves.append(value)
            paths.append(path)
            return None
        keys, values, build = parts
        inside = tuple(
            visit(v, f"{path}.{k}" if path else str(k), (*around, id(value))) for k, v in zip(keys, values, strict=True)
        )
        return Tree(tuple(keys), inside, build, (type(value), tuple(keys), tuple(t and t.shape for t in inside)))

    tree = visit(value, "", ())
    return leaves, paths, tree


def unflatten(tree: Tree | None, leaves: Sequence[Any]) -> Any:
    """Return leaves nested as a tree says."""
    return _filled(tree, iter(leaves))


def _filled(tree: Tree | None, leaves: Iterator[Any]) -> Any:
    return next(leaves) if tree is None else tree.build([_filled(inner, leaves) for inner in tree.inside])


def _parts(value: Any) -> tuple[list[Any], list[Any], Callable[[Sequence[Any]], Any]] | None:
    """Return keys, values and the way back of a container; None for a leaf."""
    if type(value) is dict:
        keys = list(value)
        return keys, list(value.values()), lambda made: dict(zip(keys, made, strict=True))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(value._fields), list(value), lambda made: type(value)(*made)
    if type(value) in (tuple, list):
        return list(range(len(value))), list(value), type(value)
    if holds_numbers(value) or callable(value) or isinstance(value, ModuleType) or not hasattr(value, "__dict__"):
        return None
    names = list(vars(value))

    def build(made: Sequence[Any]) -> Any:
        other = copy.copy(value)
        for name, part in zip(names, made, strict=True):
            object.__setattr__(other, name, part)
        return other

    return names, list(vars(value).values()), build
