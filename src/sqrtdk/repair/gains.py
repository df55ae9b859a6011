"""Rows of a call that are not simply a projection's: gains of a norm, and latent attention.

Gain of a q/k norm: the norm removes the size of the projection, so only the gain can be scaled.

Multi-head latent attention: a key has a part for each head, and a part that all heads share: k = [k_nope, k_rope].
k_nope comes from the up-projection that also gives v, k_rope from a projection of its own, the same for every head.
Logits are q_nope . k_nope + q_rope . k_rope: q_nope takes gamma^balance, k_nope gamma^(1 - balance), q_rope gamma, and
k_rope is left alone (Kimi Team 2025, Kimi K2, section 2.1, arXiv:2507.20534).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sqrtdk.repair.lookup import LEAST_SIMILARITY, Parameters
from sqrtdk.repair.rows import HeadRows, Refusal, compared, explained, key_head_features
from sqrtdk.tracing import CallTensors, Vector

if TYPE_CHECKING:
    from jaxtyping import Float, Int

_NORM_OF_LETTER = {"q": re.compile(r"(^|[._])q"), "k": re.compile(r"(^|[._])k"), "v": re.compile(r"(^|[._])k?v")}
_LEAST_FIT = 0.999  # share of the squares; between trace and clip, one step may move a gain by 3%
_GAIN_OFFSETS = (0.0, 1.0)  # the gain is the parameter (Llama), or 1 + the parameter (Gemma)


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """A parameter that may be the gain ("" for no gain), and the share of the normalised values that it explains."""

    name: str
    offset: float
    index: Tensor  # (H, E), into the flattened parameter
    shift: str | None  # name of the bias added after the gain
    share: float


def gain_rows(side: str, vector: Vector, heads: int, site: str, parameters: Parameters) -> list[HeadRows]:
    """Return the rows of the gain, and of its bias, of the last norm between a projection and the product.

    Raises:
        Refusal: The norm has no gain, or its parameter can't be identified.
    """
    at = max(number for number, step in enumerate(vector.steps) if step.name == "norm")
    before = vector.steps[at - 1].values if at else vector.projected
    after = vector.steps[at].values
    kind = vector.steps[at].detail
    if before is None or after is None:
        raise Refusal(f"the values at the {kind} norm of {side} are not known")
    scope = _scope(vector, site)
    named = vector.steps[at].gain
    # The trace names the gain where it saw the multiplication; a fused norm shows the values before and after alone.
    names = [parameters.first(named)] if named in parameters else list(_candidates(scope, parameters))
    fits = list(_fits(compared(before), compared(after), _key_heads(vector), names, parameters))
    if any(fit.name for fit in fits) and named in parameters:
        # a gain of ones looks like none, but the optimizer may have moved it since the trace
        fits = [fit for fit in fits if fit.name]
    best = max(fit.share for fit in fits)
    if best == 0.0:
        raise Refusal(f"{side} is all zeros, which does not tell the gain of its norm")
    ties = [fit for fit in fits if fit.share == best]
    # A new model has q_norm.weight == k_norm.weight == 1, and both explain q: the name decides.
    if len(ties) > 1:
        ties = [fit for fit in ties if _NORM_OF_LETTER[side].search(fit.name[len(scope) :])] or ties
    if best < _LEAST_FIT or not all(fit.name for fit in ties):
        raise Refusal(f"{side} is normalised ({kind}) without a gain that is a parameter of its own")
    if len({fit.name for fit in ties}) > 1:
        raise Refusal(f"the gain of {side} is one of {', '.join(fit.name for fit in ties)}: it can't be told which")
    fit = ties[0]
    index = key_head_features(fit.index, heads)
    rows = [HeadRows(fit.name, side, index, None, fit.offset)]
    return rows if fit.shift is None else [*rows, HeadRows(fit.shift, side, index, None)]


def _key_heads(vector: Vector) -> Int[Tensor, " H"]:
    """Return the projected head of each head; key heads may have been repeated before the product."""
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
    """Yield how well each known gain explains the values after a norm, and first how well none does.

    Args:
        before: Values before the norm.
        after: Values after it.
        own: (H,) index of each projected head.
        names: Names of parameters that may be the gain.
        parameters: Parameters of the model.
    """
    heads, dim = after.shape[1], after.shape[-1]
    inner = torch.arange(dim)
    # One gain for all heads (Qwen3: E numbers), or one for each projected head (OLMo 2: H * E numbers).
    layouts = {dim: inner.expand(heads, dim), (int(own.max()) + 1) * dim: own[:, None] * dim + inner}
    units = list(_normalised(before))
    yield _Fit("", 0.0, inner, None, max(explained(unit, after) for unit in units))  # without a gain
    for name in names:
        parameter = parameters.get(name)
        index = layouts.get(parameter.numel())
        if index is None:
            continue
        gain = parameters.whole(name).double().flatten()[index][:, None]
        shift = name.removesuffix("weight") + "bias"
        shift_name = shift if shift in parameters and parameters.get(shift).shape == parameter.shape else None
        moved = 0.0 if shift_name is None else parameters.whole(shift).double().flatten()[index][:, None]
        for offset in _GAIN_OFFSETS:
            share = max(explained(unit * (offset + gain) + moved, after) for unit in units)
            yield _Fit(name, offset, index, shift_name, share)


def _candidates(scope: str, parameters: Parameters) -> Iterator[str]:
    for name in parameters.below(scope):
        if "bias" not in name.rpartition(".")[2] and parameters.get(name).is_floating_point():
            yield name


def _scope(vector: Vector, site: str) -> str:
    """Return the path of the module that holds both the attention and the projection, and thus the norm."""
    if vector.projection is None or not vector.projection.name:
        return site
    projection = vector.projection.name.split(".")[:-2]
    both = zip(site.split("."), projection, strict=False)
    return ".".join(one for one, _ in takewhile(lambda pair: pair[0] == pair[1], both))


def _normalised(values: Float[Tensor, "B H L E"]) -> Iterator[Float[Tensor, "B H L E"]]:
    """Yield values divided by their length: per head and over all heads, with and without their mean."""
    # A norm acts on each head, or on all heads together before they are split (OLMo 2); with the mean taken off it is a
    # LayerNorm, without an RMS norm.
    for axes in ((-1,), (1, -1)):
        for centred in (values, values - values.mean(axes, keepdim=True)):
            square = centred.square().mean(axes, keepdim=True)
            # A row of zeros stays 0 rather than becoming NaN. The norm's own eps is unknown, and too small to matter
            # for the fit.
            root = square.clamp(min=torch.finfo(torch.float64).tiny).sqrt()
            yield centred / root
            # x / |x|: l2 has no sqrt(E), as in F.normalize
            if axes == (-1,) and centred is values:
                yield centred / (root * values.shape[-1] ** 0.5)


def latent_rows(tensors: CallTensors, parameters: Parameters) -> tuple[HeadRows, ...] | None:
    """Return the parameter rows of a call whose key and value share a latent, as in multi-head latent attention.

    There the first or last channels of the key come from the projection of v, and the rest from another one.

    Returns:
        The rows that set the logits, or None for any other call.
    """
    query, key, value = tensors.query, tensors.key, tensors.value
    if key.projection is not None or query.projection is None or value.projection is None:
        return None
    if any(step.name in ("norm", "unknown") for vector in (query, key) for step in vector.steps):
        return None
    if key.projected is None or value.projection.weight is None:
        return None
    try:
        place = parameters.find("v", value.projection)
    except Refusal:
        return None
    weight = parameters.whole(place.name)
    # Some code multiplies x @ W, with features along the second axis.
    weight = weight if place.axis == 0 else weight.mT
    index = _rest(value.projection.features.cpu() + place.shift, weight.shape[0])
    if index is None or index.shape[1] >= key.values.shape[-1]:
        return None
    # "nope": the channels without a rotary position, as DeepSeek calls them.
    nope = index.shape[1]
    inputs = compared(value.projection.input.unsqueeze(1))  # (1, 1, N, D)
    projected = inputs @ weight[index].to(torch.float64).mT
    given = compared(key.projected)
    if given.shape[1] != projected.shape[1]:
        return None
    # DeepSeek puts the unrotated channels first, cat((k_nope, k_rope)); other code puts them last
    starts = (0, given.shape[-1] - nope)
    shares = [explained(projected, given[..., start : start + nope]) for start in starts]
    start = starts[0] if shares[0] >= shares[1] else starts[1]
    if max(shares) <= LEAST_SIMILARITY or value.projection.bias is not None:
        return None
    heads = query.values.shape[1]
    of_query = key_head_features(query.projection.features, heads)
    channels = torch.arange(of_query.shape[1])
    own = (channels >= start) & (channels < start + nope)
    return (
        *parameters.projection_rows("q", query, of_query[:, own]),
        *parameters.projection_rows("whole", query, of_query[:, ~own]),
        HeadRows(place.name, "k", key_head_features(index, heads), place.axis),
    )


def _rest(used: Int[Tensor, "H Ev"], features: int) -> Int[Tensor, "H E"] | None:
    """Return the features that v does not use, the same number for each head, in order; None if they don't divide
    evenly."""
    free = torch.ones(features, dtype=torch.bool)
    free[used.flatten()] = False
    rest = free.nonzero().flatten()
    heads = used.shape[0]
    return rest.view(heads, -1) if len(rest) and len(rest) % heads == 0 else None
