"""Finds the source line of an operation, the module that runs it, and the model's names for its tensors.

A place is the innermost frame of the model's own code. It is noted at every operation as a code object and the offset
of the instruction, which only costs a walk over the frames of torch and the trace. It becomes text, `myport.py:14`,
only in a record.
"""

from __future__ import annotations

import functools
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from sqrtdk._wrappers import named_buffers, named_modules, named_parameters

Place = tuple[CodeType, int]

FORWARDING_PACKAGES = ("einops", "opt_einsum", "jaxtyping", "beartype", "functorch")  # packages that only forward calls


# The owner of a file, best first: without a frame of the model, the frame of the next best owner is the place. An
# audit or a comparison starts the run, so the walk stops there: frames that called it are not part of the model.
_MODEL, _OURS, _LAYER, _NOBODY, _AUDIT = range(5)

_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_head", "n_heads", "nhead", "heads", "h")
_MOST_NESTED_OBJECTS = 4  # levels of nested objects, containers and tensors that are searched
_MOST_CACHE_ITEMS = 64  # a container with more items is not a cache of tables
_FIRST_ROW_TOLERANCE = 1e-6  # relative rounding of an angle table's first row

_SQRTDK = str(Path(__file__).absolute().parents[2]) + os.sep
_TORCH = str(Path(torch.__file__).absolute().parent) + os.sep
_TORCH_NN_FOLDER = os.path.join(_TORCH, "nn") + os.sep
_STANDARD = sysconfig.get_path("stdlib") + os.sep
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_FORWARDING_FOLDERS = tuple(f"{home}{name}{os.sep}" for home in _INSTALLED for name in FORWARDING_PACKAGES)
_MACHINERY = {
    _SQRTDK + "tracing" + os.sep: _NOBODY,
    _SQRTDK + os.path.join("models", "run.py"): _NOBODY,  # its modes run between the model and torch
    _SQRTDK + os.path.join("models", "alone.py"): _NOBODY,
    _SQRTDK + "_modes.py": _NOBODY,
    _SQRTDK + "audit" + os.sep: _AUDIT,
    _SQRTDK + os.path.join("compare", "sides.py"): _AUDIT,  # the one file of a comparison that runs models
    _SQRTDK + os.path.join("recording", "record.py"): _AUDIT,
}
_owners: dict[str, int] = {}  # by file name
_files: dict[str, str] = {}  # absolute paths by the paths that `place_text` returned


def current_place() -> Place | None:
    """Return the place of the running operation: a code object and the offset of its instruction.

    It is in the innermost frame of the model's own code, or else in the nearest other frame that counts. None if no
    Python code runs the operation.
    """
    frame: FrameType | None = sys._getframe(1)
    nearest, rank = None, _NOBODY
    while frame is not None:
        code = frame.f_code
        owner = _owners.get(code.co_filename)
        if owner is None:
            owner = _owners[code.co_filename] = _owner(code.co_filename)
        if owner is _MODEL:
            return code, frame.f_lasti
        if owner is _AUDIT:
            break
        if owner < rank:
            nearest, rank = (code, frame.f_lasti), owner
        frame = frame.f_back
    return nearest


def _owner(file: str) -> int:
    """Return the owner of a file, by its name."""
    if file.startswith(("<frozen", "<@")):  # frozen modules of Python, wrappers of beartype
        return _NOBODY
    path = os.path.abspath(file)
    for beginning, owner in _MACHINERY.items():
        if path.startswith(beginning):
            return owner
    if path.startswith(_SQRTDK):
        return _OURS
    if path.startswith(_TORCH):
        return _LAYER if path.startswith(_TORCH_NN_FOLDER) else _NOBODY
    standard = path.startswith(_STANDARD) and not is_installed(path)
    return _NOBODY if standard or any(name in path for name in _FORWARDING_FOLDERS) else _MODEL


