"""Where an equation of a jaxpr came from: the module path that it belongs to, and file and line of the user's code.

JAX notes at each equation a traceback, and a stack of scopes that flax pushes: `Net/layers_0/attn`. Without scopes, the
Python functions that ran are the modules, see `sqrtdk.frontends.frames`.

Inside a function that JAX traces by itself (`jit`, `scan`, `checkpoint`), tracebacks begin at that function, or have
those of the function's first caller where the trace came from a cache. They are put behind the traceback of the call.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from sqrtdk.frontends.arrays import is_standard, package_folder
from sqrtdk.frontends.frames import Frame, FunctionPaths
from sqrtdk.frontends.jax.arrays import jax

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_SCOPE_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "models.py")
# A scope that names no module: "btd,dhe->bthe" of einsum, "jax.nn.silu", classes of equinox
_NO_MODULE = re.compile(r"->|[,() ]|^(?:eqx|jax|jnp)\.|^dot_product_attention$")
_WRAPPED = re.compile(r"^(?:jit|jvp|vmap|transpose|checkpoint|rematted_computation|remat|closed_call)\((.*)\)$")
# Files of Keras that pass a call on: `keras.ops.softmax` to JAX, a layer's `__call__` to its `call`
_FORWARDING = re.compile(r"/keras/src/(?:activations|backend|ops|utils)/|/keras/src/layers/layer\.py$")
MARK = "@"  # before the path of a module in a scope that we push ourselves


@dataclass(frozen=True, slots=True)
class Where:
    """The place of an equation.

    Attributes:
        prefix: path that the scan around it has given: "layers.3"; "" outside of scans.
        layers: the numbers of the scans around it, each with the path of its layers.
        scopes: scopes that name modules, without those of the prefix.
        frames: functions that were running, outermost first.
        depth: number of frames that the prefix stands for.
        calls: the equations around it that hold it.
    """

    prefix: str = ""
    layers: tuple[tuple[str, int], ...] = ()
    scopes: tuple[str, ...] = ()
    frames: tuple[Frame, ...] = ()
    depth: int = 1
    calls: tuple[int, ...] = ()

    @property
    def line(self) -> tuple[str, int] | None:
        """Path of the source file and number of the line that wrote the equation; None if no user code was running."""
        return (self.frames[-1].file, self.frames[-1].line) if self.frames else None


@dataclass(slots=True)
class Places:
    """Finds the places of the equations of one program.

    Attributes:
        root: first scope of every equation, if it names the whole model.
        scoped: whether scopes name modules; functions are regions otherwise.
    """

    root: str = ""
    scoped: bool = False
    _functions: FunctionPaths = field(default_factory=FunctionPaths)

    def learn(self, jaxpr: Any, homes: frozenset[str]) -> None:
        """Set `scoped` and `root` from the scopes of a program's equations; call it before `of` and `path`.

        Args:
            jaxpr: The whole program.
            homes: First names of the parameters' paths, as "model" of "model.embed.weight". If all scopes begin with
                one name, and it is none of these, it is taken as the name of the whole model.
        """
        stacks = [scopes for eqn in equations(jaxpr) if (scopes := scopes_of(eqn))]
        self.scoped = any(scopes != (self.root,) for scopes in stacks)
        firsts = {scopes[0] for scopes in stacks if not scopes[0].startswith(MARK)}
        if not self.root and len(firsts) == 1 and not firsts <= homes and homes:
            self.root = firsts.pop()

    def of(self, eqn: Any, call: Where, name: str = "") -> Where:
        """Return the place of an equation.

        Args:
            eqn: The equation.
            call: Place of the call whose body holds the equation.
            name: Name of the function that the call runs; "" if it has none.
        """
        scopes = call.scopes + tuple(s for s in scopes_of(eqn) if not (s == self.root and not call.scopes))
        return replace(call, scopes=scopes, frames=_behind(call.frames, frames_of(eqn), name))

    def path(self, where: Where) -> str:
        """Return the path of the module that an equation at a place belongs to, as "layers.3.attn"; "" is the root.

        It is made of the scopes if they name modules, and of the names of the functions otherwise.
        """
        if not self.scoped:
            return ".".join(filter(None, [where.prefix, *self._functions.names(where.frames, where.depth)]))
        marks = [scope for scope in where.scopes if scope.startswith(MARK)]
        inner = marks[-1].removeprefix(MARK) if marks else ".".join(where.scopes)
        for home, number in where.layers:  # the scope of a scan's body has the name of the layers without a number
            if inner == home or inner.startswith(f"{home}."):
                inner = f"{home}.{number}{inner.removeprefix(home)}"
            elif not home or not inner.startswith(f"{home}.{number}"):
                inner = ".".join(filter(None, [home, str(number), inner]))
        return inner


def equations(jaxpr: Any) -> list[Any]:
    """Return the equations of a jaxpr in order, followed by those of the jaxprs inside it (loops, calls, branches)."""
    every = list(jaxpr.eqns)
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    every += equations(inner)
    return every


def scopes_of(eqn: Any) -> tuple[str, ...]:
    """Return the scopes of an equation (`jax.named_scope`) that name modules, outermost first.

    Names that transformations such as `jvp` wrap around a scope are removed.
    """
    scopes = []
    for part in str(eqn.source_info.name_stack).split("/"):
        while (inner := _WRAPPED.match(part)) is not None:
            part = inner.group(1)
        if part and not _NO_MODULE.search(part):
            scopes.append(part)
    return tuple(scopes)


def frames_of(eqn: Any) -> tuple[Frame, ...]:
    """Return the functions of the user's code that were running when an equation was written, outermost first.

    Functions of this package and of libraries that only pass a call on are left out.
    """
    traceback = eqn.source_info.traceback
    frames: list[Frame] = []
    for frame in () if traceback is None else traceback.frames:
        file = frame.file_name
        if file == _SCOPE_FILE:  # it calls the user's modules, and is called by them
            continue
        if file.startswith(_OURS):  # what called the front end wrote nothing
            break
        if not _forwards(file):
            frames.append(Frame(file, frame.function_name, frame.line_num))
    return tuple(reversed(frames))


def line_of_error(error: BaseException) -> str:
    """Return the innermost line of the user's code that an error went through, as "net.py:6"; "" if there is none."""
    line, at = "", error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        if not file.startswith(_OURS) and not _forwards(file):
            line = f"{file}:{at.tb_lineno}"
        at = at.tb_next
    return line


