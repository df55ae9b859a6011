"""What a vector is multiplied by to normalise it: `c / length`, by the constants between the length and the product."""

from __future__ import annotations

import math

from sqrtdk.tracing.watch.graph import Node

LENGTHS = frozenset({"linalg_vector_norm", "norm"})
REDUCTIONS = frozenset({"mean", "var", "std", "sum"}) | LENGTHS
_OF_SQUARES = frozenset({"mean", "var", "sum"})
_POWERS = {"sqrt": 0.5, "rsqrt": -0.5, "reciprocal": -1.0}
_MOST_EPS = 1e-2  # a length kept from falling below more is cut off, not kept from zero
_LARGEST = 700.0  # logarithm of what a float holds


def numerator(size: Node, op: str) -> float:
    """`c` of a vector times (`op` "mul") or over (`op` "div") a size that is `c / length` or `length / c`."""
    log_c, _ = _law(size)
    log_c = log_c if op == "mul" else -log_c
    return math.exp(log_c) if abs(log_c) < _LARGEST else 1.0


def clips(node: Node, size: Node) -> bool:
    """Whether a clamp of a size lets short vectors be and cuts long ones, as no normalisation does."""
    log_c, n = _law(size)
    bound = _bound(node, upper=n < 0.0)
    if bound is None or not 0.0 < bound < math.inf or n == 0.0:
        return False
    return (math.log(bound) - log_c) / n > math.log(_MOST_EPS)  # logarithm of the length at the bound


def _bound(node: Node, *, upper: bool) -> float | None:
    if node.op == "clamp":
        return node.number(2 if upper else 1)
    return node.number(1) if node.op in (("clamp_max", "minimum") if upper else ("clamp_min", "maximum")) else None


def _law(size: Node) -> tuple[float, float]:
    """`(log c, n)` of a size that is `c * length**n`, its sign and what was added to it left out."""
    before = size.main()
    if size.op in REDUCTIONS or before is None:
        return 0.0, 2.0 if size.op in _OF_SQUARES else 1.0
    log_c, n = _law(before)
    position = 1 if size.args[0] is before else 0
    log_number = _log(size.number(position))
    if size.op == "mul":
        return log_c + log_number, n
    if size.op == "div":
        return (log_c - log_number, n) if position == 1 else (log_number - log_c, -n)
    power = size.number(1) if size.op == "pow" and position == 1 else _POWERS.get(size.op)
    return (log_c, n) if power is None else (log_c * power, n * power)


def _log(number: float | None) -> float:
    return math.log(abs(number)) if number else 0.0