def place_text(place: Place | None) -> str | None:
    """Return a place as `path:line`, or None without one.

    The path is relative to the `sys.path` entry of the import, or to the working directory for a script. It is
    absolute only if it lies below neither.
    """
    if place is None:
        return None
    code, offset = place
    lines = (line for start, end, line in code.co_lines() if line is not None and start <= offset < end)
    return f"{_path(code.co_filename)}:{next(lines, code.co_firstlineno)}"


def first_line(code: CodeType) -> str:
    """Return the file and the first line of a function, as `path:line`."""
    return f"{_path(code.co_filename)}:{code.co_firstlineno}"


def file_of(shown: str) -> str | None:
    """Return the absolute path of the file in a text of `place_text` or `first_line`; None for any other text."""
    return _files.get(shown)


def is_installed(file: str) -> bool:
    """Return whether a file belongs to an installed package, judged by the folders in its path."""
    return any(name in file for name in _INSTALLED)


def _path(file: str) -> str:
    try:
        working = os.getcwd()
    except OSError:  # the working directory was deleted
        return file
    shown = _shown(file, working, tuple(sys.path), getattr(sys.modules.get("__main__"), "__file__", None))
    if not file.startswith("<"):
        _files[shown] = os.path.abspath(file)
    return shown


@functools.lru_cache(256)
def _shown(file: str, working: str, paths: tuple[object, ...], main: str | None) -> str:
    """Return the relative path for a working directory, `sys.path` and the script that runs."""
    if file.startswith("<"):  # code that was never in a file
        return file
    path = os.path.abspath(file)
    homes = sorted((os.path.abspath(entry) for entry in paths if isinstance(entry, str)), key=len, reverse=True)
    script = main is not None and os.path.abspath(main) == path
    for home in [working, *homes] if script else [*homes, working]:
        if path.startswith(beginning := home.rstrip(os.sep) + os.sep):
            return path.removeprefix(beginning).replace(os.sep, "/")
    return path


