"""Several changes of the inputs as rows of one run, where samples are known not to see one another.

Only the first tokens are run so (`first_tokens`): what looks broken there is asked of the whole inputs, each change in
a run of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sqrtdk.laws.subject import Outputs, Subject


def runs_of(subject: Subject, changes: Sequence[Mapping[str, Any]]) -> list[Outputs]:
    """Return the outputs for each of several changes of the inputs, in their order.

    If samples are known not to influence one another, all are run as the rows of one batch.

    Args:
        subject: The model.
        changes: For each run, the inputs that are replaced, by name.

    Raises:
        NotAsked: The model raises on these inputs.
    """
    inputs = [{**subject.inputs, **one} for one in changes]
    together = _stacked(inputs) if subject.rows_apart else None
    if together is not None:
        parts = _parted(subject.over(together).base, len(changes), subject.base)
        if parts is not None:
            subject.rows += zip(inputs, parts, strict=True)
            return parts
    return [subject.run(one) for one in changes]


def _stacked(inputs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the inputs one below the other, or None if they can't be stacked."""
    stacked: dict[str, Any] = {}
    for name in dict.fromkeys(name for one in inputs for name in one):
        values = [one.get(name) for one in inputs]
        tensors = [value for value in values if isinstance(value, Tensor) and value.dim() > 1]
        if len(tensors) == len(values):
            if len({(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
                return None
            stacked[name] = torch.cat(tensors)
        elif any(isinstance(value, Tensor) or value != values[0] for value in values):
            return None
        else:
            stacked[name] = values[0]
    return stacked


def _parted(outputs: Outputs, count: int, base: Outputs) -> list[Outputs] | None:
    """Return the outputs of each part of the rows, or None if some output has no row for each sample."""
    shapes = {name: (x.shape[0] * count, *x.shape[1:]) if x.dim() else () for name, x in base.items()}
    if shapes != {name: tuple(x.shape) for name, x in outputs.items()} or () in shapes.values():
        return None
    return [{name: x.chunk(count)[place] for name, x in outputs.items()} for place in range(count)]
