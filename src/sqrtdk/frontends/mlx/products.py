"""MLX's sums of products, quantised weights, transforms and random bits, as torch operations.

Matmul, AddMM          a (..., M, K) @ b (..., K, N); alpha * a @ b + beta * c
QuantizedMatmul        x @ w.T, with w read from groups of whole numbers: scale * n + bias
GatherMM, GatherQMM    the matrices of a mixture, one for each row
Convolution            x (N, ..., C) * w (O, ..., C)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sqrtdk.frontends.arrays import CONVOLUTIONS_BY_RANK, spread
from sqrtdk.frontends.mlx.nodes import Aval, Operation, Primitive, on_two
from sqrtdk.frontends.program import RunDtypes

_WORD = 2**32 - 1
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of threefry
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # numbers of e2m1 without their sign
MODES = ("affine", "mxfp4", "mxfp8", "nvfp4")  # in the order of MLX's enum


def _addmm(numbers: RunDtypes, node: Primitive, a: Tensor, b: Tensor, c: Any) -> Tensor:
    alpha, beta = node.args
    made = a @ b
    made = made if alpha == 1 else alpha * made
    whole: Tensor = made + (c if beta == 1 else beta * c)
    return whole


def _gather_mm(numbers: RunDtypes, node: Primitive, a: Tensor, b: Tensor, left: Tensor, right: Tensor) -> Tensor:
    return _picked(a, left) @ _picked(b, right)


def _picked(x: Tensor, index: Tensor) -> Tensor:
    """Return matrices (..., M, N) of a stack, counted through all its axes in front."""
    return x.reshape(-1, *x.shape[-2:])[index.long()]


# -- quantised weights -------------------------------------------------------------------------------------------------


def _whole_numbers(packed: Tensor, bits: int) -> Tensor:
    """Return the numbers of `bits` bits that lie one behind the other in words of 32 bits, lowest bits first."""
    words = packed.long()
    if 32 % bits == 0:
        parts = torch.arange(0, 32, bits, device=words.device)
        whole: Tensor = ((words[..., None] >> parts) & (2**bits - 1)).flatten(-2)
        return whole
    every = ((words[..., None] >> torch.arange(32, device=words.device)) & 1).flatten(-2)
    whole = every.reshape(*every.shape[:-1], -1, bits) << torch.arange(bits, device=words.device)
    return whole.sum(-1)


def _fp8(bits: Tensor) -> Tensor:
    return bits.to(torch.uint8).view(torch.float8_e4m3fn).float()


def _dequantized(packed: Tensor, scales: Tensor, biases: Tensor | None, group: int, bits: int, mode: int) -> Tensor:
    """Return the weights of packed numbers: exact in float64, and rounded once in float32."""
    n = _whole_numbers(packed, bits)
    n = n.reshape(*n.shape[:-1], -1, group)
    if biases is not None:  # affine
        made: Tensor = (scales[..., None] * n.to(scales.dtype) + biases[..., None]).flatten(-2)
        return made
    if MODES[mode] == "mxfp8":
        values = _fp8(n)
    else:
        table = torch.tensor([*_FP4, *(-x for x in _FP4)], device=n.device)
        values = table[n]
    # mxfp: a power of 2, of which the exponent is held; nvfp4: a number of e4m3
    factors = _fp8(scales) if MODES[mode] == "nvfp4" else torch.exp2(scales.float() - 127)
    return (values * factors[..., None]).flatten(-2)


def _weights(
    numbers: RunDtypes, node: Primitive, arrays: tuple[Tensor, ...], group: int, bits: int, mode: int
) -> Tensor:
    packed, scales, *rest = arrays
    made = _dequantized(packed, scales, rest[0] if rest else None, group, bits, mode)
    return made.to(numbers.dtype(node.gives[0].held))


def weight_apart(node: Primitive) -> tuple[Primitive, Primitive]:
    """Return the node that makes a matrix of its table, and the product with it, for a product with a table."""
    group, bits, mode, transposed = node.args if len(node.args) == 4 else (*node.args[:2], 0, node.args[2])
    (*rows, words), [made] = node.takes[1].shape, node.gives
    weight = Aval(f"{made.ref}: weight", (*rows, words * 32 // bits), made.dtype)
    return (
        Primitive("QuantizedWeight", (group, bits, int(mode)), node.takes[1:], (weight,)),
        Primitive(node.name, (transposed,), (node.takes[0], weight), node.gives),
    )


def _quantized_weight(numbers: RunDtypes, node: Primitive, *arrays: Tensor) -> Tensor:
    return _weights(numbers, node, arrays, *node.args)


def _quantized_matmul(numbers: RunDtypes, node: Primitive, x: Tensor, w: Tensor) -> Tensor:
    return x @ (w.mT if node.args[0] else w)


def _gather_qmm(numbers: RunDtypes, node: Primitive, x: Tensor, *arrays: Tensor) -> Tensor:
    group, bits, mode, transposed = node.args[:4]
    *packed, left, right = arrays
    picked = tuple(_picked(each, right) for each in packed)
    w = _weights(numbers, node, picked, group, bits, int(mode))
    return _picked(x, left) @ (w.mT if transposed else w)


def _dequantize(numbers: RunDtypes, node: Primitive, *arrays: Tensor) -> Tensor:
    group, bits, mode = [arg for arg in node.args if arg is not None][:3]
    return _weights(numbers, node, arrays, group, bits, int(mode))


def reads_quantize(node: Primitive) -> bool:
    """Return whether a `Quantize` reads packed weights; the way there, which rounds them, is not read."""
    return len(node.gives) == 1


# -- convolutions and transforms ---------------------------------------------------------------------------------------


def _convolution(numbers: RunDtypes, node: Primitive, x: Tensor, w: Tensor) -> Tensor:
    strides, low, high, dilation, apart, groups, flip = node.args
    x, w = x.movedim(-1, 1), w.movedim(-1, 1)
    if flip:
        w = w.flip(tuple(range(2, w.dim())))
    for at, by in enumerate(apart):
        x = spread(x, at + 2, by)  # a transposed convolution: zeros between the numbers
    if any(low) or any(high):
        x = F.pad(x, [int(n) for pair in reversed(list(zip(low, high, strict=True))) for n in pair])
    run = CONVOLUTIONS_BY_RANK[len(strides) - 1]
    return run(x, w, stride=tuple(strides), dilation=tuple(dilation), groups=int(groups)).movedim(1, -1)


def _fft(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    axes, inverse, real = node.args[:3]
    axes = tuple(int(axis) for axis in axes)
    run: Callable[..., Tensor] = torch.fft.rfftn
    if not real:
        run = torch.fft.ifftn if inverse else torch.fft.fftn
    elif inverse:
        run = partial(torch.fft.irfftn, s=[node.shape[axis] for axis in axes])
    return run(x, dim=axes)


def _hadamard(numbers: RunDtypes, node: Primitive, x: Tensor) -> Tensor:
    made = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    pair = torch.tensor([[1, 1], [1, -1]], dtype=x.dtype, device=x.device)
    while made.shape[0] < x.shape[-1]:
        made = torch.kron(made, pair)
    scaled: Tensor = (x @ made) * node.args[0]
    return scaled


def reads_hadamard(node: Primitive) -> bool:
    """Return whether a Hadamard transform is of a power of 2."""
    return math.log2(node.shape[-1]).is_integer()


# -- random bits -------------------------------------------------------------------------------------------------------


def threefry(key: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return two words of 32 random bits for each pair of counters, as MLX draws them.

    Args:
        key: The two words of a key, (2,) int64.
        first: The first counters, int64.
        second: The second counters, int64.
    """
    words = key[0], key[1], key[0] ^ key[1] ^ 0x1BD11BDA
    a, b = (first + words[0]) & _WORD, (second + words[1]) & _WORD
    for turn in range(5):
        for by in _ROTATIONS[turn % 2]:
            a = (a + b) & _WORD
            b = a ^ (((b << by) | (b >> (32 - by))) & _WORD)
        a = (a + words[(turn + 1) % 3]) & _WORD
        b = (b + words[(turn + 2) % 3] + turn + 1) & _WORD
    return a, b


