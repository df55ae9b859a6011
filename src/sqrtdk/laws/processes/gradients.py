"""The gradients of the parameters on several ranks beside those of one process.

The whole output y has a random cotangent g, and each rank takes its part of it, so that the ranks' losses sum(y * g)
add up to that of one process. Let G be the gradient of one process and G_r that of rank r. A gradient that the model
sums over ranks by itself is the same on all: G_r = c G. If the trainer is to sum it, sum_r G_r = c G. DDP and FSDP
average, so c = 1/N is right if it is the same for all parameters; and c = N in a sum that the trainer averages. What
can't be right is a factor that is not the same for all: some part of the backward pass averages where it should sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from sqrtdk._sites import fold_sites
from sqrtdk.laws.moved import moved_entries
from sqrtdk.laws.processes.shards import ShardLayout, shard_layouts

_LEAST_GRADIENT = 1e-6  # of the largest gradient: one below is rounding


@dataclass(frozen=True, slots=True)
class OddGradient:
    """Parameters whose gradients on the ranks are not those of one process.

    Attributes:
        parameters: Those with the fault that is nearest to the output, in the order of the model.
        factor: The ranks' gradients are this number times those of one process; None if they are no multiple.
        others: The factor of the other parameters.
        behind: Other parameters that differ: behind the fault gradients are mixed with right ones.
    """

    parameters: tuple[str, ...]
    factor: Fraction | None
    others: Fraction
    behind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GradientsBeside:
    """Gradients of ranks beside those of one process.

    Attributes:
        fault: The fault nearest to the output, or None.
        factor: The factor of all parameters.
        compared: Number of parameters that were compared.
    """

    fault: OddGradient | None
    factor: Fraction
    compared: int


def folded_parameters(names: Iterable[str]) -> list[str]:
    """Return the modules of parameters, with layers and modules of one parent as one name.

    Example:
        >>> folded_parameters(["h.0.k.weight", "h.0.k.bias", "h.0.v.weight", "h.1.k.bias", "h.1.v.bias", "ln.weight"])
        ['h.0-1.{k,v}', 'ln']
    """
    plain = dict.fromkeys(name.removesuffix(".weight").removesuffix(".bias") for name in names)
    parents: dict[str, list[str]] = {}
    for site in fold_sites(plain):
        parent, _, leaf = site.rpartition(".")
        parents.setdefault(parent, []).append(leaf)
    found = []
    for parent, leaves in parents.items():
        joined = leaves[0] if len(leaves) == 1 else f"{{{','.join(leaves)}}}"
        found.append(f"{parent}.{joined}" if parent else ", ".join(leaves))
    return found


def gradients_beside(alone: Mapping[str, Tensor], ranks: Sequence[Mapping[str, Tensor]]) -> GradientsBeside:
    """Return how the gradients of ranks stand to those of one process.

    Args:
        alone: By parameter.
        ranks: The same of each rank; DTensors are gathered.
    """
    largest = max((float(grad.abs().max()) for grad in alone.values() if grad.numel()), default=0.0)
    factors: dict[str, Fraction | None] = {}
    synced: dict[str, bool] = {}
    for name, whole in alone.items():
        parts = [grads.get(name) for grads in ranks]
        if not whole.numel() or float(whole.abs().max()) <= _LEAST_GRADIENT * largest:
            continue
        held = [part for part in parts if part is not None]
        if not held:
            factors[name] = Fraction(0)
            continue
        factors[name], synced[name] = _factor(whole, parts, held, len(ranks))
    counts = Counter(factor for factor in factors.values() if factor)
    most = max(counts.values(), default=0)
    # Of two factors that are as frequent, 1 is right.
    common = max((one for one, count in counts.items() if count == most), key=lambda one: one == 1, default=Fraction(1))
    wrong = [name for name, factor in factors.items() if factor != common]
    if not wrong and common > 1 and all(synced.values()):
        return GradientsBeside(OddGradient((*factors,), common, Fraction(1)), common, len(factors))
    if not wrong:
        return GradientsBeside(None, common, len(factors))
    factor = factors[wrong[-1]]  # nearest to the output
    same = tuple(name for name in wrong if factors[name] == factor)
    behind = tuple(name for name in wrong if name not in same)
    return GradientsBeside(OddGradient(same, factor, common, behind), common, len(factors))


def _factor(
    whole: Tensor, parts: Sequence[Tensor | None], held: Sequence[Tensor], count: int
) -> tuple[Fraction | None, bool]:
    """Return the factor of a gradient, None if it is no multiple, and whether the model has summed it over ranks."""
    choices = {Fraction(n) for n in range(1, count + 1)} | {Fraction(1, n) for n in range(2, count + 1)}
    if any(part.shape != whole.shape for part in held):
        shapes = [None if part is None else tuple(part.shape) for part in parts]
        for layout in shard_layouts(shapes, tuple(whole.shape), None, 0):
            for put in (layout.whole, partial(_added, layout)):
                if (factor := _multiple(whole, put(parts, tuple(whole.shape)), choices)) is not None:
                    return factor, put == layout.whole
        return None, True
    # A copy on every rank that is whole already, or one rank that has the parameter.
    distinct = _distinct_parts(held)
    return _multiple(whole, torch.stack(distinct).sum(0), choices), len(distinct) == 1


def _distinct_parts(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return the parts without copies: ranks that share the tokens have the same gradient of what they both hold."""
    found: list[Tensor] = []
    for part in parts:
        if not any(not bool(moved_entries(other, part).any()) for other in found):
            found.append(part)
    return found


def _added(layout: ShardLayout, parts: Sequence[Tensor | None], shape: tuple[int, ...]) -> Tensor:
    """Put parts together, where ranks that hold the same piece have different summands of it."""
    pieces: dict[tuple[tuple[int, ...], ...], list[Tensor]] = {}
    cuts: dict[tuple[tuple[int, ...], ...], dict[int, Tensor]] = {}
    for part, cut in zip(parts, layout.cuts, strict=True):
        if part is not None and cut is not None:
            key = tuple(tuple(places.tolist()) for places in cut.values())
            pieces.setdefault(key, []).append(part)
            cuts[key] = cut
    sums = [torch.stack(_distinct_parts(held)).sum(0) for held in pieces.values()]
    return ShardLayout(tuple(cuts.values())).whole(sums, shape)


def _multiple(whole: Tensor, other: Tensor, choices: set[Fraction]) -> Fraction | None:
    measured = float((whole.double() * other.double()).sum() / whole.double().square().sum())
    nearest = min(choices, key=lambda one: abs(float(one) - measured))
    fits = not bool(moved_entries(whole * float(nearest), other.to(whole.dtype)).any())
    return nearest if fits else None
