"""Everything that a model holds and a run may change: tensors, attributes, containers, generators.

The walk starts at the model and its inputs. It enters modules, their classes, lists, dicts, sets, and plain objects
such as a cache of keys. It does not enter functions: a hook of the user that counts how often a model runs goes on
counting. It leaves alone what belongs to a library's own machinery: a trainer, a logger, a thread, a compiled function.
"""

from __future__ import annotations

import array
import collections
import random
import sys
import types
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import chain
from operator import length_hint
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.errors import INTERRUPTS

MOST_HELD = 2_000_000  # entries of containers that are looked at, half a second
_MOST_ARRAY_BYTES = 2**28  # of an array of numpy that is copied
_DEEPEST = 3  # plain objects in one another, from a module on
_ATOMS = (int, float, str, complex, bytes, range, type(None), type(Ellipsis), torch.dtype, torch.device, torch.Size)
# Objects of these packages run the process or the training, and know themselves when they change.
_LEFT_ALONE = frozenset({
    "threading", "_thread", "logging", "multiprocessing", "concurrent", "asyncio", "socket", "subprocess", "weakref",
    "_weakref", "_weakrefset", "importlib", "io", "_io", "ctypes", "tempfile", "contextvars", "abc", "enum", "re",
    "inspect", "traceback", "torch", "sqrtdk", "lightning", "pytorch_lightning", "accelerate", "deepspeed", "wandb",
    "datasets", "tokenizers", "pytest", "_pytest", "unittest",
})  # fmt: skip
_LIBRARIES = frozenset({"torch", "sqrtdk", "builtins", "typing", "abc", "collections", "transformers"})
_UNENTERED = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType, partial)
_NONE = object()


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Something that a run may change, except the numbers of a tensor.

    Attributes:
        path: Where it is, from the model: "blocks.0.cache".
        differs: Returns whether it is another than before.
        restore: Puts it back; None if that can't be done.
    """

    path: str
    differs: Callable[[], bool]
    restore: Callable[[], None] | None


@dataclass(slots=True, eq=False)
class Found:
    """The result of a walk.

    Attributes:
        tensors: Every tensor once, with its path.
        held: Everything else that may change.
        unread: Path and class of what raised when it was read.
        complete: Whether the walk came to its end.
    """

    tensors: list[tuple[str, Tensor]]
    held: list[Held]
    unread: list[tuple[str, str]] = field(default_factory=list)
    complete: bool = True


def find_held(roots: Mapping[str, Any]) -> Found:
    """Return the tensors, modules and other objects that some roots hold, the nearest first.

    Args:
        roots: Objects by name; the name begins the paths of what they hold, "" for a model.

    Example:
        >>> module = nn.Linear(2, 2)
        >>> module.log = [0]
        >>> [path for path, _ in find_held({"": module}).tensors]
        ['weight', 'bias']
    """
    found, visited, left = Found([], []), set[int](), MOST_HELD
    waiting = deque((value, path, 0) for path, value in roots.items())
    while waiting:
        value, path, depth = waiting.popleft()
        if isinstance(value, _ATOMS) or id(value) in visited:
            continue
        visited.add(id(value))
        if isinstance(value, Tensor):
            found.tensors.append((path, value))
            value_grad = value.grad if value.is_leaf else None
            if value_grad is not None:
                waiting.append((value_grad, f"{path}.grad", depth))
        elif isinstance(value, nn.Module):
            depth = 0
        try:
            held, inside = _contents(value, path, depth)
            found.held += held
            for entry, at, deeper in inside:
                left -= 1
                if not isinstance(entry, _ATOMS):
                    waiting.append((entry, at, deeper))
        except INTERRUPTS:
            raise
        except Exception:  # a user's class may override anything
            found.unread.append((path, type(value).__name__))
        if left < 0:
            found.complete = False
            break
    return found


_Inside = Iterator[tuple[Any, str, int]]


def _contents(value: Any, path: str, depth: int) -> tuple[list[Held], _Inside]:
    """Return what a value holds itself, and the values inside it that are still to be entered."""
    nothing: _Inside = iter(())
    if isinstance(value, dict):
        return [_of_dict(value, path)], ((entry, _at(path, key), depth) for key, entry in dict.items(value))
    if isinstance(value, list | deque):
        return [_of_list(value, path)], ((entry, f"{path}[{at}]", depth) for at, entry in enumerate(_entries(value)))
    if isinstance(value, tuple):
        return [], ((entry, f"{path}[{at}]", depth) for at, entry in enumerate(_entries(value)))
    if isinstance(value, set):
        return [_of_set(value, path)], ((entry, path, depth) for entry in _entries(value))
    if isinstance(value, bytearray | array.array) or _is_numpy(value, "ndarray"):
        return ([] if _is_numpy(value, "memmap") else [_of_array(value, path)]), nothing
    if (generator := _of_generator(value, path)) is not None:
        return [generator], nothing
    if isinstance(value, _UNENTERED):
        return [], nothing
    if isinstance(value, collections.abc.Iterator) and _top(type(value)) in ("builtins", "itertools"):
        return [_of_iterator(value, path)], nothing
    if isinstance(value, nn.Module):
        held, inside = _of_object(value, path, depth)
        classes = [_of_class(kind, path, depth) for kind in type(value).__mro__ if _top(kind) not in _LIBRARIES]
        return [*held, *chain(*(of for of, _ in classes))], chain(inside, *(within for _, within in classes))
    if isinstance(value, Tensor):  # attributes of a parameter, tensors that a subclass wraps
        return _of_object(value, path, depth)
    if depth < _DEEPEST and _top(type(value)) not in _LEFT_ALONE:
        return _of_object(value, path, depth + 1)
    return [], nothing


def _top(kind: type) -> str:
    return str(getattr(kind, "__module__", "")).partition(".")[0]


def _at(path: str, key: Any) -> str:
    """Return the path of an entry; tables that nn.Module keeps of its parts are not named."""
    return f"{path}[{key!r}]" if not isinstance(key, str) or path.endswith("]") else f"{path}.{key}".lstrip(".")


def _of_dict(value: dict[Any, Any], path: str) -> Held:
    """Return how to see whether the entries of a dict, or their order, changed, and how to restore them."""
    kind: Any = OrderedDict if isinstance(value, OrderedDict) else dict  # methods that a subclass may override
    before = list(kind.items(value))

    def differs() -> bool:
        now = kind.items(value)
        if len(now) != len(before):
            return True
        return any(a is not c or b is not d for (a, b), (c, d) in zip(now, before, strict=True))

    def restore() -> None:
        known = dict(before)
        for key in [key for key in kind.keys(value) if key not in known]:
            kind.__delitem__(value, key)
        for key, entry in before:
            if kind.get(value, key, _NONE) is not entry:
                kind.__setitem__(value, key, entry)
        if differs():  # the same entries in another order
            kind.clear(value)
            for key, entry in before:
                kind.__setitem__(value, key, entry)

    return Held(path, differs, restore)


def _entries(value: Any) -> list[Any]:
    """Return the entries of a sequence or set, without the methods that its class may override."""
    kind: Any = next(kind for kind in (list, deque, tuple, set) if isinstance(value, kind))
    return list(kind.__iter__(value))


def _of_list(value: list[Any] | deque[Any], path: str) -> Held:
    before = _entries(value)

    def differs() -> bool:
        now = _entries(value)
        return len(now) != len(before) or any(one is not two for one, two in zip(now, before, strict=True))

    def restore() -> None:
        if isinstance(value, list):
            list.__setitem__(value, slice(None), before)
        else:
            deque.clear(value)
            deque.extend(value, before)

    return Held(path, differs, restore)


def _of_set(value: set[Any], path: str) -> Held:
    before = set(_entries(value))

    def restore() -> None:
        set.clear(value)
        set.update(value, before)

    return Held(path, lambda: set(_entries(value)) != before, restore)


def _of_array(value: Any, path: str) -> Held:
    """Return how to see whether an array changed, and how to restore it; a large one is only watched by a checksum."""

    def read() -> tuple[Any, Any]:
        numbers = value.tobytes() if hasattr(value, "tobytes") else bytes(value)
        return getattr(value, "shape", None), zlib.crc32(numbers)

    at = read()
    if getattr(value, "nbytes", 0) > _MOST_ARRAY_BYTES:
        return Held(path, lambda: read() != at, None)
    before = value.copy() if hasattr(value, "copy") else value[:]

    def restore() -> None:
        if hasattr(value, "shape"):
            if value.shape != before.shape:
                value.resize(before.shape, refcheck=False)
            value[...] = before
        else:
            value[:] = before

    return Held(path, lambda: read() != at, restore)


def _is_numpy(value: Any, name: str) -> bool:
    numpy = sys.modules.get("numpy")
    kind = getattr(numpy if name == "ndarray" else getattr(numpy, "random", None), name, None)
    return kind is not None and isinstance(value, kind)


def _of_generator(value: Any, path: str) -> Held | None:
    """Return the state of a source of random numbers, or None for anything else."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return Held(path, lambda: not torch.equal(value.get_state(), state), lambda: _ignore(value.set_state(state)))
    if isinstance(value, random.Random):
        before = value.getstate()
        return Held(path, lambda: value.getstate() != before, lambda: value.setstate(before))
    if _is_numpy(value, "RandomState"):
        at = value.get_state(legacy=False)
        return Held(path, lambda: str(value.get_state(legacy=False)) != str(at), lambda: value.set_state(at))
    bits = value.bit_generator if _is_numpy(value, "Generator") else value
    if _is_numpy(bits, "BitGenerator"):
        drawn = bits.state
        return Held(path, lambda: str(bits.state) != str(drawn), lambda: setattr(bits, "state", drawn))
    return None


