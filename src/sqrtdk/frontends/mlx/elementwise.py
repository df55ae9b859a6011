"""MLX's operations on single numbers and along axes, as torch operations."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sqrtdk.frontends.arrays import both_tensors, larger, smaller
from sqrtdk.frontends.mlx.nodes import Operation, Primitive, on_one, on_two
from sqrtdk.frontends.program import RunDtypes

_LOGARITHMS = (torch.log2, torch.log10, torch.log)  # in the order of MLX's enum


def _pair(function: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    return lambda numbers, node, a, b: function(*both_tensors(a, b))


def _floats(value: Any) -> bool:
    return isinstance(value, float) or (isinstance(value, Tensor) and value.is_floating_point())


def _floor_divide(a: Any, b: Any) -> Any:
    return torch.floor(a / b) if _floats(a) or _floats(b) else torch.div(
        *both_tensors(a, b), rounding_mode="floor")  # fmt: skip


def _divmod(numbers: RunDtypes, node: Primitive, a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Quotient towards zero and its rest, as in C."""
    a, b = both_tensors(a, b)
    return torch.div(a, b, rounding_mode="trunc"), torch.fmod(a, b)


def _sqrt(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    return torch.rsqrt(x) if node.args and node.args[0] else torch.sqrt(x)


def _log(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    return _LOGARITHMS[int(node.args[0])](x)


def _equal(numbers: RunDtypes, node: Primitive, a: Any, b: Any) -> Tensor:
    same: Tensor = a == b
    return same | (a != a) & (b != b) if node.args and node.args[0] else same


def _logical(function: Callable[[Tensor, Tensor], Tensor]) -> Operation:
    return lambda numbers, node, a, b: function(*(x.bool() for x in both_tensors(a, b)))


_BITWISE: tuple[Callable[[Any, Any], Any], ...] = (
    operator.and_, operator.or_, operator.xor, operator.lshift, operator.rshift,
)  # fmt: skip


def _bitwise(numbers: RunDtypes, node: Primitive, a: Any, b: Any) -> Any:
    return _BITWISE[int(node.args[0])](*both_tensors(a, b))


def _select(numbers: RunDtypes, node: Primitive, which: Any, a: Any, b: Any) -> Tensor:
    which = which if isinstance(which, Tensor) else torch.tensor(which, device=numbers.device)
    return torch.where(which.bool(), a, b)


def _sign(x: Tensor) -> Tensor:
    return x.sgn() if x.is_complex() else x.sign()


def _round(x: Tensor) -> Tensor:
    return torch.round(x) if x.is_floating_point() else x


def _sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    kept = x.dtype if x.is_floating_point() or x.is_complex() else torch.int64
    return x.sum(axes, keepdim=True, dtype=kept)


def _product(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    for axis in axes:
        x = x.prod(axis, keepdim=True)
    return x


# In the order of MLX's enum: and, or, sum, product, min, max.
_REDUCERS: tuple[Callable[[Tensor, tuple[int, ...]], Tensor], ...] = (
    lambda x, axes: torch.all(x, axes, keepdim=True), lambda x, axes: torch.any(x, axes, keepdim=True), _sum, _product,
    lambda x, axes: torch.amin(x, axes, keepdim=True), lambda x, axes: torch.amax(x, axes, keepdim=True),
)  # fmt: skip


def _reduce(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    kind, axes = node.args
    return _REDUCERS[int(kind)](x, tuple(axes)) if len(axes) else x


def _arg_reduce(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    kind, axis = node.args
    return (torch.argmax if int(kind) else torch.argmin)(x, axis, keepdim=True)


# In the order of MLX's enum: max, min, sum, product.
_SCANS: tuple[Callable[[Tensor, int], Tensor], ...] = (
    lambda x, axis: x.cummax(axis).values, lambda x, axis: x.cummin(axis).values,
    lambda x, axis: x.cumsum(axis), lambda x, axis: x.cumprod(axis),
)  # fmt: skip


def _scan(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    kind, axis, reverse, inclusive = node.args
    made = _SCANS[int(kind)](x.flip(axis) if reverse else x, axis)
    if not inclusive:  # the first is what the operation starts from
        start = (-math.inf, math.inf, 0, 1)[int(kind)]
        if not x.is_floating_point() and math.isinf(start):
            start = torch.iinfo(x.dtype).min if start < 0 else torch.iinfo(x.dtype).max
        first = torch.full_like(made.narrow(axis, 0, 1), start)
        made = torch.cat([first, made.narrow(axis, 0, made.shape[axis] - 1)], axis)
    return made.flip(axis) if reverse else made


MLX_ELEMENTWISE: dict[str, Operation] = {
    "Abs": on_one(torch.abs), "Negative": on_one(torch.neg), "Sign": on_one(_sign), "Square": on_one(lambda x: x * x),
    "Exp": on_one(torch.exp), "Expm1": on_one(torch.expm1), "Log1p": on_one(torch.log1p), "Log": _log, "Sqrt": _sqrt,
    "Sin": on_one(torch.sin), "Cos": on_one(torch.cos), "Tan": on_one(torch.tan), "ArcSin": on_one(torch.asin),
    "ArcCos": on_one(torch.acos), "ArcTan": on_one(torch.atan), "Sinh": on_one(torch.sinh), "Cosh": on_one(torch.cosh),
    "Tanh": on_one(torch.tanh), "ArcSinh": on_one(torch.asinh), "ArcCosh": on_one(torch.acosh),
    "ArcTanh": on_one(torch.atanh), "Erf": on_one(torch.erf), "ErfInv": on_one(torch.erfinv),
    "Sigmoid": on_one(torch.sigmoid),
    "Ceil": on_one(torch.ceil), "Floor": on_one(torch.floor), "Round": on_one(_round),
    "Real": on_one(torch.real), "Imag": on_one(torch.imag), "Conjugate": on_one(torch.conj_physical),
    "LogicalNot": on_one(torch.logical_not),
    "Add": on_two(operator.add), "Subtract": on_two(operator.sub), "Multiply": on_two(operator.mul),
    "Divide": on_two(operator.truediv), "Power": on_two(operator.pow), "Remainder": _pair(torch.remainder),
    "FloorDivide": on_two(_floor_divide), "DivMod": _divmod, "Maximum": on_two(larger), "Minimum": on_two(smaller),
    "ArcTan2": _pair(torch.atan2), "LogAddExp": _pair(torch.logaddexp), "Equal": _equal,
    "NotEqual": on_two(operator.ne), "Greater": on_two(operator.gt), "GreaterEqual": on_two(operator.ge),
    "Less": on_two(operator.lt), "LessEqual": on_two(operator.le), "LogicalAnd": _logical(torch.logical_and),
    "LogicalOr": _logical(torch.logical_or), "BitwiseBinary": _bitwise, "Select": _select,
}  # fmt: skip

MLX_OVER_AXES: dict[str, Operation] = {
    "Reduce": _reduce, "ArgReduce": _arg_reduce, "Scan": _scan,
    "Softmax": on_one(lambda x: torch.softmax(x, -1)),
    "LogSumExp": on_one(lambda x: torch.logsumexp(x, -1, keepdim=True)),
}  # fmt: skip
