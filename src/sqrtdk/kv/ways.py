"""Ways to store the k and v of one call: each grain of the format, a folded channel scale, and normalised q and k."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sqrtdk.audit.cache import FOLD, QK_NORM
from sqrtdk.compare.fit import fit_rotation
from sqrtdk.kv.formats import FORMATS, ORDER, SHARED, bounds, limit_of, wide
from sqrtdk.tracing import CallTensors

OneHead = Callable[[int, int], Tensor]  # of a sequence and a key head, (S, E) in float64


@dataclass(frozen=True, slots=True)
class Way:
    """One way to store: its name, and what is read back of k and of v; `normed`: q and k are normalised before."""

    name: str
    key: OneHead
    value: OneHead
    normed: bool = False


def ways(call: CallTensors, dtype: str, scale: str, first: int) -> tuple[list[Way], str]:
    """The way that was asked for, then the others; and what channels share a scale that is folded.

    Args:
        call: its tensors.
        dtype: the format.
        scale: the grain of its scales.
        first: so many keys are stored, the others are in full precision.
    """
    k, v = call.key.values, call.value.values
    form = FORMATS[dtype]
    every = dict.fromkeys((scale, *form.grains))
    names = sorted(every, key=lambda name: (name != scale, ORDER.index(name) if name in ORDER else 0))
    found = [Way(name, stored(k, dtype, name, first), stored(v, dtype, name, first)) for name in names]
    by, folded = channel_scale(call, first)
    value = found[0].value
    found.append(Way(FOLD, stored(k, dtype, scale, first, by), value))
    if call.call is None or call.call.norm is None:
        found.append(Way(QK_NORM, stored(normalised(k), dtype, scale, first), value, normed=True))
    return found, folded


def stored(x: Tensor, dtype: str, scale: str, first: int, by: Tensor | None = None) -> OneHead:
    """What is read back of k or v (B, H, S, E), a head at a time; with `by` (H, 1, E) of x / by, times `by` again."""
    form, limit = FORMATS[dtype], limit_of(dtype, scale)
    grain = form.grains.get(scale, "fixed")

    def taken(part: Tensor, head: slice) -> Tensor:
        return part if by is None else part / by[head].to(part.dtype)

    shared = bounds(taken(x[:, :, :first], slice(None)), grain) if grain in SHARED else None

    def of_head(batch: int, head: int) -> Tensor:
        one = x[batch : batch + 1, head : head + 1]
        part = taken(one[:, :, :first], slice(head, head + 1))
        if limit is not None:
            high = part.new_tensor(limit, dtype=torch.float64)  # it may be beyond what k in float16 holds
            low = -high
        elif shared is None:
            low, high = bounds(part, grain)
        else:
            low, high = (edge[:, head : head + 1] if edge.shape[1] > 1 else edge for edge in shared)
        back = form.store(part, low, high)
        back = back if by is None else back * by[head : head + 1].double()
        return torch.cat([back, one[:, :, first:].double()], 2)[0, 0]

    return of_head


def channel_scale(call: CallTensors, first: int) -> tuple[Tensor, str]:
    """Largest |k| of each channel of each head, (H, 1, E), as k is divided by it and q multiplied.

    The channels that a rotation turns together share the larger one: then it goes into the weights of q and k.
    """
    k = call.key.values[:, :, :first]
    largest = k.abs().amax((0, 2))
    pairs = _pairs(call)
    if pairs is not None:
        one, other = pairs
        both = torch.maximum(largest[:, one], largest[:, other])
        largest[:, one] = both
        largest[:, other] = both
    largest = largest.masked_fill(largest == 0, 1.0)[:, None]
    return largest, "channels" if pairs is None else "pairs"


def _pairs(call: CallTensors) -> tuple[Tensor, Tensor] | None:
    """The channels of k that a rotation turns together; None without one, or where its layout is not known."""
    before = call.key.projected
    for point in call.key.steps:
        if point.name == "rope" and before is not None and point.values is not None:
            fit = fit_rotation(before, point.values)
            if fit is None:
                return None
            rotation = fit.rotation
            turned = torch.arange(rotation.first, rotation.first + rotation.width, device=before.device)
            half = rotation.width // 2
            return (turned[:half], turned[half:]) if rotation.layout == "half" else (turned[::2], turned[1::2])
        before = point.values
    return None


def normalised(x: Tensor) -> Tensor:
    """Each row (E numbers) with a root mean square of 1, as an RMS norm without a gain leaves it."""
    precise = wide(x)
    rms = precise.square().mean(-1, keepdim=True).sqrt()
    return precise / rms.masked_fill(rms == 0, 1.0)
