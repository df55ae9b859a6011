"""Reads the conditions that an exported program puts on the sizes of its inputs, without running them.

`torch.export` writes each condition on a free size as a line of Python: "(L['x'].size()[1] % 4) == 0". The file is
untrusted, so its lines are parsed and never executed. A line of sizes, integers and a few operators is evaluated here;
any other line is counted as unread.
"""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MOST_GUARDS = 2**12
_MOST_TEXT = 2**12  # characters of one condition
_MOST_TRIES = 2**11  # combinations of sizes to try
_MOST_WORK = 2**17  # syntax nodes evaluated over all tries: the file chooses how long its conditions are
_MOST_SIZE_DISTANCE = 2**7  # largest distance of a tried size from the wanted one
_SMALLEST_FREE_SIZE = 2  # torch.export specialises a size of 1, so that it is another program
_LARGEST_INTEGER = 2**62

Shapes = Mapping[str, Sequence[int]]
Bounds = tuple[int | None, int | None]
_BINARY: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip
_COMPARISONS: dict[type[ast.cmpop], Callable[[int, int], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_CALLED: dict[str, Callable[..., int]] = {"max": max, "min": min, "Max": max, "Min": min}
Condition = Callable[[Shapes], int]


class _Unread(Exception):
    """A condition with other terms than sizes and integers, a missing axis, or a number that grows too large."""


@dataclass(frozen=True, slots=True)
class Guards:
    """The conditions under which an exported program may run, on the sizes of its inputs: `s0 >= 2`, for example."""

    read: tuple[tuple[str, Condition], ...] = ()  # text and function of each condition that can be evaluated
    unread: int = 0  # number of conditions that can't
    nodes: int = 0  # syntax nodes of the conditions in `read`

    def broken_at(self, shapes: Shapes, first: int = 0) -> int | None:
        """Return the index of a condition that the sizes of the inputs break; None if all hold.

        Args:
            shapes: Shapes of the inputs by name.
            first: Index of the condition to test first; one that was broken before is likely to be broken again.
        """
        places = itertools.chain(range(len(self.read))[first : first + 1], range(len(self.read)))
        for place in places:
            try:
                if not self.read[place][1](shapes):
                    return place
            except (_Unread, ZeroDivisionError, RecursionError):
                continue
        return None


def read_guards(lines: Iterable[Any]) -> Guards:
    """Return the conditions that are written in the lines of a program.

    They are parsed, never executed. Lines in another form are counted in `unread`.
    """
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


def sizes_meeting(
    guards: Guards,
    wanted: Mapping[str, int],
    shapes: Callable[[Mapping[str, int]], Shapes],
    bounds: Mapping[str, Bounds] | None = None,
) -> dict[str, int]:
    """Return sizes by symbol that meet the conditions and are close to the wanted ones.

    Returns the wanted sizes if none of the tried combinations meets them. `shapes` computes the shapes of the inputs
    from the sizes of the symbols; `bounds` holds the smallest and largest size of a symbol.

    Example:
        >>> guards = read_guards(["(L['x'].size()[1] % 4) == 0"])
        >>> sizes_meeting(guards, {"s": 37}, lambda sizes: {"x": (2, sizes["s"])})
        {'s': 36}
    """
    limits = {name: (bounds or {}).get(name, (None, None)) for name in wanted}
    work = guards.nodes + sum(map(len, shapes(wanted).values()))
    # Long conditions and many inputs get fewer tries, so that a file can't make this slow.
    tries = max(1, min(_MOST_TRIES, _MOST_WORK // max(work, 1)))
    broken: int | None = 0
    for sizes in itertools.islice(_near(wanted, limits), tries):
        # The condition that failed last is the likeliest to fail again, so it is tested first.
        broken = guards.broken_at(shapes(sizes), broken or 0)
        if broken is None:
            return sizes
    return dict(wanted)


def _near(wanted: Mapping[str, int], limits: Mapping[str, Bounds]) -> Iterator[dict[str, int]]:
    """Yield the wanted sizes, then sizes at growing distance from them."""
    yield dict(wanted)
    for beyond in range(1, _MOST_SIZE_DISTANCE):
        steps = [_steps(number, beyond, limits[name]) for name, number in wanted.items()]
        for numbers in itertools.islice(itertools.product(*steps), 1, None):  # the first combination is the wanted one
            yield dict(zip(wanted, numbers, strict=True))


def _steps(number: int, beyond: int, limits: Bounds) -> list[int]:
    low, high = limits
    least = _SMALLEST_FREE_SIZE if low is None else max(low, _SMALLEST_FREE_SIZE)
    above = number + beyond if high is None else min(number + beyond, high)
    return [*dict.fromkeys((number, above, max(number - beyond, min(number, least))))]


def _condition(tree: ast.expr) -> Condition:
    """Return a syntax tree as a function of shapes that uses only the operators above. Raises `_Unread` otherwise."""
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
        case ast.Constant(value=int(value)) if type(value) is int and abs(value) < _LARGEST_INTEGER:
            return lambda _: value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _applied(_BINARY[type(op)], [left, right])
        case ast.UnaryOp(op=ast.USub() | ast.Not() as op, operand=operand):
            return _applied(operator.neg if isinstance(op, ast.USub) else operator.not_, [operand])
        case ast.BoolOp(op=op, values=values):
            join, parts = all if isinstance(op, ast.And) else any, [*map(_condition, values)]
            return lambda shapes: join(part(shapes) for part in parts)
        case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _COMPARISONS for op in ops):
            tests = [_COMPARISONS[type(op)] for op in ops]
            return _applied(lambda *n: all(t(*pair) for t, pair in zip(tests, itertools.pairwise(n), strict=True)),
                            [left, *others])  # fmt: skip
        case ast.Call(func=ast.Name(id=name), args=[_, _, *_] as args, keywords=[]) if name in _CALLED:
            return _applied(_CALLED[name], args)
    raise _Unread


def _applied(function: Callable[..., int], operands: Sequence[ast.expr]) -> Condition:
    parts = [*map(_condition, operands)]

    def run(shapes: Shapes) -> int:
        made = function(*(part(shapes) for part in parts))
        if abs(made) > _LARGEST_INTEGER:
            raise _Unread
        return made

    return run


def _size(shapes: Shapes, name: str, axis: int) -> int:
    if name not in shapes or not 0 <= axis < len(shapes[name]):
        raise _Unread
    return int(shapes[name][axis])
