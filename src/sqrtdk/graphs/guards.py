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
Condition = Callable[[Shapes], int]


class _Unread(Exception):
    """Something else than sizes and whole numbers, a size that no input has, or a number that grows too large."""


@dataclass(frozen=True, slots=True)
class Guards:
    """Conditions on sizes."""

    read: tuple[tuple[str, Condition], ...] = ()  # those that can be worked out, by their text
    unread: int = 0  # how many can't
    nodes: int = 0  # of the trees of those that can

    def broken_at(self, shapes: Shapes, first: int = 0) -> int | None:
        """The place of a condition that is not met, the one at `first` looked at before the others."""
        places = itertools.chain(range(len(self.read))[first : first + 1], range(len(self.read)))
        for place in places:
            try:
                if not self.read[place][1](shapes):
                    return place
            except (_Unread, ZeroDivisionError, RecursionError):
                continue
        return None


def read_guards(lines: Iterable[Any]) -> Guards:
    """The conditions in the lines of a program."""
    read: list[tuple[str, Condition]] = []
    unread = nodes = 0
    for text in itertools.islice(lines, MOST_GUARDS):
        try:
            if not isinstance(text, str) or len(text) > _MOST_TEXT:
                raise _Unread
            tree = ast.parse(text, mode="eval").body
            read.append((text, _condition(tree)))
            nodes += sum(1 for _ in ast.walk(tree))
        except (_Unread, SyntaxError, ValueError, RecursionError, MemoryError):
            unread += 1
    return Guards(tuple(read), unread, nodes)


def meet(
    guards: Guards,
    wanted: Mapping[str, int],
    shapes: Callable[[Mapping[str, int]], Shapes],
    bounds: Mapping[str, Bounds] | None = None,
) -> dict[str, int]:
    """Sizes by symbol, near the wanted ones, that meet the conditions; the wanted ones where none of those tried does.

    `shapes` are those of the inputs, for sizes of the symbols.

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


def _condition(tree: ast.expr) -> Condition:
    """A tree as a function of shapes; it calls nothing but the operators above, and of anything else is `_Unread`."""
    match tree:
        case ast.Subscript(  # L['x'].size()[1]
            value=ast.Call(
                func=ast.Attribute(
                    value=ast.Subscript(value=ast.Name(id="L"), slice=ast.Constant(value=str(name))), attr="size"
                ),
                args=[],
                keywords=[],
            ),
            slice=ast.Constant(value=int(axis)),
        ):
            return lambda shapes: _size(shapes, name, axis)
        case ast.Constant(value=int(value)) if type(value) is int and abs(value) < _LARGEST:
            return lambda _: value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _applied(_BINARY[type(op)], [left, right])
        case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
            return _applied(operator.neg if isinstance(op, ast.USub) else operator.not_, [operand])
        case ast.BoolOp(op=op, values=values):
            join, parts = all if isinstance(op, ast.And) else any, [*map(_condition, values)]
            return lambda shapes: join(part(shapes) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARED for op in ops):
            tests = [_COMPARED[type(op)] for op in ops]
            return _applied(lambda *n: all(t(*pair) for t, pair in zip(tests, itertools.pairwise(n), strict=True)),
                            [left, *others])  # fmt: skip
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as args, keywords=[]) if name in _CALLED:
            return _applied(_CALLED[name], args)
    raise _Unread


def _applied(function: Callable[..., int], operands: Sequence[ast.expr]) -> Condition:
    parts = [*map(_condition, operands)]

    def run(shapes: Shapes) -> int:
        made = function(*(part(shapes) for part in parts))
        if abs(made) > _LARGEST:
            raise _Unread
        return made

    return run


def _size(shapes: Shapes, name: str, axis: int) -> int:
    if name not in shapes or not 0 <= axis < len(shapes[name]):
        raise _Unread
    return int(shapes[name][axis])
