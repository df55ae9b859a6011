"""The lines of a custom `backward` that make the gradient of an operand.

    @staticmethod
    def backward(ctx, do):
        ...
        dq = dz @ k * scale        # of q
        dk = dz.mT @ q             # of k
        return dq, dk, p.mT @ do   # of v

What `backward` returns in the place of an argument is the gradient of that argument, and the graph tells which argument
an operand is. A name that is returned is followed to the statement that gives it its value, and the ones that write to
it afterwards. Branches that give it different values are not followed.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sqrtdk.laws.backward.graph import graph_place, nodes_behind
from sqrtdk.laws.backward.handles import Edge
from sqrtdk.tracing.tape.places import first_line

_MOST_PLACES = 3  # of a gradient that is written to in several places


@dataclass(frozen=True, slots=True)
class BackwardLines:
    """Where a custom function makes the gradients of some operands.

    Attributes:
        at: Files and lines, "kernel.py:27, kernel.py:29"; "" if they are not known.
        code: What stands there, if it is one line; else "".
    """

    at: str = ""
    code: str = ""


def custom_functions(nodes: Iterable[Any]) -> list[Any]:
    """Return the nodes of functions that are written in Python."""
    return [node for node in nodes if getattr(type(node), "_forward_cls", None) is not None]


def arguments_of(node: Any, places: Mapping[str, Edge]) -> dict[str, int]:
    """Return the number of the argument of a custom function that each operand is, for those that are one alone.

    Args:
        node: The function's node.
        places: Places of operands, by the names of their gradients.
    """
    needed = [number for number, needs in enumerate(node.needs_input_grad) if needs]
    entries = [entry for entry, _ in node.next_functions if entry is not None]
    if len(needed) != len(entries):
        return {}
    nodes = {name: graph_place(edge).node for name, edge in places.items()}
    found: dict[str, int] = {}
    for number, entry in zip(needed, entries, strict=True):
        at = [name for name, place in nodes.items() if place is entry]
        behind = nodes_behind(entry) if not at else set()
        at = at or [name for name, place in nodes.items() if place in behind]
        if len(at) == 1:
            found[at[0]] = number if at[0] not in found else -1
    return {name: number for name, number in found.items() if number >= 0}


def backward_lines(node: Any, arguments: Iterable[int]) -> BackwardLines:
    """Return the lines of a custom function's `backward` that make the gradients of some of its arguments.

    Args:
        node: The function's node.
        arguments: Numbers of its arguments.
    """
    try:
        backward = inspect.unwrap(type(node)._forward_cls.backward)
        lines, start = inspect.getsourcelines(backward)
        tree = ast.parse(textwrap.dedent("".join(lines))).body[0]
    except (OSError, TypeError, SyntaxError, AttributeError, IndexError):
        return BackwardLines()
    if not isinstance(tree, ast.FunctionDef):
        return BackwardLines()
    numbers: list[int] = []
    for argument in arguments:
        made = _made(tree, argument, len(node.needs_input_grad))
        if not made:
            return BackwardLines()
        numbers += [number for number in made if number not in numbers]
    if not 0 < len(numbers) <= _MOST_PLACES:
        return BackwardLines()
    file = first_line(backward.__code__).rpartition(":")[0]
    code = lines[numbers[0] - 1].strip() if len(numbers) == 1 else ""
    return BackwardLines(", ".join(f"{file}:{start + number - 1}" for number in sorted(numbers)), code)


def _made(tree: ast.FunctionDef, argument: int, count: int) -> list[int]:
    """Return the lines, from 1, that make what a function returns in the place of an argument; [] if unknown."""
    returns = [node for node in _statements(tree) if isinstance(node, ast.Return)]
    if len(returns) != 1 or returns[0].value is None:
        return []
    value: ast.expr = returns[0].value
    if isinstance(value, ast.Tuple):
        if len(value.elts) != count or any(isinstance(one, ast.Starred) for one in value.elts):
            return []
        value = value.elts[argument]
    elif count != 1:
        return []
    if not isinstance(value, ast.Name):
        return [value.lineno]
    writes = [one for one in _statements(tree) if _writes(one, value.id) and one.lineno <= returns[0].lineno]
    values = [one for one in writes if isinstance(one, ast.Assign | ast.AnnAssign) and not _into(one, value.id)]
    if len(values) > 1:  # dk = None, and a value if it is needed
        values = [one for one in values if not (isinstance(one.value, ast.Constant) and one.value.value is None)]
    branched = [one for one in values if _in_branch(tree, one)]
    if not values or (branched and len(values) > 1):
        return []
    last = max(values, key=lambda one: one.lineno)
    return [last.lineno, *(one.lineno for one in writes if one.lineno > last.lineno)]


def _statements(tree: ast.AST) -> list[Any]:
    """Return the statements of a function in the order of its lines, without those of functions inside it."""
    found: list[Any] = []
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Lambda):
            continue
        found += [node] if isinstance(node, ast.stmt) else []
        found += _statements(node)
    return found


def _targets(node: ast.stmt) -> list[ast.expr]:
    targets = node.targets if isinstance(node, ast.Assign) else []
    targets = [node.target] if isinstance(node, ast.AugAssign | ast.AnnAssign) else targets
    return [
        one for target in targets for one in (target.elts if isinstance(target, ast.Tuple | ast.List) else [target])
    ]


def _writes(node: ast.stmt, name: str) -> bool:
    """Return whether a statement gives a name its value or writes to what it holds: dk = ..., dk[i] += ..."""
    if any(isinstance(one, ast.Name) and one.id == name for one in _targets(node)) or _into(node, name):
        return True
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and call.func.attr.endswith("_")
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == name
    )


def _into(node: ast.stmt, name: str) -> bool:
    """Return whether a statement writes to a part of what a name holds: dk[:, :, rows] = ..."""
    return any(
        isinstance(one, ast.Subscript) and isinstance(one.value, ast.Name) and one.value.id == name
        for one in _targets(node)
    )


def _in_branch(tree: ast.AST, statement: ast.stmt) -> bool:
    return any(
        isinstance(node, ast.If | ast.Try | ast.Match) and any(inner is statement for inner in ast.walk(node))
        for node in ast.walk(tree)
    )
