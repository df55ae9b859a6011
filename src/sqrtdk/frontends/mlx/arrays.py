"""Arrays of MLX as tensors and back. MLX is imported here alone, and only when it is needed.

bfloat16 goes over as bits, since NumPy has no such dtype.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk.frontends.arrays import load_framework, tensor_of_numbers

OLDEST_MLX = (0, 31)


@lru_cache(1)
def mlx() -> Any:
    """Return `mlx.core`.

    Raises:
        MissingExtraError: It is not installed, or older than `OLDEST_MLX`.
    """
    return load_framework("mlx.core", "mlx", OLDEST_MLX, "frontends.old_mlx")


def dtype_name(dtype: Any) -> str:
    """Return the name of a dtype of MLX: "float32", "bool"."""
    return str(dtype).rpartition(".")[2]


def mlx_dtype(name: str) -> Any:
    """Return the dtype of MLX of a name that `dtype_name` returns."""
    return getattr(mlx(), "bool_" if name == "bool" else name)


def tensor_from_mlx(value: Any) -> Tensor:
    """Return an array of MLX or NumPy, or a number, as a CPU tensor that shares no memory with it.

    Its dtype is that of `DTYPES_OF_BOTH`.
    """
    if isinstance(value, mlx().array) and value.dtype == mlx().bfloat16:
        return torch.from_numpy(np.array(value.view(mlx().int16))).view(torch.bfloat16)
    return tensor_of_numbers(value)


def to_mlx(value: Any, name: str) -> Any:
    """Return a tensor, or an array of NumPy, as an array of MLX.

    Args:
        value: The tensor, detached and copied to the CPU if needed, or the array.
        name: Name of the dtype that the array gets.
    """
    tensor = value.detach().cpu() if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    if tensor.dtype is torch.bfloat16:
        made = mlx().array(tensor.contiguous().view(torch.int16).numpy()).view(mlx().bfloat16)
    else:
        made = mlx().array(tensor.numpy(), dtype=mlx_dtype(name) if tensor.dtype is torch.float64 else None)
    return made.astype(mlx_dtype(name))


def holds_numbers(value: Any) -> bool:
    """Return whether a leaf of parameters or inputs is an array of MLX or NumPy, a scalar of NumPy, or a tensor."""
    return isinstance(value, mlx().array | np.ndarray | np.generic | Tensor)
