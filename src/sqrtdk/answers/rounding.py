"""How the other side may be rounded: kinds of weights and of what enters a product, applied to a copy of A.

The floor of an answer is what rounding alone does to it. A is rounded as B is, because a fault may hide below the
rounding of 4 bits, and because faults amplify rounding. What the rounding of a kind leaves open is estimated by running
the copy twice: with its weights rounded, and with the inputs of its products rounded as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sqrtdk.answers.edited import Edited

GROUP = 32  # entries that share a scale in GGUF's Q8_0 and Q4_0
Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Rounding:
    """A kind of rounding.

    Attributes:
        name: How the report calls it.
        weights: Rounds a matrix of weights, (out, in).
        inputs: Rounds what enters a product, (..., in).
        head: Whether the embedding and the head are rounded too.
        linear: Whether it rounds the weights of linear layers alone: of a head that is tied, not the embedding.
        cache: Rounds k and v of an attention; None if it does not.
        products: Rounds q and the weights of an attention, which a rounded cache meets; None if it does not.
        of_results: Whether it rounds mainly results, whose roundings no copy repeats: A rounded alike comes no nearer.
        runs_in: Dtype that everything is computed in, beside products; None for float32.
    """

    name: str
    weights: Round
    inputs: Round
    head: bool = True
    linear: bool = False
    cache: Round | None = None
    products: Round | None = None
    runs_in: torch.dtype | None = None
    of_results: bool = False


def _to(dtype: torch.dtype) -> Round:
    return lambda values: values.to(dtype).to(values.dtype)


def _same(values: Tensor) -> Tensor:
    return values


def _nearly(values: Tensor) -> Tensor:
    """Round to 21 bits, as much as sums of float32 in another order are apart."""
    if values.dtype is not torch.float32:
        return values
    large = values * 2**3
    return (values + large) - large


def _ten_bits(values: Tensor) -> Tensor:
    """Round to the 11 significant bits of TF32."""
    large = values * (2**13 + 1)
    return large - (large - values)


def rounded_groups(values: Tensor, bits: int, group: int | None = GROUP, scales: torch.dtype = torch.float16) -> Tensor:
    """Round to signed integers that share a scale: `group` entries of a row, or the row.

    The scale is max |w| / (2^(bits - 1) - 1), stored as `scales`; rounding is to nearest, as in GGUF's Q8_0 for 8 bits.

    Example:
        >>> rounded_groups(torch.tensor([[1.0, 0.5, -0.3]]), 8, None)
        tensor([[ 0.9999,  0.5039, -0.2992]])
    """
    width = values.shape[-1]
    if group is None or width % group:
        group = width
    parts = values.float().reshape(*values.shape[:-1], -1, group)
    most = 2 ** (bits - 1) - 1
    scale = parts.abs().amax(-1, keepdim=True) / most
    whole = torch.where(scale > 0, parts / scale, 0.0).round()
    rounded: Tensor = whole * scale.to(scales).float()
    return rounded.flatten(-2).to(values.dtype)


def q4_0(values: Tensor) -> Tensor:
    """Round as GGUF's Q4_0.

    With m the entry of largest magnitude: d = m / -8, q = floor(w / d + 8.5) in 0 .. 15, w = d (q - 8).
    """
    if values.shape[-1] % GROUP:
        return values
    parts = values.float().reshape(*values.shape[:-1], -1, GROUP)
    largest = parts.gather(-1, parts.abs().argmax(-1, keepdim=True))
    scale = largest / -8
    whole = torch.where(scale != 0, parts / scale + 8.5, 8.0).floor().clamp(0, 15)
    rounded: Tensor = (whole - 8) * scale.half().float()
    return rounded.flatten(-2).to(values.dtype)


def _eight_bits(values: Tensor) -> Tensor:
    return rounded_groups(values, 8)


def _rows(values: Tensor) -> Tensor:
    return rounded_groups(values, 8, None)


def _rows_of_float32(values: Tensor) -> Tensor:
    return rounded_groups(values, 8, None, torch.float32)


def _fours(values: Tensor) -> Tensor:
    return rounded_groups(values, 4)


def _fp8(values: Tensor) -> Tensor:
    scale = values.abs().amax().clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (values / scale).to(torch.float8_e4m3fn).to(values.dtype) * scale


_HALF = _to(torch.float16)
ROUNDINGS = (
    Rounding("float32", _same, _nearly),
    Rounding("TF32", _ten_bits, _ten_bits, of_results=True),
    Rounding("bfloat16", _to(torch.bfloat16), _to(torch.bfloat16), runs_in=torch.bfloat16, of_results=True),
    Rounding("float16", _HALF, _HALF, cache=_HALF, products=_HALF, of_results=True),
    Rounding("int8, a scale a row", _rows, _to(torch.bfloat16)),
    Rounding("int8, a scale a row, linear layers alone", _rows_of_float32, _nearly, linear=True),
    Rounding("int8, a scale a row, and inputs", _rows, _rows, head=False),
    # as in llama.cpp, whose cache is float16 whatever the weights are
    Rounding("int8, groups of 32", _eight_bits, _eight_bits, cache=_HALF, products=_HALF),
    Rounding("int4, groups of 32", q4_0, _eight_bits, cache=_HALF, products=_HALF),
    Rounding("int4, groups of 32, symmetric", _fours, _to(torch.bfloat16), head=False),
    Rounding("fp8, a scale a tensor", _fp8, _fp8, head=False),
    Rounding("float16 cache", _same, _same, cache=_HALF, products=_HALF),
    Rounding("fp8 cache", _same, _same, cache=_to(torch.float8_e4m3fn)),
    Rounding("int8 cache", _same, _same, cache=_rows),
)
EXACT = ROUNDINGS[0]


def round_weights(copy: Edited, rounding: Rounding) -> None:
    """Round every matrix of a copy's weights; each stays one parameter where it was one."""
    done: dict[int, nn.Parameter] = {}
    heads = {id(part) for part in (copy.head, copy.embedding)}
    for module in copy.module.modules():
        if rounding.linear and not isinstance(module, nn.Linear):
            continue
        if id(module) in heads and not rounding.head:
            continue
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.dim() < 2:
                continue
            if id(parameter) not in done:
                done[id(parameter)] = nn.Parameter(rounding.weights(parameter.detach()), requires_grad=False)
            module._parameters[name] = done[id(parameter)]


def round_inputs(copy: Edited, rounding: Rounding) -> None:
    """Round what enters each linear layer of a copy, or its cache: the second run of a floor."""
    if rounding.runs_in is not None:
        _cast(copy, rounding.runs_in)
        return
    if rounding.cache is not None:
        for module, _ in copy.attentions():
            copy.change(module, cache=rounding.cache, products=rounding.products)
    head = copy.head
    for module in copy.module.modules():
        if isinstance(module, nn.Linear) and (rounding.head or module is not head):
            module.register_forward_pre_hook(lambda _module, inputs: (rounding.inputs(inputs[0]), *inputs[1:]))


def _cast(copy: Edited, dtype: torch.dtype) -> None:
    """Put parameters of a dtype into a copy; frequencies of a rotation stay as they are."""
    for module in copy.module.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                module._parameters[name] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and "freq" not in name:
                module._buffers[name] = buffer.to(dtype)
