"""The gain of a q/k norm: what follows the projection's size away leaves it as the only thing to scale."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.repair.lookup import Parameters
from sqrtdk.repair.rows import Refusal, Rows, compared, explained, spread
from sqrtdk.tracing import Vector

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_NAMES = {"q": re.compile(r"(^|[._])q"), "k": re.compile(r"(^|[._])k"), "v": re.compile(r"(^|[._])k?v")}
_FITS = 0.999  # share of the squares: a gain may have moved by 3% in the step between the trace and the clip
_OFFSETS = (0.0, 1.0)  # the gain is the parameter, or 1 + it


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """A parameter that may be the gain, or "" for none, and how much of the normalised values it explains."""

    name: str
    offset: float
    index: Tensor  # (H, E), of the flattened parameter
    shift: str | None  # name of what is added after the gain
    share: float


def gain_rows(side: str, vector: Vector, heads: int, site: str, parameters: Parameters) -> list[Rows]:
    """Rows of the gain, and of the shift, of the last norm between a projection and the product.

    Raises:
        Refusal: the norm has none, or it can't be told which it is.
    """
    at = max(number for number, step in enumerate(vector.steps) if step.name == "norm")
    before = vector.steps[at - 1].values if at else vector.projected
    after = vector.steps[at].values
    kind = vector.steps[at].detail
    if before is None or after is None:
        raise Refusal(f"the values at the {kind} norm of {side} are not known")
    scope = _scope(vector, site)
    named = vector.steps[at].gain
    names = [parameters.first(named)] if named in parameters else list(_candidates(scope, parameters))
    fits = list(_fits(compared(before), compared(after), _key_heads(vector), names, parameters))
    if any(fit.name for fit in fits) and named in parameters:
        fits = [fit for fit in fits if fit.name]  # a gain of ones, which the optimizer has moved since, is not none
    best = max(fit.share for fit in fits)
    if best == 0.0:
        raise Refusal(f"{side} is all zeros, which does not tell the gain of its norm")
    ties = [fit for fit in fits if fit.share == best]
    if len(ties) > 1:
        ties = [fit for fit in ties if _NAMES[side].search(fit.name[len(scope) :])] or ties
    if best < _FITS or not all(fit.name for fit in ties):
        raise Refusal(f"{side} is normalised ({kind}) without a gain that is a parameter of its own")
    if len({fit.name for fit in ties}) > 1:
        raise Refusal(f"the gain of {side} is one of {', '.join(fit.name for fit in ties)}: it can't be told which")
    fit = ties[0]
    index = spread(fit.index, heads)
    rows = [Rows(fit.name, side, index, None, fit.offset)]
    return rows if fit.shift is None else [*rows, Rows(fit.shift, side, index, None)]


def _key_heads(vector: Vector) -> Int[Tensor, " H"]:
    """The number of the projected head that each head is: key heads may have been repeated before the product."""
    if vector.projection is None:
        return torch.arange(vector.values.shape[1])
    number: Tensor
    _, number = torch.unique(vector.projection.features[:, 0].cpu(), return_inverse=True)
    return number


def _fits(
    before: Float[Tensor, "B H L E"],
    after: Float[Tensor, "B H L E"],
    own: Int[Tensor, " H"],
    names: list[str],
    parameters: Parameters,
) -> Iterator[_Fit]:
    heads, dim = after.shape[1], after.shape[-1]
    inner = torch.arange(dim)
    layouts = {dim: inner.expand(heads, dim), (int(own.max()) + 1) * dim: own[:, None] * dim + inner}
    units = list(_normalised(before))
    yield _Fit("", 0.0, inner, None, max(explained(unit, after) for unit in units))  # no gain at all
    for name in names:
        parameter = parameters.get(name)
        index = layouts.get(parameter.numel())
        if index is None:
            continue
        gain = parameters.whole(name).double().flatten()[index][:, None]
        shift = name.removesuffix("weight") + "bias"
        shift_name = shift if shift in parameters and parameters.get(shift).shape == parameter.shape else None
        moved = 0.0 if shift_name is None else parameters.whole(shift).double().flatten()[index][:, None]
        for offset in _OFFSETS:
            share = max(explained(unit * (offset + gain) + moved, after) for unit in units)
            yield _Fit(name, offset, index, shift_name, share)


def _candidates(scope: str, parameters: Parameters) -> Iterator[str]:
    for name in parameters.below(scope):
        if "bias" not in name.rpartition(".")[2] and parameters.get(name).is_floating_point():
            yield name


def _scope(vector: Vector, site: str) -> str:
    """The module that holds both the attention and the projection: the norm is in it."""
    if vector.projection is None or not vector.projection.name:
        return site
    projection = vector.projection.name.split(".")[:-2]
    both = zip(site.split("."), projection, strict=False)
    return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _normalised(values: Float[Tensor, "B H L E"]) -> Iterator[Float[Tensor, "B H L E"]]:
    """Values over their length, by head and over all heads, as they are and without their mean."""
    for axes in ((-1,), (1, -1)):
        for centred in (values, values - values.mean(axes, keepdim=True)):
            square = centred.square().mean(axes, keepdim=True)
            root = square.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
            yield centred / root
            if axes == (-1,) and centred is values:
                yield centred / (root * values.shape[-1] ** 0.5)