@lru_cache(2**10)
def _forwards(file: str) -> bool:
    """Return whether a file only passes calls on: of JAX, Keras or Python, such as `contextlib` around a function."""
    passed = is_standard(file) or file.startswith((package_folder(jax()), "<frozen"))
    return passed or _FORWARDING.search(Path(file).as_posix()) is not None


def _behind(call: tuple[Frame, ...], own: tuple[Frame, ...], name: str) -> tuple[Frame, ...]:
    """Return the frames of an equation inside a call.

    Example:
        >>> fn, g, attention = Frame("a.py", "fn", 3), Frame("a.py", "g", 9), Frame("a.py", "attention", 5)
        >>> _behind((fn,), (attention,), "attention") == (fn, attention)  # they begin at the function
        True
        >>> _behind((fn,), (Frame("a.py", "fn", 2), attention), "") == (fn, attention)  # those of its first caller
        True
        >>> _behind((fn,), (g, attention), "attention") == (fn, attention)
        True
    """
    if not own or not call:
        return own or call
    same = [(frame.file, frame.function) for frame in call]
    if [(frame.file, frame.function) for frame in own[: len(call)]] == same:
        return call + own[len(call) :]
    begins = next((at for at, frame in enumerate(own) if name and frame.name == name), 0)
    return call if own[0] == call[0] and not begins else call + own[begins:]
