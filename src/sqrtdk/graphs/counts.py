"""Counts the numbers that the constants of a graph hold: of every dtype, and each of several packed into one element.

A weight of 4 bits may lie in uint8 or int32, two or eight numbers in an element. That it is packed shows in what the
graph does with it: an operator that takes packed weights, or in a program a shift and a bit mask.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sqrtdk.graphs.graph import Graph
from sqrtdk.tracing.tape.ops import INT4_PRODUCTS

# Operators of onnxruntime with the index of the input that may be packed, and ONNX's numbers of uint8 and int8.
_PACKED_INPUTS = {"MatMulNBits": 1, "MatMulBnb4": 1, "GatherBlockQuantized": 0}
_BYTE_TYPES = (2, 3)
# Operators of torch whose second argument is packed, with the bits of one number.
_BITS_OF_PRODUCTS = {f"aten::{name}": 4 for name in INT4_PRODUCTS}
_PACKED_DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32)  # numbers of 64 bits are positions, or ids
_SHIFTS = ("__rshift__", "bitwise_right_shift")
_MASKS = ("__and__", "bitwise_and")
_MASKED_BITS = {2**bits - 1: bits for bits in (1, 2, 4, 8)}  # w & 15 keeps 4 bits
# Operators between a packed constant and its bit mask, which leave its elements whole.
_BEFORE_MASKS = (
    "unsqueeze",
    "expand",
    "view",
    "reshape",
    "to",
    "_to_copy",
    "clone",
    "_assert_tensor_metadata",
    *_SHIFTS,
)


def count_of_graph(file: Graph) -> int:
    """Return how many numbers the constants of an ONNX file hold; packed 4-bit weights are counted unpacked."""
    counts = {name: math.prod(proto.dims) for name, proto in file.initializers.items()}
    total: int = 0
    for node in file.nodes:
        if node.op == "Constant":
            total += sum(int(np.size(value)) for key, value in node.attributes.items() if key.startswith("value"))
        name, bits = node.input(_PACKED_INPUTS.get(node.op, 0)), int(node.attributes.get("bits", 4))
        if node.op in _PACKED_INPUTS and name in counts and int(file.initializers[name].data_type) in _BYTE_TYPES:
            # eight ints of 1 bit, four of 2 or two of 4 lie in a byte; blocks along K may be padded to whole bytes
            whole = int(node.attributes.get("K", 0)) * int(node.attributes.get("N", 0))
            counts[name] = whole or math.prod(file.initializers[name].dims) * 8 // max(bits, 1)
    return int(total + sum(counts.values()))


def count_of_program(program: Any, module: torch.fx.GraphModule) -> int:
    """Return how many numbers the parameters, buffers and other constants of a program hold; tied ones count once."""
    held = {**program.state_dict, **program.constants}
    tensors = {name: value for name, value in held.items() if isinstance(value, Tensor)}
    bits = {str(node.target): _bits(node) for node in module.graph.nodes if node.op == "get_attr"}
    counts: dict[Any, int] = {}
    for name, tensor in tensors.items():
        start = tensor.untyped_storage().data_ptr() if tensor.layout is torch.strided and tensor.numel() else 0
        place = (start, tensor.storage_offset(), tensor.shape) if start else name  # 0: empty, or on the meta device
        packed = 8 * tensor.dtype.itemsize // (bits.get(name) or 8 * tensor.dtype.itemsize)
        counts[place] = max(tensor.numel() * packed, counts.get(place, 0))
    return sum(counts.values())


def _bits(constant: torch.fx.Node) -> int | None:
    """Return the bits of one number of a packed constant, or None for one that is not packed.

    Packed is what is shifted and masked: (qweight[:, None] >> shifts) & 15, or w & 15 beside w >> 4.
    """
    value = constant.meta.get("val")
    if isinstance(value, Tensor) and value.dtype not in _PACKED_DTYPES:
        return None
    queue, met, masked, shifted = [constant], {constant}, None, False
    while queue:
        node = queue.pop()
        for user in node.users:
            name = str(getattr(getattr(user.target, "_schema", None), "name", ""))
            if name in _BITS_OF_PRODUCTS and user.args[1] is node:
                return _BITS_OF_PRODUCTS[name]
            short, mask = name.removeprefix("aten::"), user.args[1] if len(user.args) > 1 else None
            if not user.args or user.args[0] is not node:  # by how many bits, or a mask of another tensor
                continue
            shifted |= short in _SHIFTS
            if short in _MASKS and isinstance(mask, int) and mask in _MASKED_BITS:
                masked = _MASKED_BITS[mask]
            elif short in _BEFORE_MASKS and user not in met:
                met.add(user)
                queue.append(user)
    return masked if shifted else None
