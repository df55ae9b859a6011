"""Functions of the user's code that were running when an operation was written, and the modules that they stand for.

Where a framework names no modules, the Python functions that ran are the modules: the call `attention(x, p)` in `layer`
is the region "attention" of it. A second call of that function from another line is the region "attention_". Where it
has modules, `__call__` of their classes is wrapped while a model is traced, which says which of them runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

_UNNAMED = ("<lambda>", "<listcomp>", "<genexpr>", "<dictcomp>", "<setcomp>", "<module>")


@dataclass(frozen=True, slots=True)
class Frame:
    """A function of the user's code that was running, with the line that it had reached.

    Attributes:
        file: Path of the source file.
        function: Qualified name, as "Attention.__call__".
        line: Number of the line.
    """

    file: str
    function: str  # qualified name
    line: int

    @property
    def name(self) -> str:
        """Name of the region that a call of it is; "" for a lambda or a comprehension.

        Example:
            >>> Frame("net.py", "make.<locals>.block", 3).name, Frame("net.py", "Attention.__call__", 9).name
            ('block', 'Attention')
            >>> Frame("net.py", "make.<locals>.<lambda>", 3).name
            ''
        """
        parts = self.function.split(".")
        if parts[-1] in _UNNAMED:
            return ""
        return parts[-2] if parts[-1] in ("__call__", "forward") and len(parts) > 1 else parts[-1]


@dataclass(slots=True)
class FunctionPaths:
    """Names the regions of one program after its functions."""

    _lines: dict[tuple[str, str, str], list[int]] = field(default_factory=dict)

    def names(self, frames: Sequence[Frame], depth: int = 1) -> list[str]:
        """Return the names of the regions that an operation lies in, outermost first.

        Args:
            frames: The functions that were running, outermost first.
            depth: Number of outer frames that make no region.
        """
        made = []
        for outer, inner in zip(frames[depth - 1 :], frames[depth:], strict=False):
            if not inner.name:
                continue
            lines = self._lines.setdefault((outer.file, outer.function, inner.name), [])
            if outer.line not in lines:
                lines.append(outer.line)
            # no number: modules of two models are paired by the numbers in their paths
            made.append(inner.name + "_" * lines.index(outer.line))
        return made


@contextmanager
def wrapped_calls(
    parts: Mapping[str, Any], around: Callable[[str], AbstractContextManager[Any]], owners: Iterable[type] | None = None
) -> Iterator[None]:
    """Run each call of a model's parts inside `around(path)`. Afterwards the classes are as they were.

    Args:
        parts: The modules of the model, by path.
        around: Returns a context for the path of a module.
        owners: The classes whose `__call__` runs; None: those of the parts that write one.
    """
    paths = {id(part): path for path, part in parts.items()}
    if owners is None:
        # the class that writes `__call__`: a class below it would run a wrapped one twice
        owners = {type(part) for part in parts.values() if "__call__" in vars(type(part))}
    before = {owner: vars(owner)["__call__"] for owner in owners}
    for owner, written in before.items():
        setattr(owner, "__call__", _inside(written, paths, around))  # noqa: B010
    try:
        yield
    finally:
        for owner, written in before.items():
            setattr(owner, "__call__", written)  # noqa: B010


def _inside(written: Any, paths: Mapping[int, str], around: Callable[[str], AbstractContextManager[Any]]) -> Any:
    @wraps(written)
    def call(self: Any, *args: Any, **named: Any) -> Any:
        path = paths.get(id(self))
        bound = written.__get__(self, type(self))
        if path is None:
            return bound(*args, **named)
        with around(path):
            return bound(*args, **named)

    return call
