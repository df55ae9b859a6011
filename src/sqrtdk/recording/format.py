"""Names, dtypes and layouts of a trace file. docs/en/trace-file.md describes them for other programs."""

from __future__ import annotations

import torch
from torch import Tensor

SCHEMA_VERSION = 1  # of a file without parts of ranks, which an older reader takes
SHARD_VERSION = 2  # of one whose calls say which part of the attention a rank had
KEY = "sqrtdk_trace"  # key in the metadata of safetensors; its value is a JSON document
MESSAGES = "sqrtdk_messages"  # key beside it, see `recording.document`; optional
INPUT_PREFIX = "inputs."  # prefix of the names of the model's inputs

# The names of safetensors; other dtypes of that format (complex, 6 and 4 bits) have no use for attention tensors.
DTYPE_BY_NAME = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
NAME_BY_DTYPE = {dtype: name for name, dtype in DTYPE_BY_NAME.items()}
FLOAT_DTYPES = frozenset(dtype for dtype in NAME_BY_DTYPE if dtype.is_floating_point)
INTEGER_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
BIT_DTYPES = frozenset({torch.bool, torch.uint8})
# values of `dtype`, `logits_dtype` and `weights_dtype`
FLOAT_NAMES = tuple(sorted(str(dtype).removeprefix("torch.") for dtype in FLOAT_DTYPES))

FORMULA_TERMS = ("scale", "softcap", "bias", "mask", "sinks", "unknown")
# batch, heads, rows and channels in the orders that engines use; without B, the tensors are of one sequence
TENSOR_LAYOUTS = ("BHLE", "BLHE", "HLE", "LHE")


def to_bhle(tensor: Tensor, layout: str) -> Tensor:
    """Return a tensor of q, k or v as (B, H, L, E).

    Args:
        tensor: one dimension for each letter of `layout`.
        layout: one of `TENSOR_LAYOUTS`. A layout without B holds one sequence, so B is 1.

    Example:
        >>> to_bhle(torch.zeros(7, 2, 4), "LHE").shape
        torch.Size([1, 2, 7, 4])
    """
    if "B" not in layout:
        tensor, layout = tensor.unsqueeze(0), "B" + layout
    return tensor if layout == "BHLE" else tensor.transpose(1, 2)


def prefix(number: int) -> str:
    """Return the prefix of the names of a call's tensors.

    Example:
        >>> prefix(3) + "q"
        'calls.3.q'
    """
    return f"calls.{number}."
