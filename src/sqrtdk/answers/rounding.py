"""How the other side may be rounded: kinds of weights and of what enters a product, applied to a copy of A.

The floor of an answer is what rounding alone does to it. A is rounded as B is, because a fault may hide below the
rounding of 4 bits, and because faults amplify rounding. What the rounding of a kind leaves open is estimated by running
the copy twice: with its weights rounded, and with the inputs of its products rounded as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sqrtdk.answers.edited import Edited
from sqrtdk.compare.weights.grids import PER_ROW, PER_TENSOR, Grid, sharing_by

Round = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Rounding:
    """A kind of rounding.

    Attributes:
        name: How the report calls it; of weights on a grid, the name that `diff` of two models gives it.
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


def _on_grid(grid: Grid, scales: torch.dtype | None = torch.float16) -> Round:
    """Return the rounding to a grid, with scales stored in a dtype; rows that its groups don't divide are one group.

    llama.cpp keeps such a matrix in float16, which `signed scales`, its own rule, leaves as it is.
    """

    def rounded(values: Tensor) -> Tensor:
        if grid.sharing.columns and values.shape[-1] % grid.sharing.columns:
            return values if grid.zero == "signed scales" else replace(grid, sharing=PER_ROW).rounded(values, scales)
        return grid.rounded(values, scales)

    return rounded


_HALF = _to(torch.float16)
INT8_ROWS, INT8, INT4 = Grid("int8", PER_ROW), Grid("int8", sharing_by(32)), Grid("int4", sharing_by(32))
Q4_0, FP8 = replace(INT4, zero="signed scales"), Grid("fp8 e4m3", PER_TENSOR)
_ROWS, _EIGHT_BITS, _FP8 = _on_grid(INT8_ROWS), _on_grid(INT8), _on_grid(FP8, None)
ROUNDINGS = (
    Rounding("float32", _same, _nearly),
    Rounding("TF32", _ten_bits, _ten_bits, of_results=True),
    Rounding("bfloat16", _to(torch.bfloat16), _to(torch.bfloat16), runs_in=torch.bfloat16, of_results=True),
    Rounding("float16", _HALF, _HALF, cache=_HALF, products=_HALF, of_results=True),
    Rounding(INT8_ROWS.name, _ROWS, _to(torch.bfloat16)),
    Rounding(f"{INT8_ROWS.name}, linear layers alone", _on_grid(INT8_ROWS, None), _nearly, linear=True),
    Rounding(f"{INT8_ROWS.name}, and inputs", _ROWS, _ROWS, head=False),
    # as in llama.cpp, whose cache is float16 whatever the weights are
    Rounding(INT8.name, _EIGHT_BITS, _EIGHT_BITS, cache=_HALF, products=_HALF),
    Rounding(Q4_0.name, _on_grid(Q4_0), _EIGHT_BITS, cache=_HALF, products=_HALF),
    Rounding(INT4.name, _on_grid(INT4), _to(torch.bfloat16), head=False),
    Rounding(FP8.name, _FP8, _FP8, head=False),
    Rounding("float16 cache", _same, _same, cache=_HALF, products=_HALF),
    Rounding("fp8 cache", _same, _same, cache=_to(torch.float8_e4m3fn)),
    Rounding("int8 cache", _same, _same, cache=_ROWS),
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
