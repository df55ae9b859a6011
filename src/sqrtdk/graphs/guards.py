"""What an exported program asks of the sizes of its inputs, read without running it.

`torch.export` writes each condition on a free size as a line of Python: "(L['x'].size()[1] % 4) == 0". Lines of an
untrusted file are not run. They are parsed, and those of sizes, whole numbers and a few operators are worked out here;
of others nothing is known.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_GUARDS = 2**12
_MOST_TEXT = 2**12  # characters of one
_MOST_TRIES = 2**11  # sizes that are tried
_MOST_WORK = 2**17  # nodes of conditions that are worked out for all of them: a file chooses how many there are
_FURTHEST = 2**7  # of a size that is tried, beyond the one that is wanted
_LEAST = 2  # a size of 1 is another program, as torch exports it
_LARGEST = 2**62

Shapes = Mapping[str, Sequence[int]]
Bounds = tuple[int | None, int | None]
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_CALLED: dict[str, Callable[..., int]] = {"max": max, "min": min, "Max": max, "Min": min}


class _Unread(Exception):
    """Something else than sizes and whole numbers."""


@dataclass(frozen=True, slots=True)
class Guards:
    """Conditions on sizes.

    Attributes:
        read: those that can be worked out, with their text.
        unread: how many can't.
        nodes: of the trees of those that can.
    """

    read: tuple[tuple[str, ast.expr], ...] = ()
    unread: int = 0
    nodes: int = 0

    def broken(self, shapes: Shapes) -> str | None:
        """The first condition that sizes do not meet; None where they meet all that can be worked out."""
        place = self.broken_at(shapes)
        return None if place is None else self.read[place][0]

    def broken_at(self, shapes: Shapes, first: int = 0) -> int | None:
        """The place of a condition that is not met, the one at `first` looked at before the others."""
        places = itertools.chain(range(len(self.read))[first : first + 1], range(len(self.read)))
        for place in places:
            try:
                if not _value(self.read[place][1], shapes):
                    return place
            except (_Unread, ZeroDivisionError, RecursionError):
                continue
        return None


def read_guards(lines: Iterable[Any]) -> Guards:
    """The conditions in the lines of a program."""
    read: list[tuple[str, ast.expr]] = []
    unread = nodes = 0
    for text in itertools.islice(lines, MOST_GUARDS):
        tree = _parsed(text)
        if tree is None:
            unread += 1
        else:
            read.append((text, tree))
            nodes += sum(1 for _ in ast.walk(tree))
    return Guards(tuple(read), unread, nodes)


def meet(
    guards: Guards,
    wanted: Mapping[str, int],
    shapes: Callable[[Mapping[str, int]], Shapes],
    bounds: Mapping[str, Bounds] | None = None,
) -> dict[str, int]:
    """Sizes near the wanted ones that meet the conditions; the wanted ones where none of those tried does.

    Args:
        guards: the conditions.
        wanted: numbers by symbol.
        shapes: of the inputs, for numbers of the symbols.
        bounds: the least and the largest number of a symbol, None where it has none.

    Example:
        >>> guards = read_guards(["(L['x'].size()[1] % 4) == 0"])
        >>> meet(guards, {"s": 37}, lambda sizes: {"x": (2, sizes["s"])})
        {'s': 36}
    """
    limits = {name: (bounds or {}).get(name, (None, None)) for name in wanted}
    work = guards.nodes + sum(map(len, shapes(wanted).values()))
    tries = max(1, min(_MOST_TRIES, _MOST_WORK // max(work, 1)))
    broken: int | None = 0
    for sizes in itertools.islice(_near(wanted, limits), tries):
        broken = guards.broken_at(shapes(sizes), broken or 0)
        if broken is None:
            return sizes
    return dict(wanted)


def _near(wanted: Mapping[str, int], limits: Mapping[str, Bounds]) -> Iterator[dict[str, int]]:
    """The wanted sizes, and those beside them, near ones first."""
    yield dict(wanted)
    for beyond in range(1, _FURTHEST):
        steps = [_steps(number, beyond, limits[name]) for name, number in wanted.items()]
        for numbers in itertools.islice(itertools.product(*steps), 1, None):  # the first are the wanted ones
            yield dict(zip(wanted, numbers, strict=True))


def _steps(number: int, beyond: int, limits: Bounds) -> list[int]:
    low, high = limits
    least = _LEAST if low is None else max(low, _LEAST)
    above = number + beyond if high is None else min(number + beyond, high)
    return [*dict.fromkeys((number, above, max(number - beyond, min(number, least))))]


def _parsed(text: Any) -> ast.expr | None:
    """A line as a tree of what is worked out here; None where it holds anything else."""
    if not isinstance(text, str) or len(text) > _MOST_TEXT:
        return None
    try:
        tree = ast.parse(text, mode="eval").body
        return tree if _is_plain(tree) else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_plain(tree: ast.expr) -> bool:
    if _size_of(tree) is not None:
        return True
    if isinstance(tree, ast.Constant):
        return type(tree.value) is int and abs(tree.value) < _LARGEST
    if isinstance(tree, ast.BinOp):
        return type(tree.op) in _BINARY and _is_plain(tree.left) and _is_plain(tree.right)
    if isinstance(tree, ast.UnaryOp):
        return isinstance(tree.op, ast.USub | ast.Not) and _is_plain(tree.operand)
    if isinstance(tree, ast.BoolOp):
        return all(map(_is_plain, tree.values))
    if isinstance(tree, ast.Compare):
        return all(type(op) in _COMPARED for op in tree.ops) and all(map(_is_plain, (tree.left, *tree.comparators)))
    if isinstance(tree, ast.Call):
        return (
            isinstance(tree.func, ast.Name)
            and tree.func.id in _CALLED
            and not tree.keywords
            and len(tree.args) > 1
            and all(map(_is_plain, tree.args))
        )
    return False


def _size_of(tree: ast.expr) -> tuple[str, int] | None:
    """Input and axis of `L['x'].size()[1]`."""
    match tree:
        case ast.Subscript(
            value=ast.Call(
                func=ast.Attribute(
                    value=ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))), attr="size"
                ),
                args=[],
                keywords=[],
            ),
            slice=ast.Constant(value=int(axis)),
        ):
            return name, axis
    return None


def _value(tree: ast.expr, shapes: Shapes) -> int:
    """The number, or the truth, of a tree that `_is_plain`.

    Raises:
        _Unread: of an input, or an axis, that there is none of; the numbers grow too large.
    """
    if (found := _size_of(tree)) is not None:
        name, axis = found
        if name not in shapes or not 0 <= axis < len(shapes[name]):
            raise _Unread
        return int(shapes[name][axis])
    if isinstance(tree, ast.Constant):
        return int(tree.value)  # type: ignore[arg-type]
    if isinstance(tree, ast.BinOp):
        made = _BINARY[type(tree.op)](_value(tree.left, shapes), _value(tree.right, shapes))
        if abs(made) > _LARGEST:
            raise _Unread
        return made
    if isinstance(tree, ast.UnaryOp):
        inner = _value(tree.operand, shapes)
        return -inner if isinstance(tree.op, ast.USub) else int(not inner)
    if isinstance(tree, ast.BoolOp):
        values = (bool(_value(part, shapes)) for part in tree.values)
        return int(all(values) if isinstance(tree.op, ast.And) else any(values))
    if isinstance(tree, ast.Compare):
        numbers = [_value(part, shapes) for part in (tree.left, *tree.comparators)]
        return int(
            all(_COMPARED[type(op)](*pair) for op, pair in zip(tree.ops, itertools.pairwise(numbers), strict=True))
        )
    assert isinstance(tree, ast.Call)
    assert isinstance(tree.func, ast.Name)
    return _CALLED[tree.func.id](*(_value(part, shapes) for part in tree.args))
