"""What a vector is multiplied by to normalise it: `c / length`, by the constants on the way to either of them."""

from __future__ import annotations

import math

from torch import Tensor

from sqrtdk.tracing.watch import ops
from sqrtdk.tracing.watch.graph import Node, capacity, is_learned

LENGTHS = frozenset({"linalg_vector_norm", "norm"})
REDUCTIONS = frozenset({"mean", "var", "std", "sum"}) | LENGTHS
_OF_SQUARES = frozenset({"mean", "var", "sum"})
_CLAMPS = frozenset({"clamp", "clamp_max", "clamp_min", "minimum", "maximum"})
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_MOST_EPS = 1e-2  # a length kept from falling below more is cut off, not kept from zero
_LARGEST = 700.0  # logarithm of what a float holds


def numerator(size: Node, divided: Node, op: str) -> float:
    """`c` of a vector times (`op` "mul") or over (`op` "div") a size that is `c / length` or `length / c`.

    Constants on the vector count beside those on its length; a gain that learns is none.
    """
    sign, log_c, _ = _law(size)
    log_c = log_c if op == "mul" else -log_c
    measured = _measured(size)
    (base, sign_v, log_v), (source, _, log_m) = _bare(divided), _bare(measured)
    if base is source:
        sign, log_c = sign * sign_v, log_c + log_v - log_m
    return sign * math.exp(log_c) if abs(log_c) < _LARGEST else 1.0


def learned_gain(size: Node, op: str) -> tuple[Node, Tensor | None] | None:
    """The one number that learns and that a size is multiplied by, as its node and value; None where there is none."""
    positions = {"mul": (0, 1), "div": (0,)}.get(size.op, ()) if op == "mul" else ()
    for position in positions:
        arg = size.args[position]
        if isinstance(arg, Node) and not arg.act and _learns(arg) and capacity(arg) == 1:
            return arg, size.operands.get(position)
    return None


def clips(node: Node, size: Node) -> bool:
    """Whether a clamp of a size lets short vectors be and cuts long ones, as no normalisation does."""
    if node.op not in _CLAMPS:
        return False
    _, log_c, n = _law(size)
    bound = _bound(node, upper=n < 0.0)
    if bound is None or not 0.0 < bound < math.inf or n == 0.0:
        return False
    return (math.log(bound) - log_c) / n > math.log(_MOST_EPS)  # logarithm of the length at the bound


def _bound(node: Node, *, upper: bool) -> float | None:
    if node.op == "clamp":
        return node.number(2 if upper else 1)
    return node.number(1) if node.op in (("clamp_max", "minimum") if upper else ("clamp_min", "maximum")) else None


def _law(size: Node) -> tuple[float, float, float]:
    """`(sign, log |c|, n)` of a size that is `c * length**n`, what was added to it left out."""
    *steps, reduction = _steps(size)
    sign, log_c, n = 1.0, 0.0, 2.0 if reduction.op in _OF_SQUARES else 1.0
    for node, before in zip(reversed(steps), (reduction, *reversed(steps)), strict=False):
        position = 1 if node.args[0] is before else 0
        if node.op == "neg":
            sign = -sign
        elif node.op in ("mul", "div"):
            sign_number, log_number = _constant(node, position)
            sign *= sign_number
            if node.op == "div" and position == 0:
                log_c, n = log_number - log_c, -n
            else:
                log_c += log_number if node.op == "mul" else -log_number
        else:
            power = node.number(1) if node.op == "pow" and position == 1 else _POWERS.get(node.op)
            sign, log_c, n = (sign, log_c, n) if power is None else (1.0, log_c * power, n * power)
    return sign, log_c, n


def _steps(size: Node) -> list[Node]:
    """A size and what it was made from, down to the reduction."""
    steps = [size]
    while steps[-1].op not in REDUCTIONS and (before := steps[-1].main()) is not None:
        steps.append(before)
    return steps


def _measured(size: Node) -> Node:
    """The vector whose length a size is."""
    reduction = _steps(size)[-1]
    vector = reduction.main() or reduction
    squared = vector.op == "pow" or (vector.op == "mul" and len({*vector.parents()}) == 1)
    return (vector.main() or vector) if reduction.op in ("mean", "sum") and squared else vector


def _bare(node: Node) -> tuple[Node, float, float]:
    """What a vector is a constant times, and that constant's sign and logarithm."""
    sign, log_c = 1.0, 0.0
    while not node.is_root and (before := node.main()) is not None:
        if node.op == "neg":
            sign = -sign
        elif node.op in ("mul", "div") and node.args[0] is before and node.number(1) and not _learns(node.args[1]):
            sign_number, log_number = _constant(node, 1)
            sign, log_c = sign * sign_number, log_c + (log_number if node.op == "mul" else -log_number)
        elif node.op not in ops.SAME:
            break
        node = before
    return node, sign, log_c


def _constant(node: Node, position: int) -> tuple[float, float]:
    """Sign and logarithm of the number at `position`; those of 1 where it is none, or learns."""
    number = None if _learns(node.args[position]) else node.number(position)
    return (math.copysign(1.0, number), math.log(abs(number))) if number else (1.0, 0.0)


def _learns(arg: object) -> bool:
    return isinstance(arg, Node) and is_learned(arg)
