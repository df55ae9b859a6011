"""Where an operation of an MLX graph came from: the module that was running, and file and line of the user's code.

A graph of MLX names neither. While a function is traced, the functions of `mlx.core` and the operators of arrays are
wrapped: each result passes through `mx.depends(result, number)`, an operation that changes nothing and holds a number.
The graph then has this operation behind what the call made, and the number says which call it was:

    h = x @ w        Matmul -> Depends(., 7)      7: line 12 of net.py, in layers.0.attn
    h += y           Add -> Depends(., 8)

The operations are known in the order in which they were written, as well. Afterwards all is as it was.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from sqrtdk.frontends.arrays import is_standard, package_folder
from sqrtdk.frontends.frames import Frame, FunctionPaths, wrapped_calls
from sqrtdk.frontends.mlx.arrays import mlx
from sqrtdk.frontends.mlx.models import MlxModel
from sqrtdk.frontends.mlx.trees import flatten, unflatten

FIRST_MARK = 2**52  # no program counts this far
NOT_EXPORTED = re.compile(r"Unable to get state for primitive (\w+)")  # what MLX says of a primitive
_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MLX_MODULES = ("", "fast", "random", "linalg", "fft")  # of mlx.core
# Functions that make no array of others, or take functions: their results are left alone.
_NOT_WRAPPED = frozenset({"depends", "eval", "async_eval", "load", "save", "vmap", "grad", "vjp", "jvp",
    "value_and_grad", "compile", "export_function", "export_to_dot", "exporter", "import_function", "checkpoint",
    "synchronize", "seed", "key", "default_device", "default_stream", "stream"})  # fmt: skip
# Methods of arrays that make arrays, and those that write into one.
_METHODS = frozenset({
    "abs", "all", "any", "argmax", "argmin", "astype", "conj", "cos", "cummax", "cummin", "cumprod", "cumsum", "diag",
    "diagonal", "exp", "flatten", "log", "log10", "log1p", "log2", "logcumsumexp", "logsumexp", "max", "mean", "min",
    "moveaxis", "prod", "reciprocal", "reshape", "round", "rsqrt", "sin", "split", "sqrt", "square", "squeeze", "std",
    "sum", "swapaxes", "transpose", "var", "view", "__abs__", "__add__", "__and__", "__eq__", "__floordiv__", "__ge__",
    "__getitem__", "__gt__", "__invert__", "__le__", "__lshift__", "__lt__", "__matmul__", "__mod__", "__mul__",
    "__ne__", "__neg__", "__or__", "__pow__", "__radd__", "__rfloordiv__", "__rmod__", "__rmul__", "__rpow__",
    "__rshift__", "__rsub__", "__rtruediv__", "__sub__", "__truediv__", "__xor__",
})  # fmt: skip
_WRITING = frozenset({
    "__iadd__", "__iand__", "__ifloordiv__", "__ilshift__", "__imatmul__", "__imod__", "__imul__", "__ior__",
    "__ipow__", "__irshift__", "__isub__", "__itruediv__", "__ixor__", "__setitem__",
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Mark:
    """One call of a function of MLX.

    Attributes:
        module: path of the module that was running; "" for none.
        frames: functions of the user's code that were running, outermost first.
        inner: innermost function of mlx.nn that the last of them called, as `Linear.__call__`; None for none.
    """

    module: str
    frames: tuple[Frame, ...]
    inner: Frame | None = None


@dataclass(slots=True)
class Marks:
    """The calls of one trace, in their order.

    Attributes:
        calls: the calls; the number of a call is its index and `FIRST_MARK`.
        scoped: whether modules are known; functions are regions otherwise.
    """

    calls: list[Mark] = field(default_factory=list)
    scoped: bool = False
    _running: list[str] = field(default_factory=list)
    _paused: int = 0
    _functions: FunctionPaths = field(default_factory=FunctionPaths)

    def path(self, mark: Mark) -> str:
        """Return the path of the module that a call belongs to."""
        return mark.module if self.scoped else ".".join(self._functions.names(mark.frames))

    @contextmanager
    def running(self, path: str) -> Iterator[None]:
        """Note that a module runs."""
        self._running.append(path)
        try:
            yield
        finally:
            self._running.pop()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Mark nothing: `mx.vmap` has no rule for a mark."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def number(self) -> int | None:
        """Return the number of a new call, made where the caller's caller is; None while paused."""
        if self._paused:
            return None
        self.calls.append(Mark(self._running[-1] if self._running else "", *_frames()))
        return FIRST_MARK + len(self.calls) - 1


def _frames() -> tuple[tuple[Frame, ...], Frame | None]:
    """Return the functions of the user's code that are running, up to the front end itself, and the one of mlx.nn."""
    made: list[Frame] = []
    inner: Frame | None = None
    frame: Any = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        name = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has the bare name
        file = code.co_filename
        if file.startswith(_OURS) and code.co_name == "traced_call":
            break
        if not _forwards(file):
            made.append(Frame(file, name, frame.f_lineno))
        elif not made and inner is None and file.startswith(package_folder(mlx())):
            inner = Frame(file, name, frame.f_lineno)
        frame = frame.f_back
    return tuple(reversed(made)), inner


def _forwards(file: str) -> bool:
    """Return whether a file only passes calls on: one of MLX, of Python or of this package."""
    return is_standard(file) or file.startswith((_OURS, "<frozen", package_folder(mlx())))


@contextmanager
def marked(model: MlxModel) -> Iterator[Marks]:
    """Mark the results of all calls of MLX while the context lasts.

    Args:
        model: The model that is traced; the calls of its modules are noted.

    Yields:
        The marks, filled while the model runs.
    """
    marks = Marks(scoped=len(model.modules) > 1)
    with ExitStack() as stack:
        if model.modules:
            stack.enter_context(wrapped_calls(model.modules, marks.running))
        stack.enter_context(_replaced(_wrapped(marks)))
        yield marks


