"""The operations of ggml in torch, by the name that `ggml_op_desc` gives them.

Each reader takes a `GgmlReading`, which knows sizes and parameters of the operation, and returns the function that
runs: it is called with the dtypes of the run and the values of what the operation reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sqrtdk.frontends.ggml.attention import flash_attention, soft_max
from sqrtdk.frontends.ggml.graph import GgmlTensor
from sqrtdk.frontends.ggml.rotation import rotation
from sqrtdk.frontends.ggml.rounding import MULTIPLIED_IN, ggml_rounded
from sqrtdk.frontends.ggml.views import Shape
from sqrtdk.frontends.program import RunDtypes

Run = Callable[..., Tensor]
_GELU_LIMIT = 10.0  # beyond it ggml's table of gelu is not asked


@dataclass(frozen=True, slots=True, eq=False)
class GgmlReading:
    """What is known of an operation before it runs.

    Attributes:
        node: the operation.
        sources: what it reads, in the order of the values.
        batched: whether each of these depends on the token ids.
        shape: shape of the result; its first size is -1 if the result is batched.
        kept: keys of the cache that are read, of a product with keys; None for all.
    """

    node: GgmlTensor
    sources: tuple[GgmlTensor, ...]
    batched: tuple[bool, ...]
    shape: Shape
    kept: Tensor | None = None

    def number(self, at: int) -> float:
        """Return a floating-point parameter."""
        return float(self.node.real[at])

    def whole(self, at: int) -> int:
        """Return a whole parameter."""
        return int(self.node.whole[at])


class UnreadError(Exception):
    """An operation, or one with these parameters, that nobody reads; the text names it."""


def aligned_operands(reading: GgmlReading, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return two operands that broadcast: one with rows of ids gets the axis of heads that the other one has."""
    if reading.batched[0] and y.dim() > x.dim():
        x = x.unsqueeze(1)
    if reading.batched[1] and x.dim() > y.dim():
        y = y.unsqueeze(1)
    return x, y


def _two(operation: Callable[[Tensor, Tensor], Tensor]) -> Callable[[GgmlReading], Run]:
    def read(reading: GgmlReading) -> Run:
        return lambda numbers, x, y: operation(*aligned_operands(reading, x, y))

    return read


def _one(operation: Callable[[Tensor], Tensor]) -> Callable[[GgmlReading], Run]:
    return lambda reading: lambda numbers, x: operation(x)


def _rms_norm(reading: GgmlReading) -> Run:
    eps = reading.number(0)
    return lambda numbers, x: x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def _layer_norm(reading: GgmlReading) -> Run:
    eps = reading.number(0)
    return lambda numbers, x: functional.layer_norm(x, x.shape[-1:], eps=eps)


def _l2_norm(reading: GgmlReading) -> Run:
    eps = reading.number(0)
    return lambda numbers, x: functional.normalize(x, dim=-1, eps=eps)


def _scale(reading: GgmlReading) -> Run:
    factor, shift = reading.number(0), reading.number(1)
    if shift:
        return lambda numbers, x: x * factor + shift
    return lambda numbers, x: x * factor


