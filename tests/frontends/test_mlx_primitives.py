"""Each primitive of MLX alone, on random arguments in float32, bfloat16 and int32, against MLX."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.optional import optional

mx = optional("mlx.core")
array = mx.array  # skips where MLX is missing

from sqrtdk.frontends.judge import beyond_rounding  # noqa: E402
from sqrtdk.frontends.mlx.arrays import tensor_from_mlx, to_mlx  # noqa: E402
from sqrtdk.frontends.mlx.front import MlxSource, _traced, mlx_model  # noqa: E402
from sqrtdk.frontends.mlx.trees import flatten  # noqa: E402
from sqrtdk.frontends.mlx.walk import MLX_OPERATIONS  # noqa: E402
from sqrtdk.frontends.module import foreign_module  # noqa: E402

FLOATS, WHOLE, BOTH = ("float32", "bfloat16"), ("int32",), ("float32", "bfloat16", "int32")
FLOAT, HALVES = ("float32",), ("float32", "bfloat16", "float16")
KEY = mx.random.key(7)
Call = Callable[..., Any]


def _index(*shape: int, top: int = 4) -> Any:
    return mx.array(np.random.default_rng(sum(shape)).integers(0, top, shape))


def _all(*calls: Call) -> Call:
    return lambda x: [call(x) for call in calls]


def _quantized(bits: int, mode: str = "affine", group: int = 32, transpose: bool = True) -> Call:
    packed = mx.quantize(mx.random.normal((64, 64), key=KEY), group, bits, mode=mode)
    mx.eval(packed)  # the way to packed weights is not read
    return lambda x: mx.quantized_matmul(
        mx.concatenate([x.reshape(3, 16)] * 4, -1), *packed, transpose=transpose, group_size=group, bits=bits, mode=mode
    )


_EXPERTS = mx.quantize(mx.random.normal((5, 32, 32), key=KEY), 32, 4)
mx.eval(_EXPERTS)


def _experts(x: Any) -> Any:
    packed = _EXPERTS
    rows = mx.concatenate([x.reshape(3, 1, 16)] * 2, -1)
    return mx.gather_qmm(rows, *packed, rhs_indices=mx.array([4, 0, 2]), group_size=32, bits=4)


def _attend(**options: Any) -> Call:
    def call(x: Any) -> Any:
        q, k = x[None], x[None, :1] * 0.5
        return mx.fast.scaled_dot_product_attention(q, k, k + 1, scale=0.5, **options)

    return call


def _conv(**more: Any) -> Call:
    kernel = mx.random.normal((5, 3, 2), key=KEY)
    return lambda x: mx.conv_general(x[..., :2], kernel.astype(x.dtype), **more)


def _put(x: Any) -> Any:
    y = x + 0
    y[1, mx.array([0, 2])] = 3
    y[:, 1] = x[:, 0]
    y[0, ::2] += 1
    y[..., 3] *= x[..., 0]
    return y


# name: (function of arrays of shape (3, 4, 4), dtypes, range of the arguments)
CASES: dict[str, tuple[Call, tuple[str, ...], tuple[float, float]]] = {
    name: (function, dtypes, span)
    for names, dtypes, span in (
        ("abs negative sign square", BOTH, (-5, 5)),
        ("floor ceil round sin cos sinh cosh tanh arcsinh arctan exp expm1 erf sigmoid isnan", FLOATS, (-3, 3)),
        ("tan arcsin arccos arctanh erfinv", FLOATS, (-0.9, 0.9)),
        ("sqrt rsqrt log log2 log10 log1p reciprocal", FLOATS, (0.5, 6)),
        ("arccosh", FLOATS, (1.1, 6)),
        ("logical_not", BOTH, (-1, 1)),
    )
    for name in names.split()
    for function in (getattr(mx, name),)
} | {
    name: (function, dtypes, span)
    for names, dtypes, span in (
        ("add subtract multiply maximum minimum equal not_equal less less_equal greater greater_equal", BOTH, (-5, 5)),
        ("divide", FLOATS, (1, 9)),
        ("remainder floor_divide divmod", ("float32", "int32"), (1, 9)),
        ("power arctan2", FLOATS, (0.5, 3)),
        ("logaddexp", FLOATS, (-3, 3)),
        ("logical_and logical_or", BOTH, (-1, 1)),
        ("bitwise_and bitwise_or bitwise_xor", WHOLE, (-9, 9)),
        ("left_shift right_shift", WHOLE, (0, 9)),
    )
    for name in names.split()
    for function in (getattr(mx, name),)
}
CASES |= {
    "numbers": (lambda x: [2 - x, x * 0.5, 1 / (x + 9), mx.maximum(x, 0), mx.minimum(1.5, x), x**2], FLOATS, (-5, 5)),
    "invert": (lambda x: [~x, ~(x > 0), mx.bitwise_invert(x)], WHOLE, (-9, 9)),
    "negative_rest": (lambda x, y: [x % (y + 0.5), x // 2], FLOAT, (-5, 5)),
    "select": (lambda x, y: [mx.where(x > 0, y, 2), mx.where(x > y, x, y), mx.clip(x, -1, 2)], BOTH, (-5, 5)),
    "complex": (
        lambda x, y: [(z := (x + 1j * y) * (y - 1j * x)).real, mx.conj(z).imag, mx.abs(z)], FLOAT, (-3, 3),
    ),
    "convert": (
        lambda x: [x.astype(mx.int32).astype(mx.float16) * 3, x.astype(mx.bool_), x.astype(mx.uint32) + 1,
                   x.astype(mx.uint8), x.astype(mx.uint16) * 700],
        BOTH, (0, 9),
    ),
    "bits": (lambda x: [(x.view(mx.uint32) >> 9).view(mx.int32), x.view(mx.int16)[..., ::2]], FLOAT, (-3, 3)),
    "unsigned": (
        lambda x: (x.astype(mx.uint32) * mx.array(3_000_000_019, mx.uint32)) ^ (x.astype(mx.uint32) << 30),
        WHOLE, (0, 99),
    ),
    "sums": (
        lambda x: [x.sum(), x.sum((0, 2)), x.max(0), x.min((0, 1)), (x > 0).all(1), (x > 0).any(), x.mean(-1)],
        BOTH, (-2, 2),
    ),
    "products": (lambda x: [x.prod(1), mx.var(x, 1)], FLOAT, (-2, 2)),
    "extremes": (lambda x: [mx.argmax(mx.round(x), 1), mx.argmin(mx.round(x), -1)], FLOATS, (-2, 2)),
    "cumulative": (
        lambda x: [mx.cumsum(x, 1), mx.cumsum(x, 2, reverse=True), mx.cumprod(x, 0), mx.cummax(x, 1, reverse=True),
                   mx.cummin(x, 2), mx.cumsum(x, 0, inclusive=False), mx.cummax(x, 1, inclusive=False)],
        ("float32", "int32"), (-2, 2),
    ),
    "arange": (lambda x: x + mx.arange(4) + mx.arange(8, 0, -2)[:, None].astype(x.dtype), BOTH, (-2, 2)),
    "moves": (
        lambda x: mx.concatenate([x.transpose(2, 0, 1).reshape(4, 12), x[::2, 1:, ::3].reshape(-1, 12),
                                  mx.tile(x[0, :1], (2, 3)), x.flatten(1)[:, :12]]),
        BOTH, (-2, 2),
    ),
    "flips": (lambda x: mx.stack([x[::-1], mx.roll(x, 1, 2), x[:, ::-1, ::-1]], 1), BOTH, (-2, 2)),
    "split": (lambda x: mx.split(x, [1, 3], axis=2), BOTH, (-2, 2)),
    "pad": (lambda x: mx.pad(x, ((0, 0), (2, 1), (0, 2)), constant_values=3), BOTH, (-2, 2)),
    "strided": (lambda x: mx.as_strided(x, (3, 2, 2), (16, 4, 2), 1), BOTH, (-2, 2)),
    "rows": (lambda x: [x[0][_index(5)], mx.take(x[0], _index(5), axis=0), x[:, _index(2, 3)]], BOTH, (-2, 2)),
    "gather": (
        lambda x: [x[_index(3) % 3, 1:3], mx.take_along_axis(x, _index(3, 4, 2), 2), x[1, _index(2), _index(2)],
                   x[mx.array([-1, 0])]],
        BOTH, (-2, 2),
    ),
    "put": (_put, BOTH, (-2, 2)),
    "scatter": (
        lambda x: [x.at[_index(4) % 3].add(x[0]), x.at[0, _index(4)].multiply(3), x.at[0].maximum(x[1]),
                   x.at[1, 1].minimum(0), mx.put_along_axis(x, _index(3, 4, 1), x[..., :1], 2)],
        BOTH, (-2, 2),
    ),
    "dynamic": (
        lambda x: mx.slice_update(
            x, mx.slice(x, mx.argmax(x[:, 0, 0]).reshape(1), (0,), (1, 4, 4)), mx.array([1]), (0,)
        ),
        BOTH, (-2, 2),
    ),
    "sort": (lambda x: [mx.sort(x, 1), mx.argsort(mx.round(x), 2), mx.partition(x, 1, 2)[..., :1]], FLOATS, (-2, 2)),
    "top_k": (
        lambda x: [mx.sort(mx.topk(x, 3), -1), mx.sort(mx.argpartition(x, 1, -1)[..., :2], -1)], FLOAT, (-2, 2),
    ),
    "search": (lambda x: mx.searchsorted(mx.sort(x[0, 0]), x[1]), FLOAT, (-2, 2)),
    "matmul": (lambda x, y: [x @ y, x @ y.swapaxes(-1, -2), mx.inner(x[0], y[0])], FLOATS, (-2, 2)),
    "addmm": (lambda x, y: [mx.addmm(x[0, 0], x, y), mx.addmm(x, x, y, alpha=0.5, beta=2)], FLOATS, (-2, 2)),
    "einsum": (lambda x, y: mx.einsum("bij,bkj->kbi", x, y), FLOATS, (-2, 2)),
    "gather_mm": (lambda x, y: mx.gather_mm(x, y, rhs_indices=mx.array([2, 0, 1])), FLOAT, (-2, 2)),
    "softmax": (
        lambda x: [mx.softmax(x, -1), mx.softmax(x, 1), mx.softmax(x, -1, precise=True), mx.logsumexp(x, -1)],
        HALVES, (-5, 5),
    ),
    "conv": (
        lambda x: [_conv()(x), _conv(stride=2, padding=1, kernel_dilation=2)(x), _conv(input_dilation=2, flip=True)(x)],
        FLOAT, (-2, 2),
    ),
    "fft": (lambda x: [mx.abs(mx.fft.fft(x)), mx.fft.irfft(mx.fft.rfft(x, axis=1), axis=1)], FLOAT, (-2, 2)),
    "hadamard": (mx.hadamard_transform, FLOAT, (-2, 2)),
    "quantized": (_all(*(_quantized(bits) for bits in (2, 3, 4, 5, 6, 8))), FLOAT, (-2, 2)),
    "quantized_bfloat16": (_quantized(4, transpose=False), FLOATS, (-2, 2)),
    "quantized_fp": (
        _all(_quantized(4, "mxfp4"), _quantized(8, "mxfp8"), _quantized(4, "nvfp4", 16)), FLOAT, (-2, 2),
    ),
    "dequantized": (
        lambda x: x[0, 0, 0] * mx.dequantize(*_EXPERTS, 32, 4)[0], FLOAT, (-2, 2),
    ),
    "experts": (_experts, FLOAT, (-2, 2)),
    "rms_norm": (lambda x: [mx.fast.rms_norm(x, x[0, 0], 1e-5), mx.fast.rms_norm(x, None, 1e-5)], HALVES, (-3, 3)),
    "layer_norm": (lambda x: mx.fast.layer_norm(x, x[0, 0], x[0, 1], 1e-5), HALVES, (-3, 3)),
    "rope": (
        lambda x: [mx.fast.rope(x, 4, traditional=False, base=100.0, scale=1.0, offset=3),
                   mx.fast.rope(x, 2, traditional=True, base=100.0, scale=0.5, offset=mx.array(2)),
                   mx.fast.rope(x, 4, traditional=True, base=None, scale=1.0, offset=0, freqs=mx.array([1.0, 9.0]))],
        HALVES, (-3, 3),
    ),
    "attention": (
        lambda x: [_attend()(x), _attend(mask="causal")(x), _attend(mask=mx.tril(mx.ones((4, 4), mx.bool_)))(x),
                   _attend(mask=x[:1, :, :4] * 0.1)(x), _attend(sinks=x[:, 0, 0])(x)],
        HALVES, (-2, 2),
    ),
    "keys": (
        lambda x: [x + mx.random.uniform(shape=x.shape, key=mx.random.split(KEY, 3)[1]).astype(x.dtype),
                   mx.random.bernoulli(0.4, x.shape, key=KEY), mx.random.normal((3, 5), key=KEY),
                   mx.random.randint(0, 9, (7,), key=KEY), mx.random.bits((7,), width=1, key=KEY)
                   if hasattr(mx.random, "bits") else x],
        FLOATS, (-2, 2),
    ),
    "choice": (
        lambda x: [mx.random.categorical(x, key=KEY), mx.random.permutation(x, key=KEY)], FLOAT, (-2, 2),
    ),
    "vmap": (lambda x: mx.vmap(lambda row: mx.softmax(row @ row.T))(x), FLOAT, (-2, 2)),
    "derivative": (lambda x: mx.grad(lambda y: (mx.softmax(mx.tanh(y), -1) ** 2).sum())(x), FLOAT, (-2, 2)),
    "compiled": (mx.compile(lambda x: mx.sigmoid(x) * x + mx.exp(-x)), FLOATS, (-2, 2)),
    "own_derivative": (lambda x: [mx.stop_gradient(x), mx.checkpoint(mx.exp)(x)], FLOAT, (-2, 2)),
    "order": (lambda x: [mx.depends(x, [x + 1]), mx.contiguous(x.T), mx.full((2,), x[0, 0, 0])], BOTH, (-2, 2)),
}  # fmt: skip
TWO = {
    *("add", "subtract", "multiply", "maximum", "minimum", "equal", "not_equal", "less", "less_equal", "greater"),
    *("greater_equal", "divide", "remainder", "floor_divide", "divmod", "power", "arctan2", "logaddexp"),
    *("logical_and", "logical_or", "bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift"),
    *("negative_rest", "select", "complex", "matmul", "addmm", "einsum", "gather_mm"),
}


def _arguments(seed: int, count: int, dtype: str, span: tuple[float, float]) -> list[Any]:
    numbers = np.random.default_rng(seed).uniform(*span, (count, 3, 4, 4))
    return [to_mlx((x if dtype != "int32" else np.round(x)).astype(np.float32), dtype) for x in numbers]


def _source(name: str, dtype: str) -> tuple[MlxSource, Any]:
    function, _, span = CASES[name]
    arguments = tuple(_arguments(0, 2 if name in TWO else 1, dtype, span))
    source = MlxSource(mlx_model(lambda _, *x: function(*x), None), len(arguments), ())
    return source, source.bind(arguments, {})


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_a_primitive_gives_what_mlx_gives(name: str) -> None:
    _, dtypes, span = CASES[name]
    programs = {}
    for dtype in dtypes:
        source, bound = _source(name, dtype)
        programs[dtype] = foreign_module(source, bound, name)[0], source

    @settings(max_examples=5, deadline=None)
    @given(st.integers(0, 2**31), st.sampled_from(dtypes))
    def holds(seed: int, dtype: str) -> None:
        arguments = _arguments(seed, 2 if name in TWO else 1, dtype, span)
        module, source = programs[dtype]
        wide = [tensor_from_mlx(x).double() if dtype != "int32" else x for x in arguments]
        ours, exact = (flatten(module(*inputs))[0] for inputs in (arguments, wide))
        theirs = source.outputs(source.bind(tuple(arguments), {}))
        for right, made, finer in zip(theirs, ours, exact, strict=True):
            assert made.dtype is right.dtype
            assert made.shape == right.shape
            if right.is_floating_point():
                assert beyond_rounding(right, made, finer) is None, (dtype, right, made)
            else:
                assert torch.equal(made, right)

    holds()


@pytest.mark.full
def test_every_primitive_that_is_read_is_tried() -> None:
    """No operation is without a case, but for those that only other versions of MLX, or no shapes, write."""
    found: set[str] = set()
    for name in CASES:
        source, bound = _source(name, CASES[name][1][0])
        inputs = [mx.zeros(kind.shape, getattr(mx, kind.dtype)) for kind in bound.spec.leaves]
        records, _ = _traced(source.model, lambda *x, s=source, b=bound: [
            leaf for leaf in flatten(s.call(b.spec, (), x))[0] if isinstance(leaf, array)], inputs)  # fmt: skip
        found |= {record["name"] for record in records if record["type"] == "primitive"}
    other = {
        "BroadcastAxes",
        "NumberOfElements",
        "Full",
        "Copy",
        "LogSumExp",
        "MaskedScatter",
        "Quantize",
        "StopGradient",
    }
    assert set(MLX_OPERATIONS) - found <= other, set(MLX_OPERATIONS) - found - other