@contextmanager
def _replaced(written: Iterator[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put other values at names of objects: (object, name, value). Afterwards all is as it was."""
    with ExitStack() as stack:
        for owner, name, value in list(written):
            stack.callback(setattr, owner, name, vars(owner)[name])
            setattr(owner, name, value)
        yield


def unread_calls(run: Callable[[], Any], reads: Callable[[str], bool]) -> dict[str, str]:
    """Return the primitives of a function that are not read, with the line of the first call that makes each.

    MLX stops at the first primitive that it can't export, and tells no place. Here the function runs by itself, and
    each of its calls of MLX is exported alone.

    Args:
        run: The function, with its arguments.
        reads: Returns whether a primitive is read.
    """
    core = mlx()
    found: dict[str, str] = {}

    def alone(function: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            mark = Mark("", *_frames())
            place = f"{mark.frames[-1].file}:{mark.frames[-1].line}" if mark.frames else ""
            for name in _primitives(function, args, named):
                if not reads(name):
                    found.setdefault(name, place)
            return function(*args, **named)

        return _named_as(call, function)

    with _replaced(_functions(core, alone)), suppress(Exception):
        run()
    return found


def _primitives(function: Any, args: tuple[Any, ...], named: dict[str, Any]) -> list[str]:
    """Return the names of the primitives that one call makes, or of the one that can't be exported."""
    core = mlx()
    leaves, _, tree = flatten([args, named])
    arrays = [leaf for leaf in leaves if isinstance(leaf, core.array)]
    records: list[Any] = []

    def alone(*values: Any) -> Any:
        given = iter(values)
        filled, more = unflatten(tree, [next(given) if isinstance(leaf, core.array) else leaf for leaf in leaves])
        made = function(*filled, **more)
        return made if isinstance(made, core.array) else list(made)

    try:
        core.export_function(records.append, alone, *arrays)
    except Exception as error:  # a call that makes no arrays can't be exported either, and has nothing to read
        return [match[1]] if (match := NOT_EXPORTED.search(str(error))) else []
    return [record["name"] for record in records if record["type"] == "primitive"]


def _wrapped(marks: Marks) -> Iterator[tuple[Any, str, Any]]:
    """Yield owners, names and what stands there while a function is traced."""
    core, array = mlx(), mlx().array
    mark, put = _marking(marks), array.__setitem__
    yield from _functions(core, lambda function: _result_marked(function, mark))
    yield core, "checkpoint", lambda function: function
    yield core, "vmap", _vmap(core.vmap, marks)
    for name in sorted(_WRITING):
        if name in vars(array):
            yield array, name, _in_place(vars(array)[name], mark, put)


def _functions(core: Any, wrap: Callable[[Any], Any]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the functions and methods that make arrays, wrapped: owner, name, and what stands there."""
    other = _exportable()
    for room in _MLX_MODULES:
        owner: Any = getattr(core, room) if room else core
        for name, function in list(vars(owner).items()):
            if type(function).__name__ == "nb_func" and name not in _NOT_WRAPPED and not name.startswith("_"):
                yield owner, name, wrap(other.get(name, function))
    yield core.custom_function, "__call__", wrap(vars(core.custom_function)["__call__"])
    for name in sorted(_METHODS):
        if name in vars(core.array):
            yield core.array, name, wrap(other.get(name, vars(core.array)[name]))


def _exportable() -> dict[str, Callable[..., Any]]:
    """Return functions that do the same with primitives that MLX can export, by name."""
    core = mlx()
    invert, xor, whole = core.logical_not, core.bitwise_xor, core.array
    same = core.stop_gradient  # changes no number: contiguous() says how they lie in memory

    def inverted(x: Any) -> Any:
        return invert(x) if x.dtype == core.bool_ else xor(x, whole(-1).astype(x.dtype))

    return {"contiguous": lambda x, *_, **__: same(x), "bitwise_invert": inverted, "__invert__": inverted}


def _marking(marks: Marks) -> Callable[[Any], Any]:
    core, depends = mlx(), mlx().depends

    def mark(made: Any) -> Any:
        if isinstance(made, core.array):
            number = marks.number()
            return made if number is None else depends(made, core.array(number, core.int64))
        if isinstance(made, list | tuple) and made and all(isinstance(each, core.array) for each in made):
            number = marks.number()
            return made if number is None else type(made)(
                depends(each, core.array(number, core.int64)) for each in made)  # fmt: skip
        return made

    return mark


def _result_marked(function: Any, mark: Callable[[Any], Any]) -> Any:
    def call(*args: Any, **named: Any) -> Any:
        return mark(function(*args, **named))

    return _named_as(call, function)


def _in_place(function: Any, mark: Callable[[Any], Any], put: Any) -> Any:
    def call(self: Any, *args: Any) -> Any:
        made = function(self, *args)
        if isinstance(self, mlx().array) and self.ndim:
            put(self, slice(None), mark(self))  # writes the marked array in place of itself, and adds no operation
        return made

    return _named_as(call, function)


def _vmap(function: Any, marks: Marks) -> Any:
    def vmap(mapped: Any, *args: Any, **named: Any) -> Any:
        def quiet(*values: Any, **more: Any) -> Any:
            with marks.paused():
                return mapped(*values, **more)

        return function(quiet, *args, **named)

    return _named_as(vmap, function)


def _named_as(call: Any, function: Any) -> Any:
    call.__name__ = getattr(function, "__name__", call.__name__)
    return call