def _product(reading: GgmlReading) -> Run:
    """`MUL_MAT(a, b)` is `b @ a.mT`; heads of `a` serve several of `b`."""
    a = reading.sources[0]
    if a.type not in MULTIPLIED_IN:
        raise UnreadError(f"MUL_MAT of {a.type}")
    kind = MULTIPLIED_IN[a.type]

    def linear(numbers: RunDtypes, weight: Tensor, x: Tensor) -> Tensor:
        return functional.linear(ggml_rounded(numbers, x, kind), weight)

    def product(numbers: RunDtypes, left: Tensor, x: Tensor) -> Tensor:
        left, x = aligned_operands(reading, left, x)
        if x.dim() > 3 and left.shape[-3] != x.shape[-3]:
            left = left.repeat_interleave(x.shape[-3] // left.shape[-3], -3)
        return ggml_rounded(numbers, x, kind) @ left.mT

    return linear if a.is_weight and a.ne[2] == 1 else product


def _product_of_experts(reading: GgmlReading) -> Run:
    """Each token is multiplied by the weights of the experts that were picked for it."""
    weight, x, picked = reading.sources
    kind, used, wide = MULTIPLIED_IN.get(weight.type), picked.ne[0], weight.ne[1]
    if kind is None:
        raise UnreadError(f"MUL_MAT_ID of {weight.type}")

    def run(numbers: RunDtypes, weights: Tensor, x_: Tensor, ids: Tensor) -> Tensor:
        rows = ggml_rounded(numbers, x_, kind).reshape(-1, x.ne[1], x.ne[0]).expand(-1, used, -1)
        ids = ids.reshape(-1, used)
        made = rows.new_zeros(rows.shape[0], used, wide)
        for expert in range(weights.shape[0]):
            row, slot = (ids == expert).nonzero(as_tuple=True)
            if row.numel():
                made = made.index_put((row, slot), functional.linear(rows[row, slot], weights[expert]))
        return made.reshape(reading.shape)

    return run


def _bias_of_experts(reading: GgmlReading) -> Run:
    return lambda numbers, x, bias, ids: x + bias[ids.reshape(x.shape[:-1])]


def _rows(reading: GgmlReading) -> Run:
    table, ids = reading.sources
    if not reading.batched[0]:
        return lambda numbers, x, at: functional.embedding(at.long(), x).reshape(reading.shape)
    if not reading.batched[1]:
        return lambda numbers, x, at: x[..., at.reshape(-1).long(), :].reshape(reading.shape)

    def gather(numbers: RunDtypes, x: Tensor, at: Tensor) -> Tensor:
        every = x.reshape(-1, table.ne[2], table.ne[1], table.ne[0])
        index = at.reshape(-1, table.ne[2], ids.ne[0], 1).long()
        return every.take_along_dim(index, -2).reshape(reading.shape)

    return gather


def _sorted(reading: GgmlReading) -> Run:
    descending = reading.node.op == "TOP_K" or reading.whole(0) == 1
    count = reading.node.ne[0]
    return lambda numbers, x: torch.argsort(x, stable=True, dim=-1, descending=descending)[..., :count]


def _concat(reading: GgmlReading) -> Run:
    axis = -1 - reading.whole(0)
    return lambda numbers, x, y: torch.cat(aligned_operands(reading, x, y), axis)


def _repeat(reading: GgmlReading) -> Run:
    ne, source = reading.node.ne, reading.sources[0].ne
    times = [a // b for a, b in zip(ne[::-1], source[::-1], strict=True)]

    def run(numbers: RunDtypes, x: Tensor) -> Tensor:
        whole = x.reshape(-1, *source[2::-1])
        return whole.repeat(times[0], *times[1:]).reshape(reading.shape)

    return run


def _clamp(reading: GgmlReading) -> Run:
    low, high = reading.number(0), reading.number(1)
    return lambda numbers, x: x.clamp(low, high)


def _same(reading: GgmlReading) -> Run:
    """CONT, CPY, DUP: the same values, in the dtype and the shape of the result."""
    kind = reading.node.type

    def run(numbers: RunDtypes, x: Tensor, *_: Tensor) -> Tensor:
        y = ggml_rounded(numbers, x, kind)
        return y if len(reading.shape) == y.dim() and y.shape[1:] == reading.shape[1:] else y.reshape(reading.shape)

    return run


def _gelu(numbers: RunDtypes, x: Tensor) -> Tensor:
    """GELU by tanh, from a table in float16, as the CPU has it."""
    y = ggml_rounded(numbers, functional.gelu(ggml_rounded(numbers, x, "f16"), approximate="tanh"), "f16")
    return (
        y
        if numbers.wide is not None or not numbers.rounds
        else torch.where(x.abs() < _GELU_LIMIT, y, functional.relu(x))
    )


def _gelu_quick(numbers: RunDtypes, x: Tensor) -> Tensor:
    x = ggml_rounded(numbers, x, "f16")
    return ggml_rounded(numbers, x * torch.sigmoid(1.702 * x), "f16")


_GATES: Mapping[str, Callable[[RunDtypes, Tensor], Tensor]] = {
    "REGLU": lambda numbers, x: functional.relu(x),
    "GEGLU": _gelu,
    "SWIGLU": lambda numbers, x: functional.silu(x),
    "GEGLU_ERF": lambda numbers, x: functional.gelu(x),
    "GEGLU_QUICK": _gelu_quick,
}


def _gated(reading: GgmlReading) -> Run:
    swapped, single, gate = reading.whole(1), len(reading.sources) == 1, _GATES.get(reading.node.op)
    alpha, limit = reading.number(2), reading.number(3)

    def run(numbers: RunDtypes, x: Tensor, *others: Tensor) -> Tensor:
        a, b = x.chunk(2, -1) if single else (x, others[0])
        a, b = (b, a) if swapped else (a, b)
        if gate is not None:
            return gate(numbers, a) * b
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)  # SWIGLU_OAI
        return a * torch.sigmoid(alpha * a) * (b + 1)

    return run


def _rope(reading: GgmlReading) -> Run:
    run = rotation(reading.node, len(reading.sources) > 2)
    if run is None:
        raise UnreadError(f"ROPE in mode {reading.whole(2)}")
    return run


def _soft_max(reading: GgmlReading) -> Run:
    return soft_max(reading.number(0), reading.number(1), reading.kept)


def _flash(reading: GgmlReading) -> Run:
    q, k = reading.sources[:2]
    if MULTIPLIED_IN.get(k.type) is None:
        raise UnreadError(f"FLASH_ATTN_EXT with keys in {k.type}")
    scale, bias, cap = (reading.number(at) for at in range(3))
    return flash_attention(scale, bias, cap, MULTIPLIED_IN[k.type], q.ne[1], reading.shape, reading.kept)


GGML_OPERATIONS: dict[str, Callable[[GgmlReading], Run]] = {
    "ADD": _two(torch.add), "ADD1": _two(torch.add), "SUB": _two(torch.sub), "MUL": _two(torch.mul),
    "DIV": _two(torch.div),
    "SQR": _one(torch.square), "SQRT": _one(torch.sqrt), "LOG": _one(torch.log), "SIN": _one(torch.sin),
    "COS": _one(torch.cos), "ABS": _one(torch.abs), "SGN": _one(torch.sign), "NEG": _one(torch.neg),
    "STEP": _one(lambda x: (x > 0).to(x.dtype)), "TANH": _one(torch.tanh), "ELU": _one(functional.elu),
    "RELU": _one(functional.relu), "SIGMOID": _one(torch.sigmoid), "SILU": _one(functional.silu),
    "GELU": lambda reading: _gelu, "GELU_QUICK": lambda reading: _gelu_quick, "GELU_ERF": _one(functional.gelu),
    "HARDSWISH": _one(functional.hardswish), "HARDSIGMOID": _one(functional.hardsigmoid), "EXP": _one(torch.exp),
    "EXPM1": _one(torch.expm1), "SOFTPLUS": _one(functional.softplus), "FLOOR": _one(torch.floor),
    "CEIL": _one(torch.ceil), "ROUND": _one(torch.round), "TRUNC": _one(torch.trunc),
    "SUM_ROWS": _one(lambda x: x.sum(-1, keepdim=True)), "MEAN": _one(lambda x: x.mean(-1, keepdim=True)),
    "CUMSUM": _one(lambda x: x.cumsum(-1)),
    "RMS_NORM": _rms_norm, "NORM": _layer_norm, "L2_NORM": _l2_norm, "SCALE": _scale, "CLAMP": _clamp,
    "MUL_MAT": _product, "MUL_MAT_ID": _product_of_experts, "ADD_ID": _bias_of_experts, "GET_ROWS": _rows,
    "ARGSORT": _sorted, "TOP_K": _sorted, "CONCAT": _concat, "REPEAT": _repeat,
    "CONT": _same, "CPY": _same, "DUP": _same,
    "REGLU": _gated, "GEGLU": _gated, "SWIGLU": _gated, "SWIGLU_OAI": _gated, "GEGLU_ERF": _gated,
    "GEGLU_QUICK": _gated,
    "ROPE": _rope, "SOFT_MAX": _soft_max,
    "FLASH_ATTN_EXT": _flash,
}  # fmt: skip
