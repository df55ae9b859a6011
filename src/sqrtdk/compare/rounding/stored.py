"""Rounding that is no difference: that of a file's weights, and that of an engine beside its dtypes.

A GGUF file in Q4_0 holds each weight to about 8%. Compared with the model that it was made from, every weight differs,
and nothing else can be seen. So that model is compared with the file's own numbers in place of those of its weights
that they are roundings of: the same matrix by the sums of its columns, which no order of rows changes, and then row
for row. A weight that is further off than its dtype rounds stays as it is, and is a difference.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_parameters
from sqrtdk.messages import Message, joined
from sqrtdk.models.records import LoadedModel

# Largest relative error of a matrix, by the beginning of the dtype's name: about twice that of normal numbers.
_ERRORS = {"f16": 1e-3, "bf16": 5e-3, "q8": 0.015, "q6": 0.04, "q5": 0.08, "q4": 0.18, "iq4": 0.18, "mxfp4": 0.25,
           "nvfp4": 0.25, "q3": 0.3, "iq3": 0.3, "q2": 0.5, "iq2": 0.5, "tq": 0.6, "iq1": 0.7, "q1": 0.7}  # fmt: skip
_SUMS_APART = 2.0  # sums of columns differ by this many times the error of the matrix, at most
_SIGNS = 16  # sums of rows by which a row is recognised
_MOST_ROWS_MATCHED = 2**15  # of a matrix whose rows are looked for in another order


def without_own_rounding(side: LoadedModel) -> LoadedModel:
    """Return a side that computes without the rounding that its program does beside its dtypes, and a note on it.

    ggml rounds the cache to float16, and what enters a product to 8 bits. That hides small differences, and would be
    named beside each of them.

    Args:
        side: any side; one without such rounding is returned as it is.
    """
    gap = getattr(side.module, "own_rounding", 0.0)
    if not gap:
        return side
    shared = {id(p): p for p in (*side.module.parameters(), *side.module.buffers())}  # the copy holds the same numbers
    module: Any = copy.deepcopy(side.module, shared)
    module.rounds = False
    note = Message("frontends.own_rounding", gap=f"{gap:.2g}")
    return replace(side, module=module, notes=(*side.notes, note))


def rounded_alike(a: LoadedModel, b: LoadedModel) -> tuple[LoadedModel, LoadedModel]:
    """Return both sides, one with weights rounded as the other's file stores them, and a note on it.

    Args:
        a: side A.
        b: side B; the sides are returned as they are unless exactly one of them is of such a file.
    """
    stored = [getattr(side.module, "stored_types", None) or {} for side in (a, b)]
    if bool(stored[0]) == bool(stored[1]):
        return a, b
    if stored[0]:
        return a, _rounded(b, a, "A", stored[0])
    return _rounded(a, b, "B", stored[1]), b


def _rounded(side: LoadedModel, file: LoadedModel, other: str, types: Mapping[str, str]) -> LoadedModel:
    coarse = {name: error for name, kind in types.items() if (error := _error(kind))}
    matrices = [(name, p.detach()) for name, p in named_parameters(file.module) if name in coarse and p.dim() == 2]
    matrices += [(name, p.detach()) for name, p in named_parameters(file.module) if name in coarse and p.dim() == 3]
    changed: dict[str, Tensor] = {}
    used: set[str] = set()
    for name, own in named_parameters(side.module):
        if own.dim() < 2 or not own.is_floating_point() or own.is_meta:
            continue
        found = _found(own.detach(), matrices, coarse)
        if found is not None:
            used.add(found[0])
            changed[name] = found[1].to(own.dtype)
    if not changed:
        return side
    module: nn.Module = copy.deepcopy(side.module)
    with torch.no_grad():
        for name, value in changed.items():
            module.get_parameter(name).copy_(value)
    kinds = joined(sorted({types[name] for name in used}), "comma")
    note = Message("frontends.rounded_weights", count=len(changed), other=other, types=kinds)
    return replace(side, module=module, notes=(*side.notes, note))


def _error(kind: str) -> float:
    return next((error for begin, error in _ERRORS.items() if kind.startswith(begin)), 0.0)


def _found(own: Tensor, matrices: list[tuple[str, Tensor]], errors: Mapping[str, float]) -> tuple[str, Tensor] | None:
    """Return the name and the numbers of the stored matrix that is a rounding of this one, in its order of rows."""
    best: tuple[float, str, Tensor] | None = None
    for name, stored in matrices:
        for turned in (stored, stored.mT):
            if turned.shape != own.shape or (turned is not stored and own.shape[-1] == own.shape[-2] and best):
                continue
            sums, ours = turned.sum(-2).float(), own.sum(-2).float()
            apart = float((sums - ours).norm() / ours.norm().clamp(min=1e-30))
            if apart <= _SUMS_APART * errors[name] and (best is None or apart < best[0]):
                best = apart, name, turned
    if best is None:
        return None
    _, name, stored = best
    numbers = stored if _apart(own, stored) <= errors[name] else _in_order(own, stored)
    return (name, numbers) if numbers is not None and _apart(own, numbers) <= errors[name] else None


def _apart(own: Tensor, stored: Tensor) -> float:
    return float((stored.float() - own.float()).norm() / own.float().norm().clamp(min=1e-30))


def _in_order(own: Tensor, stored: Tensor) -> Tensor | None:
    """Return the rows of `stored`, each at the place of the row of `own` that it is nearest to."""
    if own.dim() != 2 or own.shape[0] > _MOST_ROWS_MATCHED:
        return None
    signs = torch.randn(own.shape[1], _SIGNS, generator=torch.Generator().manual_seed(0))
    nearest = torch.cdist(own.float().cpu() @ signs, stored.float().cpu() @ signs).argmin(-1)
    if len(set(nearest.tolist())) < own.shape[0]:
        return None
    return stored[nearest.to(stored.device)]
