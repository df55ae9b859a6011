"""Integers of a quantised weight as the numbers that they stand for, in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def integers(array: Any) -> Array:
    """Whole numbers of any width, of 4 bits as well, as 32 bits; floating-point ones of 8 bits as float32.

    Example:
        >>> integers(np.array([250], np.uint8)).dtype
        dtype('int32')
    """
    array = np.asarray(array)
    made: Array = array.astype(np.float32 if "float" in array.dtype.name else np.int32)
    return made


def blocks(values: Array, scale: Any, zero: Array | None, axis: int, block: int) -> Array:
    """`(values - zero) * scale`, with one scale for all, one an index of an axis, or one a block along it.

    Args:
        values: of the weight.
        scale: one number; (n,) for an axis of n; of the weight's rank for blocks.
        zero: of the scale's shape; None is 0.
        axis: along which scales differ.
        block: how many values share a scale along the axis; 0 where scales are not in blocks.

    Example:
        >>> blocks(np.array([[1, 2], [3, 4]]), np.array([0.5, 1.0]), None, -1, 0).tolist()
        [[0.5, 2.0], [1.5, 4.0]]
    """
    placed = [_placed(np.asarray(part), values.shape, axis, block) for part in (scale, 0 if zero is None else zero)]
    made: Array = (values - placed[1]) * placed[0]
    return made.astype(np.asarray(scale).dtype)


def _placed(part: Array, shape: tuple[int, ...], axis: int, block: int) -> Array:
    if block:
        whole = np.repeat(part, block, axis)
        return whole[tuple(slice(0, size) for size in shape)] if whole.ndim == len(shape) else whole
    if part.size == 1 or part.ndim > 1 or not shape:
        return part.reshape(()) if part.size == 1 else part
    at = axis % len(shape)
    return part.reshape([-1 if i == at else 1 for i in range(len(shape))])


def few_bits(
    packed: Any, scales: Any, zeros: Any, groups: Any, *, rows: int, columns: int, bits: int, block: int
) -> Array:
    """The weight (K, N) of a `MatMulNBits`: 2, 4 or 8 bits a number, the lowest bits of a byte first.

    Args:
        packed: (N, blocks, bytes of a block).
        scales: one a column and block.
        zeros: the same, packed as the weight is, or of the scales' dtype; None is the middle of the range.
        groups: block of each of the K rows; None where they follow one another.
        rows: K.
        columns: N.
        bits: of a number.
        block: numbers that share a scale.
    """
    count = -(-rows // block)
    values = _unpacked(np.asarray(packed).reshape(columns, count, -1), bits)[..., :block]
    whole = values.reshape(columns, count * block)[:, :rows].astype(np.float32)
    factor = np.asarray(scales).reshape(columns, count)
    if zeros is None:
        offset = np.full((columns, count), float(2 ** (bits - 1)), np.float32)
    elif np.asarray(zeros).dtype == np.uint8:
        offset = _unpacked(np.asarray(zeros).reshape(columns, -1), bits)[:, :count].astype(np.float32)
    else:
        offset = np.asarray(zeros).reshape(columns, count).astype(np.float32)
    of = np.arange(rows) // block if groups is None else np.asarray(groups).flatten()[:rows]
    made: Array = (whole - offset[:, of]) * factor.astype(np.float32)[:, of]
    return made.T.astype(factor.dtype)


def _unpacked(array: Array, bits: int) -> Array:
    """Bytes as numbers of few bits, along the last axis."""
    if bits == 8:
        return array
    each = [(array >> (bits * i)) & (2**bits - 1) for i in range(8 // bits)]
    return np.stack(each, -1).reshape(*array.shape[:-1], -1)