class Sites:
    """Follows module calls through torch's global hooks; the modules themselves are not touched."""

    def __init__(self, model: nn.Module | None) -> None:
        self.names: dict[int, str] = {}
        self.classes: dict[str, str] = {}
        self.modules: dict[str, nn.Module] = {}
        if model is not None:
            for name, module in named_modules(model):
                self.learn(name, module)
        self.stack: list[nn.Module] = []
        self.entering: Callable[[nn.Module, tuple[Any, ...]], None] | None = None  # called at outermost module calls
        self.leaving: Callable[[nn.Module, Any], None] | None = None  # called at the end of every module call
        self._thread = threading.get_ident()
        self._handles: list[Any] = []

    def __enter__(self) -> Sites:
        self._thread = threading.get_ident()
        self._handles = [
            torch_module.register_module_forward_pre_hook(self._push),
            torch_module.register_module_forward_hook(self._pop, always_call=True),
        ]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.stack.clear()

    def learn(self, name: str, module: nn.Module) -> None:
        """Set the name by which a module appears in the record, its site.

        Args:
            name: path of the module in the model.
            module: the module.
        """
        self.names[id(module)] = name
        self.classes[name] = type(module).__name__
        self.modules[name] = module

    def follow_here(self, module: nn.Module) -> None:
        """Follow the calling thread, in which `module` runs: a backward pass may run in a thread of its own."""
        if self._thread != threading.get_ident():
            self._thread = threading.get_ident()
            self.stack.append(module)

    def follow(self, thread: int) -> None:
        """Follow the module calls of another thread from now on.

        Args:
            thread: its number, from `threading.get_ident()`.
        """
        self._thread = thread

    def _push(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if not self.stack and self.entering is not None:
            self.entering(module, args)
        self.stack.append(module)

    def _pop(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if self.leaving is not None:
            self.leaving(module, output)
        while self.stack:
            if self.stack.pop() is module:
                break

    def here(self) -> str:
        """Return the path of the innermost running module of the model, "" at the root or outside of it."""
        for module in reversed(self.stack):
            name = self.names.get(id(module))
            if name is not None:
                return name
        return ""

    def name_of(self, parameter: nn.Parameter) -> str | None:
        """Return the name of a parameter held by a running module or a child of the innermost one, else None."""
        for module in reversed(self.stack):
            path = self.names.get(id(module))
            held = module.named_parameters(recurse=module is self.stack[-1])
            name = next((name for name, one in held if one is parameter), None)
            if path is not None and name is not None:
                return f"{path}.{name}" if path else name
        return None


def module_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of the parameters, the buffers, and the tensors among the attributes of all modules.

    Attributes that are containers or plain objects are searched as well, to a limited depth.
    """
    yield from named_parameters(model)
    yield from named_buffers(model)
    known: set[int] = set()
    for path, module in named_modules(model):
        for key, item in vars(module).items():
            if key in ("_parameters", "_buffers", "_modules"):
                continue
            yield from ((f"{path}.{key}".lstrip("."), tensor) for tensor in _held(item, _MOST_NESTED_OBJECTS, known))


def _held(item: object, deep: int, known: set[int], *, sure: bool = True) -> Iterator[Tensor]:
    """Yield the tensors in an attribute; those nested deeper than one container only if they may be rotary tables.

    Such a cache is `rotation.tables[device][length] = (cosines, sines)`.
    """
    if isinstance(item, Tensor):
        if sure or _holds_angles(item):
            yield item
    elif deep and id(item) not in known:
        known.add(id(item))
        inside, sure = _items(item), sure and isinstance(item, (list, tuple, dict))
        for inner in inside if sure or len(inside) <= _MOST_CACHE_ITEMS else ():
            yield from _held(inner, deep - 1, known, sure=sure and deep == _MOST_NESTED_OBJECTS)


def _items(item: object) -> list[object]:
    """Return the items of a container or the attributes of an object without calling its own methods.

    Returns [] for a module, which `module_tensors` visits itself.
    """
    held: object = item
    if isinstance(item, (nn.Module, ModuleType)):
        return []
    if isinstance(item, (list, tuple)):
        return list(list.__iter__(item) if isinstance(item, list) else tuple.__iter__(item))
    if not isinstance(item, dict):
        with suppress(Exception):  # an unknown object may raise on any access
            held = getattr(item, "__dict__", None)  # a mappingproxy if the item is a class
    return list(dict.values(held)) if isinstance(held, dict) else []


def _holds_angles(tensor: Tensor) -> bool:
    """Whether a tensor may hold cos and sin by position: at position 0 they are all 0 or the amplitude."""
    if tensor.is_meta or tensor.is_nested or tensor.dim() < 2 or not tensor.is_floating_point() or len(tensor) < 2:
        return False
    sizes = tensor.detach().abs().to(torch.float32)
    first, largest = sizes[0], sizes.max()
    return bool(largest > 0) and bool(((first == 0) | (first >= largest * (1 - _FIRST_ROW_TOLERANCE))).all())


def local_of(tensor: Tensor) -> Tensor:
    """Return the plain tensor that this rank holds: the local shard of a DTensor, else the tensor itself."""
    local = getattr(tensor, "_local_tensor", None)
    return local if isinstance(local, Tensor) else tensor


def inner_tensors(tensor: Tensor, deep: int = _MOST_NESTED_OBJECTS) -> Iterator[Tensor]:
    """Yield the tensor, and the tensors that it holds as attributes if it is of a subclass, as quantised weights are.

    Args:
        tensor: the tensor.
        deep: how many levels of attributes to search.
    """
    yield tensor
    if deep and type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        for item in vars(tensor).values():
            if isinstance(item, Tensor):
                yield from inner_tensors(item, deep - 1)


def declared_heads(modules: Mapping[str, nn.Module], site: str) -> int | None:
    """Return the number of heads that a module declares in an attribute such as `num_heads`.

    Args:
        modules: the modules by path.
        site: path of the module; if it declares none, its parents are asked, the nearest first.

    Returns:
        The number; None if no module declares one.
    """
    while True:
        module = modules.get(site)
        for name in _HEAD_COUNTS:
            with suppress(Exception):  # a model's own __getattr__ may raise anything
                heads = getattr(module, name, None)
                if isinstance(heads, int) and heads > 0:
                    return heads
        if not site:
            return None
        site = site.rpartition(".")[0]
