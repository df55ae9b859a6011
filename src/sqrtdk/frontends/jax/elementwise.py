"""JAX's operations on single numbers and along axes, as torch operations.

Every operation is a function of the dtypes of the run, the values, and the primitive's parameters. A value is a tensor,
or a Python number where the program has a literal; at least one is a tensor. Parameters that decide rounding or
placement alone (`accuracy`, `sharding`) are ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sqrtdk.frontends.arrays import both_tensors, larger, like_other, smaller
from sqrtdk.frontends.jax.arrays import DTYPES, held_dtype
from sqrtdk.frontends.program import RunDtypes

Operation = Callable[..., Any]


def _of(function: Callable[..., Any]) -> Operation:
    return lambda numbers, *values, **_: function(*values)


def _unary(function: Callable[[Tensor], Tensor]) -> Operation:
    return lambda numbers, x, **_: function(x)


def _div(numbers: RunDtypes, a: Any, b: Any, **_: Any) -> Tensor:
    exact = any(isinstance(x, float | complex) or (isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()))
                for x in (a, b))  # fmt: skip
    quotient: Tensor = a / b if exact else torch.div(*both_tensors(a, b), rounding_mode="trunc")
    return quotient


def _clamp(numbers: RunDtypes, low: Any, x: Any, high: Any, **_: Any) -> Tensor:
    like = next(value for value in (x, low, high) if isinstance(value, Tensor))
    x = like_other(x, like)
    clamped: Tensor
    if not isinstance(low, Tensor) and not isinstance(high, Tensor):
        clamped = x.clamp(low, high)
        return clamped
    return torch.minimum(torch.maximum(x, like_other(low, x)), like_other(high, x))


def _power(numbers: RunDtypes, x: Any, exponent: Any = None, y: int | None = None, **_: Any) -> Any:
    return x ** (exponent if y is None else y)


def _round(numbers: RunDtypes, x: Tensor, rounding_method: Any, **_: Any) -> Tensor:
    # away from zero, or to the nearest even number
    return torch.trunc(x + x.sign() / 2) if int(rounding_method) == 0 else torch.round(x)


def _select(numbers: RunDtypes, which: Tensor, *cases: Any, **_: Any) -> Tensor:
    if len(cases) > 2:
        like = next((case for case in cases if isinstance(case, Tensor)), which)
        chosen = torch.stack([like_other(case, like).expand(which.shape) for case in cases])
        return chosen.gather(0, which.long().expand(chosen.shape[1:])[None])[0]
    return torch.where(which.bool(), cases[1], cases[0])


def _reduced(function: Callable[..., Tensor]) -> Operation:
    def reduce(numbers: RunDtypes, x: Tensor, axes: Any, **_: Any) -> Tensor:
        return function(x, tuple(map(int, axes))) if axes else x

    return reduce


def _sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.sum(axes, dtype=x.dtype)  # torch sums int32 in int64 otherwise


def _product(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    for axis in sorted(axes, reverse=True):
        x = x.prod(axis, dtype=x.dtype)
    return x


def _parity(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.sum(axes) % 2 == 1


def _extreme(function: Callable[[Tensor, int], Tensor]) -> Operation:
    def find(numbers: RunDtypes, x: Tensor, axes: Any, **_: Any) -> Tensor:
        return function(x.to(torch.uint8) if x.dtype is torch.bool else x, int(axes[0]))

    return find


def _cumulative(function: Callable[[Tensor, int], Tensor]) -> Operation:
    def run(numbers: RunDtypes, x: Tensor, axis: int, reverse: bool, **_: Any) -> Tensor:
        return function(x.flip(axis), axis).flip(axis) if reverse else function(x, axis)

    return run


def _convert(numbers: RunDtypes, x: Tensor, new_dtype: Any, **_: Any) -> Tensor:
    dtype = numbers.dtype(held_dtype(new_dtype))
    if not dtype.is_floating_point and not dtype.is_complex and dtype is not torch.bool and x.is_floating_point():
        return x.trunc().to(dtype)
    return x if x.dtype is dtype else (x.real if x.is_complex() and not dtype.is_complex else x).to(dtype)


def _reduce_precision(numbers: RunDtypes, x: Tensor, exponent_bits: int, mantissa_bits: int, **_: Any) -> Tensor:
    if numbers.wide is not None:
        return x
    dtype = {(5, 10): torch.float16, (8, 7): torch.bfloat16, (8, 23): torch.float32}[exponent_bits, mantissa_bits]
    return x.to(dtype).to(x.dtype)


def _bitcast(numbers: RunDtypes, x: Tensor, new_dtype: Any, source: Any, **_: Any) -> Tensor:
    """Return the bits of numbers as another dtype; `source` is the dtype that JAX has for them."""
    x = _own_bits(x, source)
    bits = {"uint32": torch.int32, "uint16": torch.int16}.get(str(new_dtype))
    made = x.view(bits or DTYPES[str(new_dtype)])
    return made if bits is None else made.to(held_dtype(new_dtype))  # the bits above an unsigned one's are cut later


def _own_bits(x: Tensor, source: Any) -> Tensor:
    signed = {"uint32": torch.int32, "uint16": torch.int16}.get(str(source))
    if signed is not None:
        bits = 32 if signed is torch.int32 else 16
        return torch.where(x >= 2 ** (bits - 1), x - 2**bits, x).to(signed)
    return x.to(DTYPES[str(source)])  # a wider run has wider bits


def _shift_right_logical(numbers: RunDtypes, x: Any, by: Any, source: Any, **_: Any) -> Tensor:
    bits = {"uint32": 32, "int32": 32, "uint16": 16, "int16": 16, "uint8": 8, "int8": 8}[str(source)]
    x, by = both_tensors(x, by)
    moved = (x.long() & (2**bits - 1)) >> by.long().clamp(0, bits)
    return torch.where(moved >= 2 ** (bits - 1), moved - 2**bits, moved).to(x.dtype) if str(source)[0] == "i" else moved


def _not(numbers: RunDtypes, x: Tensor, **_: Any) -> Tensor:
    return ~x


# By the names of JAX's primitives; `add_any`, `le_to` and others are what they are to a run of numbers.
ELEMENT_OPERATIONS: dict[str, Operation] = {
    "add": _of(lambda a, b: a + b), "add_any": _of(lambda a, b: a + b), "sub": _of(lambda a, b: a - b),
    "mul": _of(lambda a, b: a * b), "div": _div, "neg": _of(lambda a: -a), "max": _of(larger), "min": _of(smaller),
    "rem": _of(lambda a, b: torch.fmod(*both_tensors(a, b))), "pow": _power, "integer_pow": _power,
    "square": _of(lambda a: a * a), "clamp": _clamp, "select_n": _select, "round": _round,
    "eq": _of(lambda a, b: a == b), "ne": _of(lambda a, b: a != b), "lt": _of(lambda a, b: a < b),
    "le": _of(lambda a, b: a <= b), "gt": _of(lambda a, b: a > b), "ge": _of(lambda a, b: a >= b),
    "eq_to": _of(lambda a, b: a == b), "lt_to": _of(lambda a, b: a < b), "le_to": _of(lambda a, b: a <= b),
    "and": _of(lambda a, b: a & b), "or": _of(lambda a, b: a | b), "xor": _of(lambda a, b: a ^ b), "not": _not,
    "shift_left": _of(lambda a, b: a << b), "shift_right_arithmetic": _of(lambda a, b: a >> b),
    "shift_right_logical": _shift_right_logical, "bitcast_convert_type": _bitcast,
    "convert_element_type": _convert, "reduce_precision": _reduce_precision,
    "real": _unary(torch.real), "imag": _unary(torch.imag), "conj": _unary(torch.conj_physical),
    "complex": _of(lambda a, b: torch.complex(*both_tensors(a, b))), "abs": _unary(torch.abs),
    "sign": _unary(torch.sign),
    "floor": _unary(torch.floor), "ceil": _unary(torch.ceil), "is_finite": _unary(torch.isfinite),
    "sqrt": _unary(torch.sqrt), "rsqrt": _unary(torch.rsqrt), "exp": _unary(torch.exp), "exp2": _unary(torch.exp2),
    "expm1": _unary(torch.expm1), "log": _unary(torch.log), "log1p": _unary(torch.log1p),
    "cbrt": _unary(lambda x: x.sign() * x.abs() ** (1 / 3)), "logistic": _unary(torch.sigmoid),
    "sin": _unary(torch.sin), "cos": _unary(torch.cos), "tan": _unary(torch.tan), "asin": _unary(torch.asin),
    "acos": _unary(torch.acos), "atan": _unary(torch.atan), "sinh": _unary(torch.sinh), "cosh": _unary(torch.cosh),
    "tanh": _unary(torch.tanh), "asinh": _unary(torch.asinh), "acosh": _unary(torch.acosh),
    "atanh": _unary(torch.atanh), "atan2": _of(lambda a, b: torch.atan2(*both_tensors(a, b))), "erf": _unary(torch.erf),
    "erfc": _unary(torch.erfc), "erf_inv": _unary(torch.erfinv), "lgamma": _unary(torch.lgamma),
    "digamma": _unary(torch.digamma), "igamma": _of(lambda a, x: torch.special.gammainc(*both_tensors(a, x))),
    "igammac": _of(lambda a, x: torch.special.gammaincc(*both_tensors(a, x))), "bessel_i0e": _unary(torch.special.i0e),
    "bessel_i1e": _unary(torch.special.i1e),
    "reduce_sum": _reduced(_sum), "reduce_max": _reduced(torch.amax), "reduce_min": _reduced(torch.amin),
    "reduce_prod": _reduced(_product), "reduce_and": _reduced(torch.all), "reduce_or": _reduced(torch.any),
    "reduce_xor": _reduced(_parity), "argmax": _extreme(torch.argmax), "argmin": _extreme(torch.argmin),
    "psum": _reduced(_sum), "pmax": _reduced(torch.amax), "pmin": _reduced(torch.amin),
    "cumsum": _cumulative(lambda x, axis: x.cumsum(axis, dtype=x.dtype)),
    "cumprod": _cumulative(lambda x, axis: x.cumprod(axis, dtype=x.dtype)),
    "cummax": _cumulative(lambda x, axis: x.cummax(axis).values),
    "cummin": _cumulative(lambda x, axis: x.cummin(axis).values),
    "cumlogsumexp": _cumulative(lambda x, axis: x.logcumsumexp(axis)),
}  # fmt: skip

# What leaves its values as they are: marks for derivatives, devices, names and compilers.
SAME = frozenset({
    "copy", "copy_p", "optimization_barrier", "sharding_constraint", "mesh_cast", "layout_constraint",
    "name", "pvary", "device_put", "psum", "psum_invariant", "pmax", "pmin", "reshard", "ppermute", "pcast",
    "random_wrap", "random_unwrap",
})  # fmt: skip
