"""What JAX and MLX have in common: the dtypes that hold their arrays, and operations that both write in the same way.

torch has few operations on unsigned integers of 16, 32 and 64 bits, so these are held in wider signed dtypes; results
are cut to their bits.
"""

from __future__ import annotations

import math
import os
import sysconfig
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.errors import MissingExtraError
from sqrtdk.messages import Message

DTYPES_OF_BOTH = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16,
    "int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8,
    "bool": torch.bool, "complex64": torch.complex64, "uint16": torch.int32, "uint32": torch.int64,
    "uint64": torch.int64,
}  # fmt: skip
LARGEST_UNSIGNED = {"uint16": 2**16 - 1, "uint32": 2**32 - 1}  # of dtypes that are held in wider ones
_HELD_AS = {"uint16": np.int32, "uint32": np.int64, "uint64": np.int64}
CONVOLUTIONS_BY_RANK: tuple[Callable[..., Tensor], ...] = (F.conv1d, F.conv2d, F.conv3d)  # by the number of axes
_STANDARD = sysconfig.get_path("stdlib") + os.sep


def load_framework(module: str, extra: str, oldest: tuple[int, ...], too_old: str) -> Any:
    """Return the module of a framework.

    Args:
        module: Its name.
        extra: The extra that installs it.
        oldest: The oldest version that is read.
        too_old: Id of the message for an older one.

    Raises:
        MissingExtraError: It is not installed, or older than `oldest`.
    """
    loaded = _extras.load_extra(module, extra)
    version = str(loaded.__version__)
    if tuple(int(part) for part in version.split(".")[: len(oldest)] if part.isdigit()) < oldest:
        raise MissingExtraError(
            Message(too_old, version=version, oldest=".".join(map(str, oldest))),
            hint=Message("errors.hint.install", extra=extra),
        )
    return loaded


def is_standard(file: str) -> bool:
    """Return whether a source file is of Python's own library, which only passes calls on."""
    return file.startswith(_STANDARD) and not any(part in file for part in ("site-packages", "dist-packages"))


def package_folder(module: Any) -> str:
    """Return the folder of a module's file, with a separator behind it."""
    return os.path.dirname(os.path.abspath(str(module.__file__))) + os.sep


def tensor_of_numbers(value: Any) -> Tensor:
    """Return an array of NumPy, or what becomes one, as a CPU tensor that shares no memory with it."""
    array = np.asarray(value)
    return torch.from_numpy(np.array(array, dtype=_HELD_AS.get(array.dtype.name, array.dtype)))


# -- operations --------------------------------------------------------------------------------------------------------


def like_other(value: Any, like: Tensor) -> Tensor:
    """Return `value` if it is a tensor, and otherwise the number as a tensor with the dtype and device of `like`."""
    return value if isinstance(value, Tensor) else torch.tensor(value, dtype=like.dtype, device=like.device)


def both_tensors(a: Any, b: Any) -> tuple[Tensor, Tensor]:
    """Return two values, of which one may be a number, as tensors."""
    return like_other(a, b), like_other(b, a)


def larger(a: Any, b: Any) -> Tensor:
    """Return the larger of two values, of which one may be a number, at each place."""
    for bound, x in ((a, b), (b, a)):
        if isinstance(x, Tensor) and not isinstance(bound, Tensor) and x.dtype is not torch.bool:
            # max(-inf, max(x)): jax.nn.softmax writes it for an axis without elements
            return x if bound == -math.inf else x.clamp(min=bound)
    a, b = both_tensors(a, b)
    return torch.maximum(a, b) if a.dtype is not torch.bool else a | b


def smaller(a: Any, b: Any) -> Tensor:
    """Return the smaller of two values, of which one may be a number, at each place."""
    for bound, x in ((a, b), (b, a)):
        if isinstance(x, Tensor) and not isinstance(bound, Tensor) and x.dtype is not torch.bool:
            return x if bound == math.inf else x.clamp(max=bound)
    a, b = both_tensors(a, b)
    return torch.minimum(a, b) if a.dtype is not torch.bool else a & b


def spread(x: Tensor, axis: int, by: int, fill: Tensor | None = None) -> Tensor:
    """Return a tensor with `by - 1` zeros, or copies of `fill`, between its numbers along an axis.

    Example:
        >>> spread(torch.tensor([1, 2, 3]), 0, 2)
        tensor([1, 0, 2, 0, 3])
    """
    if by == 1:
        return x
    sizes = list(x.shape)
    sizes[axis] = (sizes[axis] - 1) * by + 1
    wide = x.new_zeros(sizes) if fill is None else fill.expand(sizes).clone()
    wide[(slice(None),) * axis + (slice(None, None, by),)] = x
    return wide


def along(axis: int, line: Tensor, rank: int) -> Tensor:
    """Return a line of numbers as a tensor of `rank` axes, of size 1 but for one."""
    return line.reshape([-1 if at == axis else 1 for at in range(rank)])


def flat_index(index: Sequence[Tensor], x: Tensor) -> Tensor:
    """Return the index into the flattened `x` from the indices into each of its axes, which broadcast; int64."""
    flat = torch.zeros((), dtype=torch.long, device=x.device)
    for place, size in zip(index, x.shape, strict=True):
        flat = flat * size + place
    return flat