def _ignore(_: Any) -> None:
    """Drop a result."""


def _of_iterator(value: Any, path: str) -> Held:
    """Return an iterator with its position: it can't be set back, so a run that moves it is named."""

    def position() -> tuple[Any, ...]:
        frame = getattr(value, "gi_frame", None)
        known = repr(value) if type(value).__module__ == "itertools" else ""
        return known, length_hint(value, -1), None if frame is None else frame.f_lasti

    before = position()
    return Held(path, lambda: position() != before, None)


def _of_object(value: Any, path: str, depth: int) -> tuple[list[Held], _Inside]:
    """Return the attributes of an object, in its dictionary and in its slots."""
    fields = _fields(value)
    held = [_of_dict(fields, path)] if fields is not None else []
    before = [(slot, _slot_value(slot, value)) for slot in _slots_of(type(value))]  # type: ignore[arg-type]
    if before:
        held.append(_of_slots(value, before, path))
    inside = [] if fields is None else list(fields.items())
    parts = {"_parameters", "_buffers", "_modules"} if isinstance(value, nn.Module) else set()
    if parts:  # which hooks there are is put back, but an object that a user hooked in is an observer as we are
        hooks = [(name, entry) for name, entry in inside if name.endswith("hooks") and isinstance(entry, dict)]
        held += [_of_dict(entry, _at(path, name)) for name, entry in hooks]
        inside = [(name, entry) for name, entry in inside if not name.endswith("hooks")]
    named = chain(
        ((entry, path if name in parts else _at(path, name), depth) for name, entry in inside),
        ((entry, _at(path, slot.__name__), depth) for slot, entry in before if entry is not _NONE),
    )
    return held, named


