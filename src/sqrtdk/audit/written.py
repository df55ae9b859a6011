"""The root of a size as a user's code has it, and as it should be: what a line of code says is said back to its author.

z = q @ k.mT / math.sqrt(self.dim)         `/ math.sqrt(self.dim)`, for d = 16 `/ math.sqrt(16)`
sdpa(q, k, v, scale=self.dim ** -0.5)      `scale=self.dim ** -0.5`, for d = 16 `scale=16 ** -0.5`
"""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator

from sqrtdk.tracing.tape.places import file_of


def written_root(at: str | None, size: int) -> tuple[str, str] | None:
    """Return the only root on a line of code that scales something, and the same with another size below it.

    Args:
        at: File and line, "myport.py:14", as the record of a call of this process has them.
        size: The size that belongs below the root.

    Returns:
        Both as code; None if the file is not there, or if the line has no such root, or several.
    """
    shown, _, line = (at or "").rpartition(":")
    path = file_of(shown)
    if path is None or not line.isdecimal():
        return None
    text = _text(path)
    found = {
        (code, f"{before}{size}{after}")
        for node in _nodes(text)
        for code, before, after in _scaling(node, text)
        if getattr(node, "lineno", 0) <= int(line) <= (getattr(node, "end_lineno", 0) or 0)
    }
    return found.pop() if len(found) == 1 else None


def _text(path: str) -> str:
    """Return the file as it is now: it may have been mended since a report before."""
    linecache.checkcache(path)
    return "".join(linecache.getlines(path))


@functools.lru_cache(64)
def _nodes(text: str) -> tuple[ast.AST, ...]:
    try:
        return tuple(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError):
        return ()


def _scaling(node: ast.AST, text: str) -> Iterator[tuple[str, str, str]]:
    """Yield the code of a factor that is a root, and what stands in it before and after the size."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Div, ast.Mult)):
        sign = "/" if isinstance(node.op, ast.Div) else "*"
        yield from _of_root(node.right, text, f"{sign} ")
    elif isinstance(node, ast.keyword) and node.arg in ("scale", "softmax_scale"):
        yield from _of_root(node.value, text, f"{node.arg}=")


def _of_root(root: ast.expr, text: str, start: str) -> Iterator[tuple[str, str, str]]:
    size: ast.expr | None = None
    if isinstance(root, ast.Call) and len(root.args) == 1 and not root.keywords:
        name = root.func.attr if isinstance(root.func, ast.Attribute) else getattr(root.func, "id", "")
        size = root.args[0] if name in ("sqrt", "rsqrt") else None
    elif isinstance(root, ast.BinOp) and isinstance(root.op, ast.Pow) and _half(root.right):
        size = root.left
    whole = None if size is None else ast.get_source_segment(text, root)
    inner = None if size is None else ast.get_source_segment(text, size)
    if whole is not None and inner is not None and whole.count(inner) == 1 and "\n" not in whole:
        before, _, after = whole.partition(inner)
        yield f"{start}{whole}", f"{start}{before}", after


def _half(power: ast.expr) -> bool:
    """Return whether a power is 0.5 or -0.5."""
    value = power.operand if isinstance(power, ast.UnaryOp) else power
    return isinstance(value, ast.Constant) and value.value == 0.5
