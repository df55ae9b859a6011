"""One evaluation of a graph of ggml: its operations in order, and the tensors that they read.

ggml writes sizes with the fastest axis first: `ne = (E, H, T, 1)` is the shape `(1, T, H, E)` here. A tensor may be a
view: it has no memory of its own, and lies at `offset` bytes in another one, with strides `nb` in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sqrtdk import _extras

GGML_EXTRA = "ggml"
# ggml's number, numpy's dtype; all others are blocks that gguf unpacks.
NUMPY_TYPES = {"f32": np.float32, "f16": np.float16, "f64": np.float64, "i8": np.int8, "i16": np.int16,
               "i32": np.int32, "i64": np.int64}  # fmt: skip
_COPY = re.compile(r"[^#]+#(.+)#\d+")  # "CUDA0#inp_pos#0": a copy on another device
_CACHE = re.compile(r"cache_[a-z_]*l\d+")
_WEIGHT = re.compile(r".+\.(weight|bias|scale|input_scale)")


@dataclass(frozen=True, slots=True, eq=False)
class GgmlTensor:
    """A tensor of a graph.

    Attributes:
        key: what other tensors refer to it by.
        name: as llama.cpp calls it, "Qcur-0"; "" for none.
        op: operation that computes it, as `ggml_op_desc` says: "MUL_MAT", "SILU"; "NONE" for one that is not computed.
        type: ggml's name of its dtype: "f32", "q8_0".
        ne: sizes, the fastest axis first.
        nb: strides in bytes, likewise.
        params: the 16 parameters of the operation, as they lie in memory.
        src: keys of what the operation reads.
        root: key of the tensor in whose memory a view lies; None for one that is no view.
        offset: bytes from the begin of that memory.
    """

    key: int
    name: str
    op: str
    type: str
    ne: tuple[int, ...]
    nb: tuple[int, ...]
    params: bytes = bytes(64)
    src: tuple[int, ...] = ()
    root: int | None = None
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The sizes with the slowest axis first, four of them."""
        return self.ne[::-1]

    @property
    def whole(self) -> NDArray[np.int32]:
        """The parameters as whole numbers."""
        return np.frombuffer(self.params, np.int32)

    @property
    def real(self) -> NDArray[np.float32]:
        """The parameters as floating-point numbers."""
        return np.frombuffer(self.params, np.float32)

    @property
    def is_cache(self) -> bool:
        """Whether it is the memory of a key-value cache."""
        return _CACHE.match(self.name) is not None

    @property
    def is_weight(self) -> bool:
        """Whether it is a tensor of the model's file."""
        return self.op == "NONE" and _WEIGHT.fullmatch(self.name) is not None


@dataclass(frozen=True, slots=True, eq=False)
class GgmlRun:
    """One evaluation of a graph.

    Attributes:
        title: the file, as it is named in reports.
        metadata: of the model's file, as text by key; what is not known is left out.
        nodes: operations in the order in which they ran.
        leaves: what they read and no node computes, by key: weights, token ids, positions, masks, caches.
        data: values of leaves by key, in numpy's order of axes; none of caches.
        output: values of the last node.
        vocabulary: number of tokens; 0 if it is not known.
        producer: what ran it: "llama-cpp-python 0.3.36".
    """

    title: str
    metadata: Mapping[str, str]
    nodes: tuple[GgmlTensor, ...]
    leaves: Mapping[int, GgmlTensor]
    data: Mapping[int, NDArray[np.generic]]
    output: NDArray[np.float32]
    vocabulary: int
    producer: str

    @property
    def architecture(self) -> str:
        """Architecture of the model, "llama"; "" if it is not known."""
        return self.metadata.get("general.architecture", "")


def plain_array(tensor: GgmlTensor, memory: memoryview | bytes) -> NDArray[np.generic]:
    """Return a copy of a tensor's values: of packed blocks, the numbers that they stand for, in float32.

    Args:
        tensor: Describes dtype, sizes and strides.
        memory: Bytes from the tensor's first element on.

    Raises:
        ValueError: There are fewer bytes than the tensor has, or gguf has no such dtype.
    """
    if tensor.type in NUMPY_TYPES:
        kind: np.dtype[np.generic] = np.dtype(NUMPY_TYPES[tensor.type])
        flat = np.frombuffer(memory, np.uint8)
        made: NDArray[np.generic] = np.ndarray(tensor.shape, kind, flat.data, strides=tensor.nb[::-1])
        own: NDArray[np.generic] = np.ascontiguousarray(made).copy()
        return own
    gguf = _extras.load_extra("gguf", GGML_EXTRA)
    kind_number = getattr(gguf.GGMLQuantizationType, tensor.type.upper(), None)
    if kind_number is None:
        raise ValueError(f"the dtype {tensor.type}")
    block, size = gguf.GGML_QUANT_SIZES[kind_number]
    if tensor.nb[1] != tensor.ne[0] // block * size:
        raise ValueError(f"blocks of {tensor.type} with gaps")
    rows = int(np.prod(tensor.ne[1:]))
    packed = np.frombuffer(memory, np.uint8, rows * tensor.nb[1]).reshape(rows, tensor.nb[1])
    unpacked: NDArray[np.generic] = gguf.quants.dequantize(packed, kind_number).reshape(tensor.shape)
    return unpacked


def bytes_of(tensor: GgmlTensor) -> int:
    """Return the number of bytes from a tensor's first element to its last, as `ggml_nbytes` counts them."""
    if tensor.type in NUMPY_TYPES:
        return int(sum((n - 1) * b for n, b in zip(tensor.ne, tensor.nb, strict=True)) + tensor.nb[0])
    gguf = _extras.load_extra("gguf", GGML_EXTRA)
    block, _ = gguf.GGML_QUANT_SIZES[getattr(gguf.GGMLQuantizationType, tensor.type.upper())]
    first = tensor.ne[0] * tensor.nb[0] // block
    return int(first + sum((n - 1) * b for n, b in zip(tensor.ne[1:], tensor.nb[1:], strict=True)))


def original_name(name: str) -> str:
    """Return the name of what a copy on another device was copied from, or the name itself.

    Example:
        >>> original_name("CUDA0#inp_pos#0"), original_name("Qcur-0")
        ('inp_pos', 'Qcur-0')
    """
    copied = _COPY.fullmatch(name)
    return copied.group(1) if copied else name
