"""Which entries the ranks drop: with a seed of its own, a rank must drop others of its tokens than another rank of its.

A run in train mode shows it: a dropout takes a number that is not 0 and gives 0. Dropout inside a fused kernel shows
nothing, and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sqrtdk._wrappers import named_modules
from sqrtdk.laws.processes.inputs_of_ranks import WholeInputs
from sqrtdk.laws.processes.runs import RunRecord


def dropouts_of(module: nn.Module) -> set[str]:
    """Return the paths of the modules that drop entries."""
    return {path for path, part in named_modules(module) if isinstance(part, nn.Dropout) and part.p > 0}


def has_other_tokens(whole: WholeInputs, one: int, other: int) -> bool:
    """Return whether two ranks hold other tokens or samples; ranks with the same must drop the same."""
    if whole.places is not None:
        return not torch.equal(whole.places.of_ranks[one], whole.places.of_ranks[other])
    return whole.batch


def dropped_alike(records: Sequence[RunRecord], drops: set[str], pairs: Sequence[tuple[int, int]]) -> str | None:
    """Return the first dropout at which all pairs of ranks drop the same entries; None if there is none.

    Args:
        records: Runs of all ranks in train mode, each with a seed of its own.
        drops: Paths of the modules that drop entries.
        pairs: Ranks that have other tokens.
    """
    dropped = [_dropped(record, drops) for record in records]
    for place, first in dropped[0].items():
        of_ranks = [calls.get(place) for calls in dropped]
        if any(drop is None for drop in of_ranks):
            continue
        alike = all(_same(of_ranks[a], of_ranks[b]) for a, b in pairs)
        if alike and bool(first.any()) and not bool(first.all()):
            return place[0]
    return None


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    return one is not None and other is not None and torch.equal(one, other)


def _dropped(record: RunRecord, drops: set[str]) -> dict[tuple[str, int], Tensor]:
    """Return by call of a dropout which entries it set to 0."""
    return {
        (path, index): (gives == 0) & (takes != 0)
        for path, index, takes, gives in record["calls"]
        if path in drops and takes is not None and gives is not None and takes.shape == gives.shape
    }
