"""Arrays of JAX as tensors and back. JAX is imported here alone, and only when it is needed.

A random key is held as its data: unsigned integers with one more axis.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk import _extras
from sqrtdk.frontends.arrays import DTYPES_OF_BOTH, LARGEST_UNSIGNED, load_framework, tensor_of_numbers

OLDEST_JAX = (0, 8)
DTYPES = DTYPES_OF_BOTH | {
    "float8_e4m3fn": torch.float8_e4m3fn, "float8_e5m2": torch.float8_e5m2, "complex128": torch.complex128,
    "float0": torch.bool,
}  # fmt: skip
_BIT_VIEWS = {"bfloat16": (np.int16, torch.bfloat16), "float8_e4m3fn": (np.int8, torch.float8_e4m3fn),
         "float8_e5m2": (np.int8, torch.float8_e5m2)}  # fmt: skip


@lru_cache(1)
def jax() -> Any:
    """Return JAX.

    Raises:
        MissingExtraError: It is not installed, or older than `OLDEST_JAX`.
    """
    return load_framework("jax", "jax", OLDEST_JAX, "frontends.old_jax")


def jax_core() -> Any:
    """Return `jax.extend.core`, which `import jax` alone does not load."""
    return _extras.load_extra("jax.extend.core", "jax")


def is_key(dtype: Any) -> bool:
    """Return whether a dtype, of JAX or of a tensor, is that of the random keys that `jax.random.key(0)` makes."""
    return not isinstance(dtype, torch.dtype) and bool(jax().dtypes.issubdtype(dtype, jax().dtypes.prng_key))


def held_dtype(dtype: Any) -> torch.dtype:
    """Return the torch dtype of the tensors that stand for arrays of a dtype of JAX.

    uint16 is held as int32; uint32, uint64 and random keys as int64; float0 as bool; other dtypes as the same dtype.

    Raises:
        KeyError: No torch dtype stands for it.
    """
    return torch.int64 if is_key(dtype) else DTYPES[np.dtype(dtype).name]


def mask_of(dtype: Any) -> int | None:
    """Return the bit mask, which is the largest number, of an unsigned dtype that is held in a wider torch dtype.

    Returns:
        For example 65535 for uint16; None for a dtype that is not held in a wider one.
    """
    return None if is_key(dtype) else LARGEST_UNSIGNED.get(np.dtype(dtype).name)


def to_torch(value: Any) -> Tensor:
    """Return an array of JAX or NumPy, or a number, as a CPU tensor that shares no memory with it.

    Its dtype is that of `held_dtype`; random keys become the numbers of `jax.random.key_data`.
    """
    if isinstance(value, jax().Array) and is_key(value.dtype):
        value = jax().random.key_data(value)
    array = np.asarray(value)
    if (bits := _BIT_VIEWS.get(array.dtype.name)) is not None:
        return torch.from_numpy(np.array(array.view(bits[0]))).view(bits[1])
    return tensor_of_numbers(array)


def to_jax(tensor: Any, aval: Any) -> Any:
    """Return a tensor or a number as an array of JAX.

    Args:
        tensor: The tensor, detached and copied to the CPU if needed, or the number.
        aval: A JAX shape and dtype (an abstract value), whose `dtype` the array gets; a key dtype makes random keys.
    """
    if is_key(aval.dtype):
        data = jax().numpy.asarray(tensor.numpy().astype(np.uint32))
        return jax().random.wrap_key_data(data, impl=aval.dtype._impl.name)
    array = tensor.detach().cpu() if isinstance(tensor, Tensor) else torch.as_tensor(tensor)
    array = array.float() if array.dtype is torch.bfloat16 else array
    return jax().numpy.asarray(array.numpy().astype(np.dtype(aval.dtype)))


def is_array(value: Any) -> bool:
    """Return whether a leaf of parameters or inputs is an array or scalar of JAX or NumPy, or a tensor."""
    return isinstance(value, jax().Array | np.ndarray | np.generic | Tensor)
