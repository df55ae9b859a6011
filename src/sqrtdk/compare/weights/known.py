"""Changes of weights that are known: an adapter, or a rounding. A gets them before the sides are compared.

Every weight of an adapted or quantised model differs from its original, and beside that nothing else could be seen. So
what B's weights are is asked first: A's with the update of an adapter, or A's on a coarser grid. Each is tried on A's
numbers; where it gives B's, a copy of A takes B's numbers. What is left is a difference of another kind. What the
changes cost is measured by running A with one kind of weight changed at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk.compare.weights.mixed import rounded_updates
from sqrtdk.compare.weights.nearness import near_weights
from sqrtdk.compare.weights.pairing import weights_of
from sqrtdk.compare.weights.records import KnownChange, KnownChanges, WeightFault
from sqrtdk.compare.weights.rounded import FoundRounding, found_roundings
from sqrtdk.compare.weights.updates import FoundUpdate, codes_of, found_update, rank_of, role_of
from sqrtdk.errors import MODEL_ERRORS
from sqrtdk.frontends.module import ForeignModule
from sqrtdk.messages import Message
from sqrtdk.models.adapters import Adapter, adapter_of
from sqrtdk.models.plain import plain_twin
from sqrtdk.models.records import LoadedModel
from sqrtdk.models.run import call
from sqrtdk.modules.structures import tensors_of

_MOST_COSTS = 24  # kinds of weights that are changed alone, each in a run of A
_ALONG_OUTPUTS = re.compile("a scale a column|along the outputs")
_MOST_UNTOLD = 2**9  # weights whose difference is factored


def with_known_changes(a: LoadedModel, b: LoadedModel) -> tuple[LoadedModel, LoadedModel, KnownChanges | None]:
    """Return both sides, A with the changes of B's weights that are known, and these changes.

    Args:
        a: side A.
        b: side B; layers of a quantisation or adapter library are written as plain ones, on both sides.
    """
    if isinstance(a.module, ForeignModule) or isinstance(b.module, ForeignModule):
        return _of_programs(a, b)
    a, b = _with_plain_layers(a), _with_plain_layers(b)
    one, other = _matrices(a.module), _matrices(b.module)
    differ = [name for name in one if name in other and _differ(one[name], other[name])]
    adapter, side = (a.adapter, "A") if a.adapter is not None else (b.adapter, "B")
    if adapter is not None:
        known, taken = _of_adapter(adapter, side, one, other, differ)
        known, taken = _with_roundings(known, taken, adapter, side, one, other)
    else:
        known, taken = _of_roundings(one, other, differ)
        if known is None:
            known, taken = _of_products(one, other, differ)
    if known is None:
        return a, b, None
    changed = with_weights(a, {name: other[name] for name in taken})
    bare = with_weights(a, dict(a.adapter.before)) if a.adapter is not None else a
    names = [name for change in known.changes for name in change.weights]
    known = _with_costs(known, bare, {name: other[name] for name in names if name in other})
    return changed, b, known


def _of_programs(a: LoadedModel, b: LoadedModel) -> tuple[LoadedModel, LoadedModel, KnownChanges | None]:
    """Return the same where a side is a program of another framework, whose weights have names and axes of its own."""
    weights_a, weights_b = weights_of(a.module), weights_of(b.module)
    held = {name: weight for name, weight in weights_a.items() if _is_held(a.module, name)}
    near = near_weights(held, weights_b)
    known, taken = _of_near(near)
    if known is not None:
        numbers = {name: near[name][1].reshape(held[name].shape) for name in taken}
        return with_weights(a, numbers), b, _with_costs(known, a, numbers)
    if held.keys() == weights_a.keys():
        return a, b, None
    # what A's program makes of codes has no place where B's numbers could stand: B takes A's
    held = {name: weight for name, weight in weights_b.items() if _is_held(b.module, name)}
    near = {name: (other, own) for name, (own, other) in near_weights(held, weights_a).items()}
    known, taken = _of_near(near)
    if known is None:
        return a, b, None
    numbers = {name: near[name][0].reshape(held[name].shape) for name in taken}
    known = _with_costs(replace(known, changed="B"), b, numbers)
    return a, with_weights(b, numbers), known


def _is_held(module: nn.Module, name: str) -> bool:
    with suppress(AttributeError):
        return isinstance(module.get_parameter(name), nn.Parameter)
    return False


def _of_near(near: Mapping[str, tuple[Tensor, Tensor]]) -> tuple[KnownChanges | None, Collection[str]]:
    """Return what lies between matrices of A and of B, each pair by a name, and the names for which that holds."""
    one, other = ({name: pair[side] for name, pair in near.items()} for side in (0, 1))
    differ = [name for name in near if _differ(one[name], other[name])]
    if len(differ) < 2:
        return None, ()
    known, taken = _of_roundings(one, other, differ)
    if known is None or any(_ALONG_OUTPUTS.search(change.kind) for change in known.changes):
        # graphs hold matrices as (in, out)
        one, other = ({name: side[name].mT.contiguous() for name in differ} for side in (one, other))
        again, by_rows = _of_roundings(one, other, differ)
        known, taken = (known, taken) if again is None else (again, by_rows)
    return known, taken


# -- adapters ----------------------------------------------------------------------------------------------------------


def _of_adapter(
    adapter: Adapter, side: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor], differ: Collection[str]
) -> tuple[KnownChanges | None, list[str]]:
    """Return the changes by an adapter with the mistakes in them, and the names of the weights that they give."""
    base = {**a, **adapter.before}
    names = [name for name in a if name in b and (name in adapter.updates or name in differ)]
    found = {name: found_update(name, base[name], b[name], adapter) for name in names}
    # a weight outside the adapter that nothing was put into differs for another reason
    explained = [name for name, one in found.items() if one.fault is not None]
    if not any(name in adapter.updates for name in explained):
        return None, []
    change = _change(adapter, [name for name in names if name in adapter.updates], base, b)
    return KnownChanges((change,), _faults(found, adapter), side=side), explained


def _change(adapter: Adapter, names: Sequence[str], base: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> KnownChange:
    updates = {name: adapter.updates[name] for name in names}
    moved = sum(float((b[name].double().cpu() - base[name].double().cpu()).square().sum()) for name in updates)
    size = sum(float(base[name].double().square().sum()) for name in updates)
    kinds = list(dict.fromkeys(update.kind for update in updates.values() if update.kind != "whole"))
    return KnownChange(
        kind=" + ".join(kinds) or "whole",
        weights=tuple(updates),
        rank=tuple(sorted({update.rank for update in updates.values() if update.rank})),
        scale=tuple(sorted({update.scale for update in updates.values() if update.rank})),
        size=(moved / size) ** 0.5 if size else 0.0,
    )


def _with_roundings(
    known: KnownChanges | None, taken: list[str], adapter: Adapter, side: str, a: Mapping[str, Tensor],
    b: Mapping[str, Tensor],
) -> tuple[KnownChanges | None, list[str]]:  # fmt: skip
    """Return the changes by an adapter with those by a rounding of the base or of the merged weights beside them."""
    base = {**a, **adapter.before}
    names = [name for name in a if name in b]
    if side == "B" and known is not None:
        # the adapter lies on B's own base, which may be A's rounded
        ground = {name: adapter.before.get(name, b[name]) for name in names}
        roundings, rounded = _of_roundings(a, ground, [name for name in names if _differ(a[name], ground[name])])
        explained = [
            name for name in dict.fromkeys((*taken, *rounded))
            if name in rounded or not _differ(a[name], ground[name])
        ]  # fmt: skip
        if roundings is None:
            return known, explained
        changes = (*known.changes, *roundings.changes)
        return KnownChanges(
            changes, (*known.faults, *roundings.faults), side=known.side, coarse=roundings.coarse
        ), explained
    left = [name for name in names if name not in taken and _differ(base[name], b[name])]
    found = rounded_updates(adapter, base, b, left)
    if found is None:
        return known, taken
    coarse = "A" if found.finer else "B"
    changes, faults = _roundings_of(found.roundings)
    adapted = [name for name in found.roundings if name in adapter.updates]
    undecided: tuple[str, ...] = ()
    if found.share is None:
        undecided = tuple(adapted)
    elif found.share == 1.0:
        changes = (
            _change(adapter, adapted, base, {name: adapter.updates[name].applied(base[name]) for name in adapted}),
            *changes,
        )
    elif adapted:
        codes = codes_of(found.share, adapter.updates[adapted[0]])
        name = "adapter_not_loaded" if "none" in codes else "adapter_factor"
        faults = (WeightFault(name, tuple(adapted), found.share, codes=codes), *faults)
    before = KnownChanges(side=side) if known is None else known
    changes, faults = (*before.changes, *changes), (*before.faults, *faults)
    both = replace(before, changes=changes, faults=faults, coarse=coarse, undecided=undecided)
    return both, [*taken, *found.roundings]


def _of_products(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], differ: Collection[str]
) -> tuple[KnownChanges | None, list[str]]:
    """Return the change by an adapter that no file tells of: several weights that differ by a dense product."""
    if len({name for name in a if name in b}) < 2 * len(differ) and len(differ) > _MOST_UNTOLD:
        return None, []
    ranks = {name: rank for name in differ if (rank := rank_of(a[name], b[name])) is not None}
    if len(ranks) < 2 or len(set(ranks.values())) > 1:
        return None, []
    moved = sum(float((b[name].double().cpu() - a[name].double().cpu()).square().sum()) for name in ranks)
    size = sum(float(a[name].double().square().sum()) for name in ranks) or 1.0
    change = KnownChange("product", tuple(ranks), rank=(next(iter(ranks.values())),), size=(moved / size) ** 0.5)
    return KnownChanges((change,), (WeightFault("adapter_untold", tuple(ranks)),)), list(ranks)


# -- roundings ---------------------------------------------------------------------------------------------------------


def _of_roundings(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], differ: Collection[str]
) -> tuple[KnownChanges | None, list[str]]:
    """Return the changes by rounding with the mistakes in them, and the names of the weights that they give."""
    names = [name for name in differ if a[name].dim() >= 2]
    one, other = ({name: side[name].reshape(-1, side[name].shape[-1]).cpu() for name in names} for side in (a, b))
    for coarse, fine, rounded in (("B", one, other), ("A", other, one)):
        if found := found_roundings(fine, rounded):
            return KnownChanges(*_roundings_of(found), coarse=coarse), list(found)
    return None, []


def _roundings_of(found: Mapping[str, FoundRounding]) -> tuple[tuple[KnownChange, ...], tuple[WeightFault, ...]]:
    groups: dict[str, list[str]] = {}
    for name, rounding in found.items():
        groups.setdefault(rounding.grid.name, []).append(name)
    changes = []
    for kind, members in groups.items():
        right = [found[name] for name in members if not found[name].fault] or [found[name] for name in members]
        mean_square = (sum(getattr(one, field) ** 2 for one in right) / len(right) for field in ("size", "steps"))
        size, steps = (value**0.5 for value in mean_square)
        changes.append(KnownChange(kind, tuple(members), size=size, steps=steps))
    faults: dict[tuple[str, float | None], list[str]] = {}
    for name, rounding in found.items():
        if rounding.fault:
            factor = None if rounding.factor is None else float(f"{rounding.factor:.2g}")
            faults.setdefault((rounding.fault, factor), []).append(name)
    told = tuple(
        WeightFault(
            f"rounding_{fault}", tuple(names), found[names[0]].factor,
            tuple(found[name].other for name in names) if fault == "scales" else (),
            share=max(found[name].size for name in names),
        )
        for (fault, _), names in faults.items()
    )  # fmt: skip
    return tuple(changes), told


def _faults(found: Mapping[str, FoundUpdate], adapter: Adapter) -> tuple[WeightFault, ...]:
    groups: dict[tuple[Any, ...], list[str]] = {}
    for name, one in found.items():
        if one.fault:
            groups.setdefault((one.fault, round(one.factor, 3), one.dtype), []).append(name)
    faults = []
    for (fault, _, dtype), names in groups.items():
        first = found[names[0]]
        codes = codes_of(first.factor, adapter.updates[names[0]]) if fault == "factor" else ()
        others = tuple(found[name].other for name in names) if fault == "elsewhere" else ()
        share = max(found[name].share for name in names) or None
        name = "adapter_not_loaded" if "none" in codes else f"adapter_{fault}"
        factor = first.factor if fault == "factor" else None
        faults.append(WeightFault(name, tuple(names), factor, others, dtype, share, codes))
    return tuple(faults)


# -- numbers in a copy -------------------------------------------------------------------------------------------------


def with_weights(side: LoadedModel, numbers: Mapping[str, Tensor]) -> LoadedModel:
    """Return a side with other numbers in some weights; the rest is shared, and the given module stays as it is."""
    if not numbers:
        return side
    memo: dict[int, Any] = {id(p): p for p in (*side.module.parameters(), *side.module.buffers())}
    for name, value in numbers.items():
        own = side.module.get_parameter(name)
        memo[id(own)] = nn.Parameter(value.detach().to(own.device, own.dtype), requires_grad=own.requires_grad)
    return replace(side, module=copy.deepcopy(side.module, memo))


def _with_costs(known: KnownChanges, a: LoadedModel, numbers: Mapping[str, Tensor]) -> KnownChanges:
    """Return the changes with what they cost at the output: all together, and each kind of weight alone."""
    start = _output(a)
    if start is None or not numbers:
        return known

    def cost(names: Iterable[str]) -> float | None:
        then = _output(with_weights(a, {name: numbers[name] for name in names}))
        return None if then is None else float((then - start).norm() / start.norm().clamp(min=1e-300))

    changes = []
    for change in known.changes:
        roles: dict[str, list[str]] = {}
        for name in change.weights:
            if name in numbers:
                roles.setdefault(role_of(name), []).append(name)
        each = {role: cost(names) for role, names in list(roles.items())[:_MOST_COSTS]}
        costs = sorted(((role, x) for role, x in each.items() if x is not None), key=lambda item: -item[1])
        changes.append(replace(change, costs=tuple(costs)))
    return replace(known, changes=tuple(changes), cost=cost(numbers))


def _output(side: LoadedModel) -> Tensor | None:
    with suppress(*MODEL_ERRORS), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        every = tensors_of(call(side.module, side.inputs))
        return next(iter(every.values())).double().flatten().cpu()
    return None


def _with_plain_layers(side: LoadedModel) -> LoadedModel:
    twin = plain_twin(side.module)
    adapter = side.adapter or adapter_of(side.module)
    notes = side.notes
    if twin.layers:
        notes += (Message("compare.known.plain", count=twin.layers, off=f"{twin.off:.1g}"),)
    if twin.left:
        notes += (Message("compare.known.left", count=len(twin.left), first=repr(twin.left[0])),)
    return replace(side, module=twin.module, adapter=adapter, notes=notes)


def _matrices(module: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.detach()
        for name, p in module.named_parameters()
        if type(p) is nn.Parameter and p.is_floating_point() and not p.is_meta and p.numel()
    }


def _differ(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and not bool((one.to(other.dtype) == other.to(one.device)).all())