def _fields(value: Any) -> dict[str, Any] | None:
    if isinstance(value, torch.jit.ScriptModule):
        return None
    try:
        fields = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return fields if isinstance(fields, dict) else None


@lru_cache(maxsize=512)
def _slots_of(kind: type) -> tuple[Any, ...]:
    return tuple(slot for base in kind.__mro__ for slot in vars(base).values() if _is_slot(slot))


def _is_slot(value: Any) -> bool:
    """Return whether it is a descriptor that `__slots__` makes; torch's own classes have others of this type."""
    return isinstance(value, types.MemberDescriptorType) and _top(value.__objclass__) not in ("builtins", "_thread")


def _slot_value(slot: Any, value: Any) -> Any:
    try:
        return slot.__get__(value)
    except AttributeError:
        return _NONE


def _of_slots(value: Any, before: list[tuple[Any, Any]], path: str) -> Held:
    def differs() -> bool:
        return any(_slot_value(slot, value) is not entry for slot, entry in before)

    def restore() -> None:
        for slot, entry in before:
            if _slot_value(slot, value) is entry:
                continue
            if entry is _NONE:
                slot.__delete__(value)
            else:
                slot.__set__(value, entry)

    return Held(path, differs, restore)


def _of_class(kind: type, path: str, depth: int) -> tuple[list[Held], _Inside]:
    """Return the attributes of a user's class: a count of what all its instances do, a cache that they share."""

    def attributes() -> dict[str, Any]:
        return {name: value for name, value in vars(kind).items() if name[:2] != "__" and name != "_abc_impl"}

    before = attributes()

    def changed() -> list[str]:
        now = attributes()
        return [name for name in {**before, **now} if now.get(name, _NONE) is not before.get(name, _NONE)]

    def restore() -> None:
        for name in changed():
            if name in before:
                type.__setattr__(kind, name, before[name])
            else:
                type.__delattr__(kind, name)

    at = f"{path}.{kind.__name__}".lstrip(".")
    held = Held(at, lambda: bool(changed()), restore)
    return [held], ((value, f"{at}.{name}", depth) for name, value in before.items())