def _random_bits(numbers: RunDtypes, node: Primitive, keys: Tensor) -> Tensor:
    shape, width = node.args
    keys = keys.reshape(-1, 2)
    each = math.prod(shape) // max(len(keys), 1)  # numbers of a key
    words = math.ceil(each * width / 4)
    half = words // 2
    count = torch.arange(half, device=keys.device)
    drawn = []
    for key in keys:
        a, b = threefry(key, count, count + half + words % 2)
        last = [threefry(key, count.new_full((1,), half), count.new_zeros(1))[0]] if words % 2 else []
        drawn.append(torch.cat([a, *last, b]))
    line = torch.stack(drawn) if drawn else keys.new_zeros(0, words)
    if width < 4:
        line = (
            (line[..., None] >> torch.arange(0, 32, 8 * width, device=keys.device)) & (2 ** (8 * width) - 1)
        ).flatten(1)
    return line[:, :each].reshape(tuple(shape))


MLX_PRODUCTS: dict[str, Operation] = {
    "Matmul": on_two(torch.matmul), "AddMM": _addmm, "GatherMM": _gather_mm, "QuantizedMatmul": _quantized_matmul,
    "QuantizedWeight": _quantized_weight,
    "GatherQMM": _gather_qmm, "Quantize": _dequantize, "Convolution": _convolution, "FFT": _fft,
    "Hadamard": _hadamard, "RandomBits": _random_bits,
}  # fmt: skip
READS: dict[str, Callable[[Primitive], bool]] = {"Quantize": reads_quantize, "Hadamard": reads_hadamard}
